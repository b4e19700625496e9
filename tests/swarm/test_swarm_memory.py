"""Memory that runs out on one of several ranks, in real processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from places import KITS
from swarm_kit import Island, settings

from node.trainer.settings import SETTINGS_FILE

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

RUN = settings(
    inner_steps=3, total_rounds=2, min_grace_s=30, data__batch_size=8, evaluation__sequences=8
)


class Starved(Island):
    """Rank 1 has room for two sequences at a time."""

    program = (str(KITS / "island_of_ranks.py"),)


def test_the_micro_batch_is_halved_and_the_batch_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A share of four sequences a rank does not fit, one of two does."""
    monkeypatch.setenv("RANK_PROGRAM", str(KITS / "starved_rank.py"))
    plain, starved = Island("plain", tmp_path), Starved("starved", tmp_path)
    try:
        for island in (plain, starved):
            island.start("--nproc", "2" if island is starved else "1", *RUN)
            assert island.await_end(140) == 0, island.tail()
    finally:
        for island in (plain, starved):
            island.kill()
    [problem] = starved.events("problem")
    assert (problem["code"], problem["fatal"]) == ("E401", False)
    assert "rank 1 ran out of memory" in problem["what"]
    written = json.loads((starved.dir / "logs" / SETTINGS_FILE).read_text())
    assert written["micro_batch"] == 2
    steps, expected = starved.events("step"), plain.events("step")
    assert {step["tokens"] for step in steps} == {step["tokens"] for step in expected}
    assert abs(steps[0]["loss"] - expected[0]["loss"]) < 5e-5
    assert len(starved.rounds()) == 2
    again = Starved("again", tmp_path)
    try:
        again.dir.mkdir(exist_ok=True)
        shutil.copy(starved.dir / "micro-batch.json", again.dir)
        again.start("--nproc", "2", *RUN)
        assert again.await_end(140) == 0, again.tail()
    finally:
        again.kill()
    assert not again.events("problem")
    assert any("2 sequences at a time" in notice["text"] for notice in again.events("notice"))
