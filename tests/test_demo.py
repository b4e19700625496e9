"""What the demonstration says of itself, and what it leaves behind."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.demo import MIN_ROUNDS, TOO_LONG, Demo, _directory
from node.demo_summary import as_text, summary_of

ROUND = {
    "state": "ab",
    "validation_loss": None,
    "consensus": None,
    "sent_bytes": 500,
    "utilisation": 0.5,
}


def demo(members: int) -> Demo:
    """One that is over: two islands have applied two rounds of ``members`` each."""
    rounds = [{**ROUND, "round": number, "members": members} for number in range(2)]
    island: Any = SimpleNamespace(
        name="island",
        events=lambda kind: rounds if kind == "round" else [],
        last_round=lambda: 1,
        starts=1,
    )
    made: Any = SimpleNamespace(
        islands=[island, island], joined=True, killed=False, left=False, leaver=lambda: None
    )
    return cast(Demo, made)


@pytest.mark.parametrize("members", [1, 2])
def test_rounds_of_one_island_alone_are_no_merging(members: int) -> None:
    summary = summary_of(demo(members), 12.0)
    text = as_text(summary)
    assert summary.state_digests_equal
    assert summary.rounds_merged == (2 if members > 1 else 0)
    assert ("bytes a parameter" in text) == (members > 1)
    assert ("bit for bit" in text) == (members > 1)
    assert ("no round merged more than one island" in text) == (members == 1)


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError], ids=str)
def test_only_what_explains_a_failure_is_left_behind(end: type[BaseException] | None) -> None:
    with contextlib.suppress(KeyboardInterrupt, RuntimeError), _directory() as root:
        (root / "island-1").mkdir()
        if end is not None:
            raise end
    assert root.exists() == (end is RuntimeError)
    shutil.rmtree(root, ignore_errors=True)


def planned(seconds: float, already: float, root: Path) -> Demo:
    """One that began ``already`` seconds ago."""
    return Demo(seconds, 3, 0, root, time.monotonic() - already, quiet=True)


def test_rounds_are_planned_for_what_is_left_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.demo.step_seconds", lambda: 0.02)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    whole, late = planned(90, 0, tmp_path), planned(90, 30, tmp_path)
    assert MIN_ROUNDS < late.rounds < whole.rounds
    round_s = 90 / whole.rounds
    for demo in (whole, late):
        assert 90 - round_s < demo.takes_s <= 90 + 1
    least = planned(5, 0, tmp_path)
    assert least.rounds == MIN_ROUNDS
    assert least.takes_s > TOO_LONG * 5
