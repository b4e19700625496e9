"""Islands that lay the same model out differently, as real processes in one swarm."""

from __future__ import annotations

from pathlib import Path

import pytest
from swarm_kit import digests, islands, settings

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(500)]

ROUNDS = 10
RUN = {
    "inner_steps": 12,
    "total_rounds": ROUNDS,
    "min_grace_s": 20,  # all of them wait for the slowest
    "grace_fraction": 10,
    "data__batch_size": 4,
}
LAYOUTS = ("fsdp=2", "tp=2", "pp=2", "single")


def test_islands_of_different_layouts_end_with_the_same_bits(tmp_path: Path) -> None:
    with islands(tmp_path) as made:
        first, *others = LAYOUTS
        swarm = [made.new("--layout", first, *settings(**RUN))]
        address = swarm[0].await_up()
        swarm += [made.new("--peers", address, "--layout", layout) for layout in others]
        for island in swarm:
            assert island.await_end(400) == 0, island.tail()
    found = digests(swarm)
    assert found.keys() == set(range(ROUNDS))
    assert {r: states for r, states in found.items() if len(states) != 1} == {}
    assert len({island.rounds()[ROUNDS - 1]["state"] for island in swarm}) == 1
    last = [island.rounds()[ROUNDS - 1] for island in swarm]
    assert max(done["members"] for done in last) == len(LAYOUTS)
    for island, layout in zip(swarm, LAYOUTS, strict=True):
        logs = list((island.dir / "logs").glob("trainer-rank*.log"))
        assert len(logs) == (1 if layout == "single" else 2)
    losses = [done["validation_loss"] for done in swarm[0].events("round")]
    assert losses[-1] < losses[0] - 0.3
