"""How long a round's bytes should take on the links as they were announced. Pure.

A leader puts the result into its plan (:mod:`gossip.plans.planning`), and everybody else uses it to
limit how long a plan may make them wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from gossip.membership.trips import MOST_S
from gossip.plans.grouping import traffic
from gossip.plans.ladder import Budget, Ladder, budget_s, choose, hidden_share
from gossip.plans.partition import MemberLink
from gossip.plans.rules import Rules
from gossip.plans.validity import MAX_EXPECTED_S
from protocols.codecs import CHUNK
from protocols.identity import PeerId
from protocols.messages import Announce, Group, Part, Plan

UNKNOWN_SPEED = 12.5e6  # bytes a second assumed of a link not measured yet: 100 Mbit/s
GUESSED = 10.0  # times: everything may take this much longer where no link was measured
ALIKE = 1.25  # speeds within this ratio of the median are equal: measuring is no better than that
STARVED_S = 2.0  # the longest that a full link may starve one of its connections
SLACK = 4.0  # a plan may have a member wait for this many times its own estimate
ALONE = 8.0  # times the median speed: what one island alone claims counts for no more


def median_speed(members: Sequence[Announce]) -> float:
    """Bytes a second of the median link."""
    known = sorted(s for a in members for s in (a.upload, a.download) if s > 0)
    return known[len(known) // 2] if known else UNKNOWN_SPEED


def fastest_of(speeds: Sequence[float]) -> float:
    """v_max of speeds in steps a second (0: unknown), as far as it can be believed; 0 for none.

    Whoever claims to be fast makes all others take fewer steps. So beyond :data:`ALONE` times the
    median a speed counts as far as a second island has it as well.
    """
    known = sorted(speed for speed in speeds if speed > 0)
    if len(known) < 2:
        return known[0] if known else 0.0
    return min(known[-1], max(known[-2], ALONE * known[(len(known) - 1) // 2]))


def links_of(
    members: Sequence[Announce], contributing: AbstractSet[PeerId], believed: tuple[float, float]
) -> list[MemberLink]:
    """How fast each is taken to be; ``believed``: how far from the median, below and above it."""
    median = median_speed(members)
    slower, faster = believed

    def clamp(speed: float) -> float:
        if speed <= 0 or median / ALIKE <= speed <= median * ALIKE:
            return median  # a member given more to send would seem faster, and get still more
        return min(max(speed, median / slower), median * faster)

    return [
        MemberLink(a.peer, clamp(a.upload), clamp(a.download), a.peer in contributing)
        for a in sorted(members, key=lambda announce: announce.peer)
    ]


def budget_of(members: Sequence[Announce], rules: Rules, round_s: float) -> Budget:
    """How long the exchange of a round may take, of which ``round_s`` are usual, 0: not known yet.

    The fragments of a round share what may be waited. Whoever is the fastest waits the longest,
    and it is the fastest that takes all of H.
    """
    steps = rules.overlap_steps(max((one.wanted_steps for one in members), default=0))
    share = hidden_share(round_s, steps, fastest_of([one.steps_per_second for one in members]))
    return Budget(budget_s(round_s, rules.exposed / rules.sharing, share), share * round_s)


def choose_codec(
    parts: Sequence[Part],
    groups: Sequence[Group],
    links: Sequence[MemberLink],
    rules: Rules,
    budget: Budget,
    past: Ladder,
) -> str:
    """What a round is encoded in, given how long its exchange may take.

    ``links`` are those of all who get what is merged. Rounds that share the links take as long as
    the last exchange shows, up to as many times as there are: its pace alone would have fixed
    times count, and the links alone that nothing is in each other's way.
    """
    if budget.whole_s <= 0:  # no round has been timed yet
        return past.codec if past.codec in rules.codecs else rules.codecs[0]
    contributing = {link.peer: link.contributes for link in links}

    def by_pace(name: str) -> float:
        moved = _busiest_bytes(parts, groups, contributing, rules, name)
        return past.seconds(moved) or 0.0

    return choose(
        rules.codecs,
        lambda name: rules.sharing * expected_seconds(parts, groups, links, rules, name),
        budget.whole_s,
        past,
        by_pace if past.seconds(0.0) is not None else None,
        budget.hidden_s,
    )


def busiest_bytes(plan: Plan, rules: Rules) -> float:
    """Bytes that the member with the most to move sends, or receives, under a plan."""
    return _busiest_bytes(plan.parts, plan.groups, _moving(plan), rules, plan.codec)


def _moving(plan: Plan) -> dict[PeerId, bool]:
    """Who has bytes to move under a plan, in order, and whether it contributes."""
    active = {c.peer for c in plan.contributors if c.active}
    everybody = {*plan.roster, *active, *(part.owner for part in plan.parts)}
    return {peer: peer in active for peer in sorted(everybody)}


def _busiest_bytes(
    parts: Sequence[Part],
    groups: Sequence[Group],
    contributing: Mapping[PeerId, bool],
    rules: Rules,
    codec: str,
) -> float:
    moved = traffic(parts, groups, contributing)
    return _bytes_each(parts, rules, codec) * max(max(both) for both in moved.values())


def _bytes_each(parts: Sequence[Part], rules: Rules, codec: str) -> float:
    """Bytes of an element."""
    whole = sum(rules.encoded_bytes(codec, part.start, part.stop) for part in parts)
    return whole / rules.size


def expected_seconds(
    parts: Sequence[Part],
    groups: Sequence[Group],
    links: Sequence[MemberLink],
    rules: Rules,
    codec: str,
) -> float:
    """Seconds until the slowest member has sent and received its bytes."""
    moved = traffic(parts, groups, {link.peer: link.contributes for link in links})
    return _bytes_each(parts, rules, codec) * max(
        max(moved[link.peer][0] / link.upload, moved[link.peer][1] / link.download)
        for link in links
    )


def stillness_of(expected_s: float, parts: Sequence[Part]) -> float:
    """How long a transfer at the expected speed may seem to stand still.

    Some chunks' time; and a third of the round's, since of several connections that fill a link
    one may get next to nothing for a while, but not for more than ``STARVED_S``.
    """
    largest = max(part.stop - part.start for part in parts)
    return max(min(expected_s / 2, 4 * step_s(expected_s, largest)), min(expected_s / 3, STARVED_S))


def measured(members: Sequence[Announce]) -> bool:
    """Whether the speed of any link is known."""
    return any(announce.upload > 0 or announce.download > 0 for announce in members)


def timing_of(
    parts: Sequence[Part],
    groups: Sequence[Group],
    links: Sequence[MemberLink],
    rules: Rules,
    codec: str,
    trips_s: float,
    known: bool,
) -> tuple[float, float]:
    """Seconds that the exchange is expected to take, and for how long it may stand still.

    ``trips_s`` is what the round trips ask for, ``known`` whether any link was measured.
    """
    expected = rules.sharing * expected_seconds(parts, groups, links, rules, codec)
    stillness = stillness_of(expected, parts)
    if not known:
        expected, stillness = GUESSED * expected, max(stillness, STARVED_S)
    return expected, max(trips_s, stillness)


def prolonged(plan: Plan, spent_s: float) -> Plan:
    """A plan for what is left of a round, ``spent_s`` after its first plan.

    The plans before may have failed by one member's fault. But the links may also carry much less
    than was measured, and then no plan with the same deadlines can succeed. So the next one gets as
    long again as was spent: soon that suffices for the bytes, and if only one member was to blame,
    the round ends before it matters.
    """
    return dataclasses.replace(
        plan,
        expected_s=min(max(plan.expected_s, spent_s), MAX_EXPECTED_S),
        patience_s=max(plan.patience_s, min(spent_s / 4, MOST_S)),
    )


def bounded(
    plan: Plan,
    members: Sequence[Announce],
    rules: Rules,
    trips_s: tuple[float, float],
    spent_s: float = 0.0,
) -> Plan:
    """The plan, with its patience and expected seconds limited to what is plausible.

    That is :data:`SLACK` times what I would have planned myself for these parts, by the links that
    ``members`` have announced and by my own round trips (``trips_s``: what they ask for at least
    and at most), and ``spent_s`` after its first plan (:func:`prolonged`), of which a leader may
    have seen twice as much. A leader may have measured otherwise than I have; but one that lies
    could have everybody wait for half an hour, or, with next to no patience, have all take each
    other for dead.
    """
    moving = _moving(plan)
    here = [announce for announce in members if announce.peer in moving]
    active = {peer for peer, contributes in moving.items() if contributes}
    links = {link.peer: link for link in links_of(here, active, rules.believed)}
    median = median_speed(here)
    every = [
        links.get(peer) or MemberLink(peer, median, median, contributes)
        for peer, contributes in moving.items()
    ]
    (expected, least), (_, most) = (
        timing_of(plan.parts, plan.groups, every, rules, plan.codec, trips, measured(here))
        for trips in trips_s
    )
    own = prolonged(dataclasses.replace(plan, expected_s=0.0, patience_s=0.0), 2 * spent_s)
    return dataclasses.replace(
        plan,
        expected_s=min(plan.expected_s, max(SLACK * expected, own.expected_s)),
        patience_s=min(max(plan.patience_s, least / SLACK), max(SLACK * most, own.patience_s)),
    )


def step_s(expected_s: float, elements: int) -> float:
    """Seconds from chunk to chunk of a part of so many elements, all parts moving at once."""
    return expected_s * min(1.0, CHUNK / max(elements, 1))
