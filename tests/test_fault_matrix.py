"""Every fault, at every stage of a round, to every kind of member: 84 cells with real processes.

Whoever survives must come to one outcome, soon, without sending everything again, and go on; and
whoever was away must come back. How soon follows from what the engine knows: the speeds that its
links were measured at, and the patience that membership has with the silent (``Cell.bound``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from fault_kit import AFTER, CONTROL, FAULTS, WIRE, Fault, cell
from fault_member import Role, Stage

from benchmarks.netns import available

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

Record = Callable[[str, object], None]
BACK_S = 30.0


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
@pytest.mark.parametrize("stage", get_args(Stage))
@pytest.mark.parametrize("role", get_args(Role))
def test_survivors_agree_and_go_on(
    role: Role, stage: Stage, fault: Fault, record_property: Record
) -> None:
    with cell(role, stage, fault) as swarm:
        swarm.inject()
        last = swarm.round + AFTER
        bound = swarm.bound()
        swarm.until(
            lambda: min(one.applied() for one in swarm.others) >= last,
            (1 + AFTER) * (bound + 2.0),
            f"the others have applied round {last}",
        )
        if fault.comes_back:
            swarm.mend()
            wanted = 1 + max(one.applied() for one in swarm.others)
            swarm.until(lambda: swarm.victim.applied() >= wanted, BACK_S, "the victim is back")
            swarm.until(
                lambda: min(one.applied() for one in swarm.others) >= wanted, BACK_S, "all there"
            )
    chain = swarm.chain()
    for round_ in range(len(chain)):
        assert len(swarm.facts_of(round_)) == 1, f"round {round_}\n{swarm.story()}"

    stall = swarm.stall(swarm.round)
    record_property("stall_s", round(stall, 2))
    record_property("bound_s", round(bound, 2))
    record_property("ballot", (chain[swarm.round].epoch, chain[swarm.round].ballot))
    for one in swarm.others:
        sent, usual = swarm.sent(one), swarm.usual_bytes(one)
        record_property("again", max(0, round(sent / WIRE - usual)))
        record_property("allowed_again", swarm.again(one))
    assert stall < bound, swarm.story()
    for one in swarm.others:
        allowed = swarm.usual_bytes(one) + swarm.again(one)
        assert swarm.sent(one) <= WIRE * allowed + CONTROL, swarm.story()
