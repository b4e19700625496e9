"""Who is killed in the middle of a download of the state: the next start goes on there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from swarm_kit import Island, Record, islands, settings, until

from node.checkpoints.names import FETCHED_PREFIX

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(500)]

SMALL: dict[str, Any] = {
    "total_rounds": 1000, "min_grace_s": 1, "data__batch_size": 1, "data__seq_len": 32,
    "model__d_model": 128, "model__n_layers": 3, "model__d_ff": 512, "model__max_seq_len": 32,
    "evaluation__sequences": 1,
}  # fmt: skip
RUN = settings(inner_steps=1000, **SMALL)  # rounds of ten seconds: a state takes fifty on its way

AWAY = 20  # rounds


def half_of_the_state(island: Island) -> int:
    """Wait until it has downloaded so much; the bytes of the whole."""
    state = island.dir / "checkpoints" / f"{FETCHED_PREFIX}state-0"

    def some_came() -> bool:
        assert island.running, island.tail()
        there = state.stat() if state.exists() else None
        return there is not None and there.st_blocks * 512 > there.st_size / 2

    until(some_came, 200, "half of the state", island.tail)
    return state.stat().st_size


def test_a_newcomer_that_is_killed_goes_on_with_its_download(
    tmp_path: Path, record_property: Record
) -> None:
    with islands(tmp_path) as swarm:
        first = swarm.new(*RUN, "--max-upload", "1Mbit")
        address = first.await_up()
        first.await_round(1, 100)  # of round 0 nothing is kept
        newcomer = swarm.new("--peers", address, "--checkpoint-every", "1")
        place = newcomer.dir / "checkpoints"
        size = half_of_the_state(newcomer)
        newcomer.kill()
        newcomer.start("--peers", address, "--checkpoint-every", "1")
        newcomer.await_round(0, 200)
        texts = [event["text"] for event in newcomer.since_start("join")]
        assert any("are here from before" in text for text in texts), texts
        came = sum(
            count
            for event in newcomer.since_start("join")
            for count in event.get("sources", {}).values()
        )
        record_property("came", came / size)
        assert 0 < came < 0.6 * size
        until(lambda: list(place.glob("ckpt-*")), 100, "a checkpoint", newcomer.tail)
        until(lambda: not list(place.glob(f"{FETCHED_PREFIX}*")), 10, "no more on disk")


def test_a_member_that_is_killed_while_it_catches_up_goes_on_with_its_download(
    tmp_path: Path, record_property: Record
) -> None:
    """It was away for so many rounds that nobody can have it replay them."""
    with islands(tmp_path) as swarm:
        often = ("--checkpoint-every", "1", "--max-upload", "6Mbit")
        first = swarm.new(*settings(inner_steps=100, **SMALL), *often)
        address = first.await_up()
        second, member = (swarm.new("--peers", address, *often) for _ in range(2))
        swarm.await_office(first, 3, 150)
        until(lambda: member.events("checkpoint"), 100, "a checkpoint", member.tail)
        member.kill()
        since = max(first.rounds())
        first.await_round(since + AWAY, 300)
        member.start("--resume", "--peers", address, *often)
        size = half_of_the_state(member)
        member.kill()
        member.start("--resume", "--peers", address, *often)

        def goes_on() -> bool:
            told = (event["text"] for event in member.since_start("notice"))
            return any("are here from before" in text for text in told)

        until(goes_on, 100, "it goes on with the download", member.tail)
        until(lambda: member.since_start("round"), 200, "a round", member.tail)
        record_property("state bytes", size)
        goal = max(first.rounds()) + 2
        for island in (first, second, member):
            island.await_round(goal, 100)
