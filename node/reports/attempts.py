"""What the monitor is told of an attempt at a round that came to nothing."""

from __future__ import annotations

from node.monitor.events import RoundFailed
from node.monitor.wording import short
from protocols.identity import PeerId
from protocols.messages import Plan

NAMED = 4  # of those that the new plan does without


def given_up(before: Plan, plan: Plan | None) -> RoundFailed:
    """That by the plan ``before``: ``plan`` takes its place; None: the round is abandoned."""
    return RoundFailed(round=before.round, reason=_why(before, plan), fragment=before.fragment)


def _why(before: Plan, plan: Plan | None) -> str:
    if plan is None:
        return "what it built on is given up for what the others have"
    if plan.epoch > before.epoch:
        why = f"too few of those in office are left: {len(plan.roster)} go on, epoch {plan.epoch}"
    elif plan.leader != before.leader:
        why = f"{short(plan.leader)} leads in place of {short(before.leader)}"
    else:
        why = f"{short(plan.leader)} has another plan"
    left_out = sorted(_counted_on(before) - _counted_on(plan))
    if not left_out:
        return why
    more = ", …" if len(left_out) > NAMED else ""
    return f"{why}, without {', '.join(map(short, left_out[:NAMED]))}{more}"


def _counted_on(plan: Plan) -> set[PeerId]:
    """Who is to send or merge something."""
    return {one.peer for one in plan.contributors if one.active} | {
        part.owner for part in plan.parts if part.result is None
    }
