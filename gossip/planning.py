"""What a leader decides: who contributes, who merges what, who is in office next. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from gossip.agreed import Remains
from gossip.certificate import basis_of, leader_order, sign_result
from gossip.company import Clients
from gossip.grouping import UNGROUPED, Grouping, lay_out, may_group, renewed_groups, traffic
from gossip.ladder import Ladder, budget_s, choose
from gossip.lateness import step_s
from gossip.mixing import MAX_NORM, MEAN, Mix
from gossip.partition import Link
from gossip.validity import (
    MAX_EXPECTED_S,
    MAX_PATIENCE_S,
    MAX_TOKENS,
    Place,
    Shape,
)
from protocols.errors import LocalProtocolError
from protocols.identity import Identity, PeerId
from protocols.messages import (
    EMPTY_DIGEST,
    MAX_WEIGHED,
    Announce,
    Contributor,
    Group,
    Part,
    PartResult,
    Plan,
)

UNKNOWN_SPEED = 12.5e6  # bytes a second assumed of a link not measured yet: 100 Mbit/s
GUESSED = 10.0  # and so many times as long may everything take, where none has been measured
ALIKE = 1.25  # speeds within this ratio of the median are equal: measuring is no better than that
STARVED_S = 2.0  # the longest that a full link may starve one of its connections
# So far from the median, below and above it, announced speeds are believed. Among strangers nobody
# gets more to merge by claiming a fast link, nor the others to wait long by claiming a slow one.
FRIENDS, STRANGERS = (1e4, 1e4), (32.0, 1.0)
NO_BOUND = -1  # of staleness
MAX_ROSTER = 256  # members of a round: with more, who merged what does not fit a certificate


@dataclass(frozen=True)
class Rules:
    """The run's rules as far as rounds are concerned."""

    size: int  # elements of the vector
    codecs: tuple[str, ...]  # that a round may have, the finest first
    encoded_bytes: Callable[[str, int, int], int]  # with a codec, of a range [start, stop)
    quorum: float = 0.5
    grace_fraction: float = 0.1
    min_grace_s: float = 0.25
    patience_s: float = 1.0  # for a transfer that stands still, before round trips are measured
    least_patience_s: float = 0.0  # likewise, whatever was measured
    alone_after_s: float = 30.0  # below quorum for so long: go on with whoever is there
    mix: Mix = MEAN  # how contributions become one
    sharing: int = 1  # rounds (of different fragments) that may share the links at a time
    exposed: float = 0.05  # share of a round that may be spent waiting for bytes,
    overlapped: float = 0.0  # and that during which inner steps go on meanwhile
    grouping: Grouping = UNGROUPED
    staleness: int = NO_BOUND  # rounds that a live member may miss before the others wait for it
    clients: Clients | None = None  # who trains in a round; None: all
    servers: bool = False  # those merge, while one is there
    switch: int | None = None  # rounds before this one have all codecs but the last, later ones it
    believed: tuple[float, float] = FRIENDS  # of announced speeds
    state_bytes: int = 0  # of the outer state, 0: it cannot be downloaded
    calls: bool = False  # the roll is called for newcomers, instead of having them wait for a round

    def at(self, round_: int) -> Rules:
        """The same with the codecs that a round may have."""
        if self.switch is None:
            return self
        codecs = self.codecs[-1:] if round_ >= self.switch else self.codecs[:-1]
        return dataclasses.replace(self, codecs=codecs)

    @property
    def shape(self) -> Shape:
        """What is merged."""
        return Shape(self.size, self.codecs, self.mix, self.grouping.on)

    @property
    def most_bytes(self) -> int:
        """The whole vector in the codec that makes the most of it."""
        return max(self.encoded_bytes(name, 0, self.size) for name in self.codecs)

    def grace_s(self, round_s: float) -> float:
        """How long the ready wait for the late, given the usual length of a round."""
        return max(self.min_grace_s, self.grace_fraction * round_s)


def fresh_plan(
    identity: Identity,
    place: Place,
    rules: Rules,
    *,
    ballot: tuple[int, int],
    roster: tuple[PeerId, ...],
    ready: Sequence[Announce],
    members: Sequence[Announce],
    next_roster: Iterable[PeerId],
    round_s: float = 0.0,
    past: Ladder | None = None,
    patience_s: float | None = None,
) -> Plan:
    """The first plan of a round: ``ready`` contribute, ``members`` (live roster) merge.

    The codec follows from the measured links, the usual length of a round ``round_s`` (0: not
    known yet) and what is known of the rounds before (:mod:`gossip.ladder`). ``patience_s`` is what
    the measured round trips ask for, None before there are any (:mod:`gossip.trips`).

    A draft where scales follow from what is sent (:mod:`gossip.weighing`). Of such contributors
    a plan has room for :data:`MAX_WEIGHED`; the others' turn comes in another round.
    """
    if not ready:
        raise LocalProtocolError("a plan without contributors")
    draft = rules.mix.weigh is not None
    if draft and len(ready) > MAX_WEIGHED:
        order = leader_order(place.run, place.fragment, place.round, [a.peer for a in ready])
        ready = [announce for announce in ready if announce.peer in order[:MAX_WEIGHED]]
    if draft and len(members) > MAX_WEIGHED:  # the plan has to show the products of all parts
        members = [announce for announce in members if announce in ready] or members[:1]
    contributing = {announce.peer for announce in ready}
    links = _links(members, contributing, rules.believed)
    merging = {announce.peer for announce in owners_among(members, rules)}
    regions = {announce.peer: announce.region for announce in members}
    grouping = rules.grouping if may_group(rules.mix) else UNGROUPED
    layout = lay_out(
        rules.size, [link for link in links if link.peer in merging], regions, grouping
    )
    parts = tuple(Part(*piece, None) for piece in layout.pieces)
    ordered = sorted(ready, key=lambda announce: announce.peer)
    codec = _codec(parts, layout.groups, links, rules.at(place.round), round_s, past)
    expected = rules.sharing * _expected_seconds(parts, layout.groups, links, rules, codec)
    stillness = _stillness(expected, parts)
    if not any(announce.upload > 0 or announce.download > 0 for announce in members):
        expected, stillness = GUESSED * expected, max(stillness, STARVED_S)
    return Plan(
        place.fragment,
        place.round,
        *ballot,
        identity.peer_id,
        place.previous,
        place.state,
        codec,
        roster,
        rules.mix.scaled([_contributor(announce) for announce in ordered]),
        parts,
        next_roster_of(roster, next_roster),
        min(expected, MAX_EXPECTED_S),
        min(max(patience_s or rules.patience_s, stillness), MAX_PATIENCE_S),
        draft,
        groups=layout.groups,
    )


def owners_among(members: Sequence[Announce], rules: Rules) -> Sequence[Announce]:
    """Who of the live members merges parts: all, or the servers where the run has some."""
    servers = [announce for announce in members if announce.role == "server"]
    return servers if rules.servers and servers else members


def roll_call(
    identity: Identity,
    place: Place,
    rules: Rules,
    *,
    ballot: tuple[int, int],
    roster: tuple[PeerId, ...],
    next_roster: Iterable[PeerId],
    patience_s: float,
) -> Plan:
    """A round that merges nothing: it is only about who is in office next."""
    me = identity.peer_id
    nobody = rules.mix.scaled([Contributor(me, 0.0, 0, False)])
    whole, codec = Part(0, rules.size, me, None), rules.codecs[0]
    return Plan(
        place.fragment,
        place.round,
        *ballot,
        me,
        place.previous,
        place.state,
        codec,
        roster,
        nobody,
        (Part(0, rules.size, me, _empty(identity, place, codec, basis_of(codec, nobody), whole)),),
        next_roster_of(roster, next_roster),
        0.0,
        min(patience_s, MAX_PATIENCE_S),
    )


def renewed_plan(
    identity: Identity,
    place: Place,
    plan: Plan,
    remains: Remains,
    gone: set[PeerId],
    live: Sequence[PeerId],
    next_roster: Iterable[PeerId],
) -> Plan:
    """What to do with the remains of a round whose plan cannot be completed as it stands.

    Whatever is merged already is kept; the parts of the ``gone`` go to ``live`` members; a
    part for which no contributor is left is certified as empty. A draft stays one as long as
    there is anything to weigh.
    """
    contributors = tuple(
        dataclasses.replace(c, active=c.active and c.peer not in gone) for c in plan.contributors
    )
    draft = plan.draft and any(contributor.active for contributor in contributors)
    basis = basis_of(plan.codec, contributors)
    held = {key: r for key, r in remains.held.items() if r.codec == plan.codec}
    merged = {(r.start, r.stop): r for r in held.values() if r.basis == basis and r.digest}
    load = dict.fromkeys(sorted(live), 0)
    for part in plan.parts:
        if part.owner in load:
            load[part.owner] += part.stop - part.start
    parts = []
    for part in plan.parts:
        result = held.get((part.start, part.stop, part.owner, basis))
        if result is None or not result.digest:
            result = merged.get((part.start, part.stop))
        if plan.draft:
            result = None
        owner = part.owner
        if result is not None:
            owner = result.owner
        elif not any(contributor.active for contributor in contributors):
            owner = identity.peer_id
            result = _empty(identity, place, plan.codec, basis, part)
        elif owner not in load:
            owner = min(load, key=lambda peer: (load[peer], peer))
            load[owner] += part.stop - part.start
        parts.append(Part(part.start, part.stop, owner, result))
    return Plan(
        place.fragment,
        place.round,
        *remains.ballot,
        identity.peer_id,
        place.previous,
        place.state,
        plan.codec,
        remains.roster,
        contributors,
        tuple(parts),
        next_roster_of(remains.roster, next_roster),
        plan.expected_s,
        plan.patience_s,
        draft,
        plan.grams,
        renewed_groups(plan.groups, plan.parts, parts, set(live)),
    )


def repeated_plan(identity: Identity, place: Place, remains: Remains, patience_s: float) -> Plan:
    """Propose again what a member has voted for: it may have been decided already."""
    outcome = remains.voted
    if outcome is None:
        raise LocalProtocolError("nothing was voted for")
    parts = tuple(Part(r.start, r.stop, r.owner, r) for r in outcome.parts)
    return Plan(
        place.fragment,
        place.round,
        *remains.ballot,
        identity.peer_id,
        place.previous,
        place.state,
        outcome.codec,
        remains.roster,
        outcome.contributors,
        parts,
        outcome.next_roster,
        0.0,
        patience_s,
    )


def next_roster_of(
    office: Iterable[PeerId], wanted: Iterable[PeerId], most: int = MAX_ROSTER
) -> tuple[PeerId, ...]:
    """``wanted`` in order; where they are too many, those who are in office stay."""
    wanted, office = set(wanted), set(office)
    stay = sorted(wanted & office)[:most]
    return tuple(sorted(stay + sorted(wanted - office)[: most - len(stay)]))


def _contributor(announce: Announce) -> Contributor:
    """What an island asks for, within the bounds that all check."""
    tokens = min(announce.tokens, MAX_TOKENS)
    weight = max(0.0, min(announce.weight, float(tokens)))
    norm = max(0.0, min(announce.norm, MAX_NORM))
    return Contributor(announce.peer, weight, tokens, True, norm)


def _links(
    members: Sequence[Announce], contributing: set[PeerId], believed: tuple[float, float]
) -> list[Link]:
    known = sorted(s for a in members for s in (a.upload, a.download) if s > 0)
    median = known[len(known) // 2] if known else UNKNOWN_SPEED
    slower, faster = believed

    def clamp(speed: float) -> float:
        if speed <= 0 or median / ALIKE <= speed <= median * ALIKE:
            return median  # who got more to send would seem faster, and get more yet
        return min(max(speed, median / slower), median * faster)

    return [
        Link(a.peer, clamp(a.upload), clamp(a.download), a.peer in contributing)
        for a in sorted(members, key=lambda announce: announce.peer)
    ]


def _codec(
    parts: Sequence[Part],
    groups: Sequence[Group],
    links: Sequence[Link],
    rules: Rules,
    round_s: float,
    past: Ladder | None,
) -> str:
    if round_s <= 0:  # no round has been timed yet
        previous = past.codec if past is not None else None
        return previous if previous in rules.codecs else rules.codecs[0]
    contributing = {link.peer: link.contributes for link in links}

    def by_pace(name: str) -> float:
        moved = _busiest_bytes(parts, groups, contributing, rules, name)
        return (past.seconds(moved) if past is not None else None) or 0.0

    return choose(
        rules.codecs,
        lambda name: _expected_seconds(parts, groups, links, rules, name),
        budget_s(round_s, rules.exposed, rules.overlapped),
        past,
        by_pace if past is not None and past.seconds(0.0) is not None else None,
    )


def busiest_bytes(plan: Plan, rules: Rules) -> float:
    """Bytes that the member with the most to move sends, or receives, under a plan."""
    active = {c.peer for c in plan.contributors if c.active}
    everybody = {*plan.roster, *active, *(part.owner for part in plan.parts)}
    contributing = {peer: peer in active for peer in sorted(everybody)}
    return _busiest_bytes(plan.parts, plan.groups, contributing, rules, plan.codec)


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


def _expected_seconds(
    parts: Sequence[Part],
    groups: Sequence[Group],
    links: Sequence[Link],
    rules: Rules,
    codec: str,
) -> float:
    """Seconds until the slowest member has sent and received its bytes."""
    moved = traffic(parts, groups, {link.peer: link.contributes for link in links})
    return _bytes_each(parts, rules, codec) * max(
        max(moved[link.peer][0] / link.upload, moved[link.peer][1] / link.download)
        for link in links
    )


def _stillness(expected_s: float, parts: Sequence[Part]) -> float:
    """How long a transfer at the expected speed may seem to stand still.

    Some chunks' time; and a third of the round's, since of several connections that fill a link
    one may get next to nothing for a while, but not for more than ``STARVED_S``.
    """
    largest = max(part.stop - part.start for part in parts)
    return max(min(expected_s / 2, 4 * step_s(expected_s, largest)), min(expected_s / 3, STARVED_S))


def _empty(identity: Identity, place: Place, codec: str, basis: bytes, part: Part) -> PartResult:
    return sign_result(
        identity,
        place.run,
        PartResult(
            place.fragment,
            place.round,
            part.start,
            part.stop,
            identity.peer_id,
            codec,
            EMPTY_DIGEST,
            b"",
            basis,
            b"",
        ),
    )
