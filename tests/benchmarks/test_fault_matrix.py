"""Every fault, at every stage of a round, to every kind of member: 84 cells with real processes.

Whoever survives must come to one outcome, soon, with their work in it and without sending again
what was there, and go on; and whoever was away must come back. How soon follows from what the
engine knows, the speeds that its links were measured at and the patience that membership has with
the silent (``Cell.bound``), and from what that may be at most on the links of the cell
(:mod:`fault_limits`). Engines that are wrong (:mod:`fault_mutants`) must not pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
from fault_kit import AFTER, FAULTS, FAVOURS, SPOILT, Cell, Fault, cell
from fault_member import Role, Stage
from fault_mutants import Mutant

from benchmarks.netns import available

pytestmark = [
    pytest.mark.faults,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

Record = Callable[[str, object], None]
BACK_S = 30.0
MUTANT_S = 60.0
KILLED, STOPPED = FAULTS[:2]
MUTANTS = (
    ("wastes work", "before sending", KILLED, "work lost"),
    ("wastes work", "in the middle of sending", KILLED, "work lost"),
    ("merges anew", "before sending", FAVOURS, "sent again"),
    ("waits long", "before sending", STOPPED, "dishonest deadlines"),
    ("waits long", "in the middle of sending", KILLED, "dishonest deadlines"),
)


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


def test_a_part_that_one_survivor_has_is_not_merged_again(record_property: Record) -> None:
    with cell("owner", "before sending", FAVOURS) as swarm:
        endure(swarm)
    part = swarm.plan()["parts"]
    kept = [p.owner for p in swarm.chain()[swarm.round].outcome.parts]
    assert kept == [owner for _, _, owner in part], swarm.story()
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
    """One history for all, without a long stall, nobody's work lost, and nothing sent again."""
    wrongs = swarm.wrongs(record_property)
    assert not wrongs, f"{wrongs}\n{swarm.story()}"


@pytest.mark.parametrize(("mutant", "stage", "fault", "wrong"), MUTANTS)
def test_an_engine_that_is_wrong_is_found(
    mutant: Mutant, stage: Stage, fault: Fault, wrong: str
) -> None:
    with cell("owner", stage, fault, mutant) as swarm:
        swarm.inject()
        swarm.go_on_to(swarm.round + AFTER, MUTANT_S, swarm.others)
    assert wrong in swarm.wrongs(lambda name, value: None), swarm.story()
