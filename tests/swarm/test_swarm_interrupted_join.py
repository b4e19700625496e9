"""A newcomer that is killed in the middle of its download: the next start goes on there."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_kit import Record, islands, settings, until

from node.checkpoints.checkpoint import FETCHED_PREFIX

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

RUN = settings(  # rounds of some ten seconds: a state takes fifty on its way
    inner_steps=1000, total_rounds=1000, min_grace_s=1, data__batch_size=1, data__seq_len=32,
    model__d_model=128, model__n_layers=3, model__d_ff=512, model__max_seq_len=32,
    evaluation__sequences=1,
)  # fmt: skip


def test_a_newcomer_that_is_killed_goes_on_with_its_download(
    tmp_path: Path, record_property: Record
) -> None:
    with islands(tmp_path) as swarm:
        first = swarm.new(*RUN, "--max-upload", "1Mbit")
        address = first.await_up()
        first.await_round(1, 100)  # of round 0 nothing is kept
        newcomer = swarm.new("--peers", address, "--checkpoint-every", "1")
        place = newcomer.dir / "checkpoints"
        state = place / f"{FETCHED_PREFIX}state-0"

        def some_came() -> bool:
            assert newcomer.running, newcomer.tail()
            there = state.stat() if state.exists() else None
            return there is not None and there.st_blocks * 512 > there.st_size / 2

        until(some_came, 200, "half of the state", newcomer.tail)
        size = state.stat().st_size
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
