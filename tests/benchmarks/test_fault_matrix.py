"""Every fault, at every stage of a round, to every kind of member: 84 cells with real processes.

Whoever survives must come to one outcome, soon, without sending everything again, and go on; and
whoever was away must come back. How soon follows from what the engine knows: the speeds that its
links were measured at, and the patience that membership has with the silent (``Cell.bound``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from fault_kit import AFTER, CONTROL, FAULTS, SPOILT, Cell, Fault, cell
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
        endure(swarm)
    judge(swarm, record_property)


def test_parts_that_are_spoilt_before_they_are_encrypted(record_property: Record) -> None:
    """What TLS cannot find out the digest does: the part is refused, and fetched instead."""
    with cell("owner", "before sending", SPOILT) as swarm:
        endure(swarm)
    for one in swarm.others:
        assert any("digest" in fact["why"] for fact in one.of("rejected")), swarm.story()
    judge(swarm, record_property)


def endure(swarm: Cell) -> None:
    """Let it happen; wait for the others to go on, and for the victim to come back."""
    swarm.inject()
    timeout = (1 + AFTER) * (swarm.bound() + 2.0)
    swarm.go_on_to(swarm.round + AFTER, timeout, swarm.others)
    if swarm.fault.comes_back:
        swarm.mend()
        swarm.go_on_to(1 + max(one.applied() for one in swarm.others), BACK_S)


def judge(swarm: Cell, record_property: Record) -> None:
    """One history for all, without a long stall, without sending everything again."""
    equal = all(len(swarm.facts_of(round_)) == 1 for round_ in swarm.rounds())
    record_property("digests_equal", equal)
    stall, bound = swarm.stall(swarm.round), swarm.bound()
    more, allowed = swarm.sent() - swarm.usual_bytes(), swarm.again()
    record_property("stall_s", round(stall, 2))
    record_property("bound_s", round(bound, 2))
    record_property("more_than_usual", more)
    record_property("allowed_again", allowed)
    assert equal, swarm.story()
    decided = swarm.chain()[swarm.round]
    record_property("ballot", (decided.epoch, decided.ballot))
    assert stall < bound, swarm.story()
    assert more <= allowed + CONTROL * len(swarm.others), swarm.story()
