"""The machine of one of three islands was paused by its hypervisor: real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from places import KITS
from swarm_kit import Island, Record, islands, settings, until

from node.entry.timekeeping import LOOK_S

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PAUSED_S = 600.0
RUN = {"inner_steps": 10, "total_rounds": 100_000, "min_grace_s": 0.5, "data__batch_size": 4}


def test_it_puts_its_clock_right_and_contributes_again(
    tmp_path: Path, record_property: Record
) -> None:
    with islands(tmp_path) as made:
        first = made.new(*settings(**RUN))
        address = first.await_up()
        made.new("--peers", address)
        paused = Island("paused", tmp_path)
        paused.program = (str(KITS / "paused_island.py"),)
        made.all.append(paused)
        paused.start("--peers", address)
        paused.await_up()

        def merged() -> int:
            """Rounds that the first one has seen with work of the paused one."""
            rounds = first.rounds().values()
            return sum("tokens" in one["islands"].get(paused.peer, {}) for one in rounds)

        until(lambda: merged() >= 3, 120, "it contributes", paused.tail)
        (paused.dir / "paused").write_text(str(PAUSED_S))
        until(lambda: paused.events("clock"), 60, "its clock is put right", paused.tail)
        (put,) = paused.events("clock")
        assert put["seconds"] == pytest.approx(PAUSED_S, abs=1.0)
        assert put["time"] == pytest.approx(first.events()[-1]["time"], abs=LOOK_S + 5.0)
        before = merged()
        until(lambda: merged() >= before + 5, 60, "it contributes again", paused.tail)
        record_property("text", put["text"])
        assert all(one.running for one in made.all)
