"""What the demonstration says of itself, and what it leaves behind."""

from __future__ import annotations

import contextlib
import shutil
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.demo import Demo, _directory, _text

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
        islands=[island, island], joined=True, killed=False, left=False, _leaver=lambda: None
    )
    return cast(Demo, made)


@pytest.mark.parametrize("members", [1, 2])
def test_rounds_of_one_island_alone_are_no_merging(members: int) -> None:
    summary = Demo._summary(demo(members), 12.0)
    text = _text(summary)
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
