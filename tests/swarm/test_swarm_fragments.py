"""A model merged in fragments by real processes: streaming, with kills in between."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from swarm_kit import Island, Record, islands, settings, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

FRAGMENTS = 4
RUN = {
    "inner_steps": 40,
    "fragments": FRAGMENTS,
    "total_rounds": 500,
    "min_grace_s": 2.0,
    "data__batch_size": 4,
    "model__n_layers": 4,
    "eval_every": 2,
}


def states(swarm: list[Island]) -> dict[tuple[int, int], set[str]]:
    """The states that were reported after each round of each fragment, in all lives."""
    found: dict[tuple[int, int], set[str]] = {}
    for island in swarm:
        for event in island.events("round"):
            found.setdefault((event["fragment"], event["round"]), set()).add(event["state"])
    return found


def newest(island: Island) -> list[int]:
    """The newest round of each fragment in the present life, −1 for none."""
    rounds = [-1] * FRAGMENTS
    for event in island.since_start("round"):
        rounds[event["fragment"]] = max(rounds[event["fragment"]], event["round"])
    return rounds


def merged_by(island: Island, count: int) -> bool:
    """Whether the newest round of every fragment has work of so many islands."""
    last: dict[int, dict[str, Any]] = {e["fragment"]: e for e in island.since_start("round")}
    return len(last) == FRAGMENTS and all(event["members"] == count for event in last.values())


def test_three_islands_stream_four_fragments_and_one_is_killed(
    tmp_path: Path, record_property: Record
) -> None:
    """Every fragment has the same digest at all, and who was killed has its share again."""
    with islands(tmp_path) as made:
        first = made.new(*settings(**RUN))
        address = first.await_up()
        swarm = [first, made.new("--peers", address), made.new("--peers", address)]
        until(lambda: merged_by(first, 3), 120, "three in every fragment", first.tail)
        victim = swarm[2]
        until(lambda: victim.events("checkpoint"), 60, "a checkpoint", victim.tail)
        victim.kill()
        killed = time.time()
        before = newest(first)
        until(
            lambda: all(now >= then + 3 for now, then in zip(newest(first), before, strict=True)),
            90,
            "every fragment goes on",
            first.tail,
        )
        record_property("on after s", time.time() - killed)
        made.come_back(victim)
        until(lambda: merged_by(first, 3), 120, "all three again", first.tail)
        goal = [number + 2 for number in newest(first)]
        for island in swarm:
            until(
                lambda island=island: all(
                    now >= then for now, then in zip(newest(island), goal, strict=True)
                ),
                120,
                f"{island.name} in every fragment",
                island.tail,
            )
        for island in swarm:
            island.signal(2)
        for island in swarm:
            assert island.await_end(40) == 0, island.tail()
    found = states(swarm)
    assert {where: some for where, some in found.items() if len(some) != 1} == {}
    common = {
        where
        for where in found
        if all(
            any((e["fragment"], e["round"]) == where for e in island.events("round"))
            for island in swarm
        )
    }
    assert {fragment for fragment, _ in common} == set(range(FRAGMENTS))
    losses = [e["validation_loss"] for e in first.events("round") if e["validation_loss"]]
    assert losses[-1] < losses[0] - 0.3
    # fragments take turns: no two of them are merged at the same moment all the time
    order = [e["fragment"] for e in first.events("round")]
    record_property("order", order[:12])
    assert all(abs(order.count(p) - order.count(0)) <= 3 for p in range(FRAGMENTS))
