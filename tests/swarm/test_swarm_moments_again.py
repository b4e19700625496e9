"""A rank is killed: all ranks start again, with the moments of the newest checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from swarm_kit import Island, islands, settings, until

from node.trainer.optim import REENTRY_STEPS

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

RUN = {"inner_steps": 20, "total_rounds": 500, "eval_every": 0, "inner__warmup_steps": 1}


def rank_of(island: Island, rank: int) -> int:
    """The process of a rank."""
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        words = place.read_bytes().split(b"\0") if place.exists() else []
        mine = any(word.startswith(str(island.dir).encode()) for word in words)
        if mine and b"--rank" in words and words[words.index(b"--rank") + 1] == b"%d" % rank:
            return int(place.parent.name)
    raise AssertionError(f"rank {rank} does not run")


def test_ranks_that_are_started_again_go_on_with_moments(tmp_path: Path) -> None:
    with islands(tmp_path) as made:
        island = made.new("--layout", "fsdp=2", "--checkpoint-every", "1", *settings(**RUN))
        until(lambda: island.events("checkpoint"), 120, "a checkpoint")
        before = island.events("step")[-1]
        os.kill(rank_of(island, 1), signal.SIGKILL)
        until(lambda: island.events("problem"), 60, "the death to be seen")
        until(lambda: island.events("step")[-1]["step"] > before["step"] + 1, 120, "more steps")
        problem, again = island.events("problem")[0], island.events("step")[-1]
        island.signal(signal.SIGINT)
        assert island.await_end(60) == 0, island.tail()
    assert (problem["code"], problem["fatal"]) == ("E405", False)
    assert again["step"] - before["step"] < REENTRY_STEPS
    assert again["lr"] == pytest.approx(before["lr"], rel=0.1), "it does not warm up again"
