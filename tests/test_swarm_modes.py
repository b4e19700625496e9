"""Every mode over certified rounds in real processes, with a kill -9 and a resume in each."""

from __future__ import annotations

from pathlib import Path

import pytest
from mode_kit import agree, certified, falls, merged_tokens, slowed, trained_tokens
from swarm_kit import Record, islands, settings, until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

SMALL = {"data__batch_size": 4, "eval_every": 1}


def test_asynchronous_rounds_wait_for_nobody_and_use_all_tokens(
    tmp_path: Path, record_property: Record
) -> None:
    """One of four is 4x slower: it holds nobody up, and all it learns is merged."""
    run = {"mode": "async", "inner_steps": 20, "dynamic_steps": "false", "total_rounds": 5000}
    with islands(tmp_path) as made:
        first = made.new(*settings(**run, **SMALL))
        address = first.await_up()
        swarm = [first, *(made.new("--peers", address) for _ in range(3))]
        slow, victim = swarm[3], swarm[2]

        def merged(count: int) -> bool:
            found = merged_tokens(certified(first))
            return all(found[island.peer] >= count for island in swarm)

        for island in swarm:
            until(lambda island=island: island.since_start("step"), 90, "it trains", island.tail)
        with slowed(slow, 4):
            before, began = merged_tokens(certified(first)), trained_tokens(slow)
            fast_before = before[first.peer]

            def slow_has_merged(times: int) -> bool:
                return merged_tokens(certified(first))[slow.peer] - before[slow.peer] >= (
                    times * 20 * 4 * 128
                )

            until(lambda: slow_has_merged(3), 120, "three contributions of the slow", slow.tail)
            after = merged_tokens(certified(first))
            share = (after[slow.peer] - before[slow.peer]) / (after[first.peer] - fast_before)
            record_property("slow island's tokens of a fast one's", share)
            trained = trained_tokens(slow) - began
            record_property(
                "of its tokens merged", (after[slow.peer] - before[slow.peer]) / trained
            )
            assert share < 0.6, "it is slower, and the others did not wait"
            victim.kill()
            made.come_back(victim)
            victim.await_round(victim.events("round")[-1]["round"] + 5, 90)
        for island in swarm:
            assert trained_tokens(island) > 0
        agree(swarm)
        record_property("losses", falls(first))
