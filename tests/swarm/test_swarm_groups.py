"""Real nodes at two sites: training with groups, and a relay that is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from bench_kit import benched
from swarm_kit import digests, islands, settings, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

RUN = {
    "inner_steps": 40,
    "total_rounds": 500,
    "min_grace_s": 0.5,
    "data__batch_size": 4,
    "groups": "region",
}


def test_two_sites_train_together_and_lose_a_member(tmp_path: Path) -> None:
    """Every member relays some part, so whoever is killed was a relay."""
    with islands(tmp_path) as made:
        first = made.new("--region", "north", *settings(**RUN))
        address = first.await_up()
        swarm = [first]
        for region in ("north", "south", "south"):
            swarm.append(made.new("--peers", address, "--region", region))
        made.await_office(first, 4)
        here = max(first.rounds())
        first.await_round(here + 3, 60)
        victim = swarm[3]
        victim.kill()
        at = max(first.rounds())
        others = swarm[:3]
        for island in others:
            island.await_round(at + 3, 60)
        assert all(island.running for island in others)
        made.come_back(victim)

        since = max(first.rounds())

        def back() -> bool:
            later = [done for done in first.since_start("round") if done["round"] > since]
            return any(done["members"] == 4 for done in later)

        until(back, 90, "the fourth is back", victim.tail)
        for island in swarm:
            island.signal(signal.SIGINT)
        for island in swarm:
            assert island.await_end(40) == 0, island.tail()
    found = digests(swarm)
    assert {r: states for r, states in found.items() if len(states) != 1} == {}
    assert {done["members"] for done in first.events("round")} >= {3, 4}


def bench(tmp_path: Path, groups: str, members: int) -> list[list[dict[str, object]]]:
    """Rounds of so many processes of ``node bench``, two at one site and all others at another."""
    words = ["--size", "400000", "--codec", "int8", "--rounds", "3", "--max-group", "4"]
    regions = ["north"] * 2 + ["south"] * (members - 2)
    each = [[*words, "--groups", groups, "--region", region] for region in regions]
    return benched(each, tmp_path, within=120)


@pytest.mark.parametrize(("groups", "members"), [("region", 4), ("none", 4), ("grid", 6)])
def test_processes_average_at_two_sites_and_in_a_grid(
    tmp_path: Path, groups: str, members: int
) -> None:
    taken = bench(tmp_path, groups, members)
    for round_ in range(3):
        ours = [member[round_] for member in taken]
        assert len({one["digest"] for one in ours}) == 1
        assert {(one["contributors"], one["merged"]) for one in ours} == {(members, 1.0)}
