"""Plans as a leader makes them, checked as the others check them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

from gossip_kit import PLACE, SHAPE, leader, roster_of

from gossip.plans.ladder import Ladder
from gossip.plans.planning import Crew, Lead, Remains, fresh_plan
from gossip.plans.rules import PATIENCE_S, Rules
from gossip.plans.validity import VerifiedResults, check_plan, key_of
from protocols.identity import Identity, PeerId
from protocols.messages import Announce, PartResult, Plan

Identities = Callable[[int], list[Identity]]
RULES = Rules(SHAPE.size, SHAPE.codecs, lambda codec, start, stop: (stop - start) * 17 // 32)


def fresh(
    members: list[Identity],
    announces: list[Announce],
    ready: list[Announce] | None = None,
    rules: Rules = RULES,
    *,
    round_s: float = 0.0,
    past: Ladder | None = None,
    trips: Mapping[PeerId, float] | None = None,
    unreliable: Set[PeerId] = frozenset(),
) -> Plan:
    """A plan by the first of ``members``, checked as the others will check it."""
    by = leader(members)
    roster = roster_of(members)
    plan = fresh_plan(
        Lead(by, PLACE, (0, 0), roster),
        rules,
        Crew(announces, unreliable=unreliable, mute=frozenset(), trips=trips or {}),
        ready=announces if ready is None else ready,
        next_roster=roster,
        round_s=round_s,
        past=past or Ladder(),
        patience_s=PATIENCE_S,
    )
    check_plan(plan, PLACE, rules.shape, roster, VerifiedResults())
    return plan


def remains(
    plan: Plan,
    held: list[PartResult],
    *,
    ballot: tuple[int, int] = (0, 4),
    roster: tuple[PeerId, ...] | None = None,
) -> Remains:
    return Remains(ballot, roster or plan.roster, None, {key_of(r): r for r in held})
