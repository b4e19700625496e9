"""Newcomers of real swarms that begin with another island's moments, or say why they do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_kit import Island, islands, settings, until

from node.trainer.optim import REENTRY_STEPS

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

RUN = {
    "inner_steps": 20,
    "total_rounds": 5000,
    "min_grace_s": 0.5,
    "inner__schedule": "constant",
    "inner__warmup_steps": 0,  # else every island's own first steps are small ones
}
WARM = REENTRY_STEPS + 5


def said(island: Island, words: str) -> str:
    """The event that has these words, once it is there."""

    def found() -> str:
        assert island.running, island.tail()
        texts = [event["text"] for event in island.events("notice")]
        return next((text for text in texts if words in text), "")

    return str(until(found, 90, words, island.tail))


def rates(island: Island) -> list[float]:
    """Learning rates of its first inner steps."""
    until(lambda: len(island.events("step")) >= 3, 90, "inner steps", island.tail)
    return [event["lr"] for event in island.events("step")[:3]]


def trained(island: Island) -> None:
    """Wait until its moments are warm."""
    until(lambda: len(island.events("step")) > WARM, 90, "warm moments", island.tail)


@pytest.mark.parametrize("mode", ["diloco", "gossip"])
def test_a_newcomer_takes_the_moments_of_another_layout(tmp_path: Path, mode: str) -> None:
    """The donor shares the model between two ranks; the newcomer has one, and is merged."""
    with islands(tmp_path) as made:
        first = made.new("--nproc", "2", *settings(mode=mode, **RUN))
        address = first.await_up()
        trained(first)
        second = made.new("--peers", address, "--moments", "donor")
        text = said(second, "begins with a donor's moments")
        assert str(first.peer) in text
        full = rates(first)[-1]
        assert rates(second) == pytest.approx([full] * 3)  # its learning rate does not warm up
        if mode == "diloco":
            made.await_office(first, 2)
        for island in (first, second):
            assert not list(island.dir.glob("moments.*"))
            assert island.running, island.tail()
            assert "error" not in island.tail()


def test_who_gets_none_says_so_and_warms_up(tmp_path: Path) -> None:
    """Where the run keeps none, and where nobody asked for a donor's."""
    with islands(tmp_path) as made:
        first = made.new(*settings(inner__keep_moments="false", **RUN))
        address = first.await_up()
        trained(first)
        second = made.new("--peers", address, "--moments", "donor")
        assert "none that another could use" in said(second, "no donor's moments")
        full = rates(first)[-1]
        assert rates(second) == pytest.approx([full * n / REENTRY_STEPS for n in (1, 2, 3)])
        made.await_office(first, 2)
        third = made.new("--peers", address)
        assert rates(third)[0] == pytest.approx(full / REENTRY_STEPS)
        assert not [e for e in third.events("notice") if "moments" in e["text"]]
