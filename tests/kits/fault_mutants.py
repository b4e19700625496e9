"""Engines that are wrong, for the fault matrix to find: each is patched into a member's process."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import gossip.plans.estimating
import gossip.plans.planning
import gossip.rounds.leadership
from gossip.plans.planning import Remains
from protocols.messages import Plan

Mutant = Literal["wastes work", "merges anew", "waits long"]
LONG_S = 8.0


def mutate(mutant: Mutant) -> None:
    """Make this process one whose engine

    *wastes work*: a plan that replaces another merges nothing;
    *merges anew*: it forgets what was merged already;
    *waits long*: patience is a constant, and anybody's is believed.
    """
    if mutant == "waits long":
        timing: Callable[..., tuple[float, float]] = gossip.plans.planning.timing_of
        gossip.plans.planning.timing_of = lambda *args: (timing(*args)[0], LONG_S)
        gossip.plans.estimating.SLACK = 100.0
        return
    renewed_plan: Callable[..., Plan] = gossip.rounds.leadership.renewed_plan

    def renewed(
        identity: Any, place: Any, plan: Plan, remains: Remains, gone: Any, *rest: Any
    ) -> Plan:
        if mutant == "wastes work":
            gone = {one.peer for one in plan.contributors}
        forgetful = dataclasses.replace(remains, held={})
        return renewed_plan(identity, place, plan, forgetful, gone, *rest)

    gossip.rounds.leadership.renewed_plan = renewed
