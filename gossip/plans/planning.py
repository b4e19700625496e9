"""Making a round's plan: who contributes, who merges which part, who is in office next. Pure.

When a plan is made, and by whom, is :mod:`gossip.rounds.round`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial

from gossip.place import Place
from gossip.plans.certificate import basis_of, leader_order, sign_result
from gossip.plans.dividing import by_owner
from gossip.plans.estimating import (
    budget_of,
    choose_codec,
    links_of,
    measured,
    median_speed,
    timing_of,
)
from gossip.plans.grouping import UNGROUPED, lay_out, may_group, renewed_groups
from gossip.plans.ladder import Ladder
from gossip.plans.mix import MAX_NORM
from gossip.plans.partition import MemberLink
from gossip.plans.rules import Rules
from gossip.plans.validity import MAX_EXPECTED_S, MAX_PATIENCE_S, PartKey
from protocols.bounds import MAX_ROSTER
from protocols.errors import LocalProtocolError
from protocols.identity import Identity, PeerId
from protocols.messages import (
    EMPTY_DIGEST,
    MAX_WEIGHED,
    Announce,
    Contributor,
    Gram,
    Group,
    Outcome,
    Part,
    PartResult,
    Plan,
)

MAX_PRODUCTS = 4096  # inner products in a plan, where a member's share need not be one part

Ballot = tuple[int, int]  # epoch, number


@dataclass(frozen=True)
class Lead:
    """The lead of one round: who has it, by which ballot, and among whom."""

    identity: Identity
    place: Place
    ballot: Ballot
    roster: tuple[PeerId, ...]

    def plan(
        self,
        *,
        codec: str,
        contributors: tuple[Contributor, ...],
        parts: tuple[Part, ...],
        next_roster: tuple[PeerId, ...],
        expected_s: float,
        patience_s: float,
        draft: bool = False,
        grams: tuple[Gram, ...] = (),
        groups: tuple[Group, ...] = (),
    ) -> Plan:
        """A plan by whoever has the lead."""
        return Plan(
            fragment=self.place.fragment,
            round=self.place.round,
            epoch=self.ballot[0],
            ballot=self.ballot[1],
            leader=self.identity.peer_id,
            previous=self.place.previous,
            state=self.place.state,
            codec=codec,
            roster=self.roster,
            contributors=contributors,
            parts=parts,
            next_roster=next_roster,
            expected_s=expected_s,
            patience_s=patience_s,
            draft=draft,
            grams=grams,
            groups=groups,
        )

    def nothing(self, codec: str, basis: bytes, part: Part) -> PartResult:
        """The result of a part that nobody contributes to."""
        place = self.place
        return sign_result(
            self.identity,
            place.run,
            PartResult(
                place.fragment,
                place.round,
                part.start,
                part.stop,
                self.identity.peer_id,
                codec,
                EMPTY_DIGEST,
                b"",
                basis,
                b"",
            ),
        )


@dataclass(frozen=True)
class Remains:
    """What a new leader learnt from the promises it got."""

    ballot: Ballot
    roster: tuple[PeerId, ...]
    voted: Outcome | None  # has to be proposed again
    held: dict[PartKey, PartResult]

    def lead(self, identity: Identity, place: Place) -> Lead:
        """What the promises came to: the lead of the round."""
        return Lead(identity, place, self.ballot, self.roster)


@dataclass(frozen=True)
class Crew:
    """The live members of the roster, who merge, and what is known of them."""

    members: Sequence[Announce]
    unreliable: Set[PeerId]  # they merge nothing and are in no group, if there are others
    mute: Set[PeerId]  # they relay nothing, if there are others
    trips: Mapping[PeerId, float]  # seconds of the shortest round trip to each, as far as known


def fresh_plan(
    lead: Lead,
    rules: Rules,
    crew: Crew,
    *,
    ready: Sequence[Announce],
    next_roster: Iterable[PeerId],
    round_s: float,
    past: Ladder,
    patience_s: float,
) -> Plan:
    """The first plan of a round: ``ready`` contribute, the ``crew`` merges.

    The codec follows from the measured links, the usual length of a round ``round_s`` (0: not known
    yet) and what is known of the rounds before (:mod:`gossip.plans.ladder`). ``patience_s`` is what
    the measured round trips ask for, where there are any (:mod:`gossip.membership.trips`).

    A draft where scales follow from what is sent (:mod:`gossip.plans.weighing`). Of such
    contributors a plan has room for :data:`MAX_WEIGHED`; the others' turn comes in another round.
    """
    if not ready:
        raise LocalProtocolError("a plan without contributors")
    place, members = lead.place, crew.members
    draft = rules.mix.weigh is not None
    if draft and len(ready) > MAX_WEIGHED:
        order = leader_order(place.run, place.fragment, place.round, [a.peer for a in ready])
        ready = [announce for announce in ready if announce.peer in order[:MAX_WEIGHED]]
    if draft and len(members) > MAX_WEIGHED:  # the plan has to show the products of all parts
        members = [announce for announce in members if announce in ready] or members[:1]
    contributing = {announce.peer for announce in ready}
    merging = {announce.peer for announce in owners_among(members, rules, crew.unreliable)}
    links = [
        dataclasses.replace(link, merges=link.peer in merging)
        for link in links_of(members, contributing, rules.believed)
    ]
    regions = {announce.peer: announce.region for announce in members}
    grouping = rules.grouping if may_group(rules.mix) else UNGROUPED
    owning = [link for link in links if link.merges]
    counts = by_owner(lead.identity.peer_id, owning, crew.trips)
    if draft:  # which shows the products of all contributors for each part
        most = max(1, MAX_PRODUCTS // (len(owning) * len(ready) ** 2))
        counts = {peer: min(count, most) for peer, count in counts.items()}
    relied_on = [link for link in links if link.merges or link.peer not in crew.unreliable]
    layout = lay_out(rules.size, relied_on, regions, grouping, counts, crew.mute)
    parts = tuple(Part(*piece, None) for piece in layout.pieces)
    ordered = sorted(ready, key=lambda announce: announce.peer)
    present = {one.peer: one for one in (*members, *ready)}  # each once: one alone is not believed
    budget = budget_of(list(present.values()), rules, round_s)
    # who has not come to this place of the chain gets what is merged all the same
    here, median = {link.peer for link in links}, median_speed(members)
    absent = [MemberLink(peer, median, median, False) for peer in lead.roster if peer not in here]
    everybody = [*links, *absent]
    codec = choose_codec(parts, layout.groups, everybody, rules.at(place.round), budget, past)
    expected, patience = timing_of(
        parts,
        layout.groups,
        links,
        rules,
        codec,
        patience_s,
        measured(members),
    )
    return lead.plan(
        codec=codec,
        contributors=rules.mix.scaled([_contributor(one, rules.most_tokens) for one in ordered]),
        parts=parts,
        next_roster=next_roster_of(lead.roster, next_roster),
        expected_s=min(expected, MAX_EXPECTED_S),
        patience_s=min(patience, MAX_PATIENCE_S),
        draft=draft,
        groups=layout.groups,
    )


def owners_among(
    members: Sequence[Announce], rules: Rules, unreliable: Set[PeerId]
) -> Sequence[Announce]:
    """Who of the live members merges parts: all, or the servers where the run has some.

    But none that is ``unreliable``, if there are others.
    """
    servers = [announce for announce in members if announce.role == "server"]
    owners = servers if rules.servers and servers else members
    return [announce for announce in owners if announce.peer not in unreliable] or owners


def roll_call(
    lead: Lead, rules: Rules, *, next_roster: Iterable[PeerId], patience_s: float
) -> Plan:
    """A round that merges nothing: it is only about who is in office next."""
    me = lead.identity.peer_id
    nobody = rules.mix.scaled([Contributor(me, 0.0, 0, False)])
    whole, codec = Part(0, rules.size, me, None), rules.codecs[0]
    result = lead.nothing(codec, basis_of(codec, nobody), whole)
    return lead.plan(
        codec=codec,
        contributors=nobody,
        parts=(dataclasses.replace(whole, result=result),),
        next_roster=next_roster_of(lead.roster, next_roster),
        expected_s=0.0,
        patience_s=min(patience_s, MAX_PATIENCE_S),
    )


def renewed_plan(
    identity: Identity,
    place: Place,
    plan: Plan,
    remains: Remains,
    gone: set[PeerId],
    live: Sequence[PeerId],
    next_roster: Iterable[PeerId],
    links: Sequence[MemberLink] = (),
) -> Plan:
    """What to do with the remains of a round whose plan cannot be completed as it stands.

    Whatever is merged already is kept; the parts of the ``gone`` go to ``live`` members, each to
    the one that would finish it first by the speeds in ``links`` (none: all alike); a part for
    which no contributor is left is certified as empty. A draft stays one as long as there is
    anything to weigh.
    """
    lead = remains.lead(identity, place)
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
    heir = partial(_heir, load, {link.peer: link.speed for link in links})
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
            result = lead.nothing(plan.codec, basis, part)
        elif owner not in load:
            owner = heir(part, len(contributors) - 1, plan.parts[-1].stop)
            load[owner] += part.stop - part.start
        parts.append(Part(part.start, part.stop, owner, result))
    return lead.plan(
        codec=plan.codec,
        contributors=contributors,
        parts=tuple(parts),
        next_roster=next_roster_of(remains.roster, next_roster),
        expected_s=plan.expected_s,
        patience_s=plan.patience_s,
        draft=draft,
        grams=plan.grams,
        groups=renewed_groups(plan.groups, plan.parts, parts, set(live)),
    )


def _heir(
    load: Mapping[PeerId, int], speeds: Mapping[PeerId, float], part: Part, others: int, size: int
) -> PeerId:
    """The member that would finish one more part first, if each also moves what it contributes.

    ``load``: elements that each is to merge already, for as many ``others``, of ``size`` in all.
    ``speeds``: bytes a second; whoever has none is like the median. Slow members own little or
    nothing in a plan, so by load alone the slowest of all would inherit.
    """
    median = sorted(speeds.values())[len(speeds) // 2] if speeds else 1.0

    def through(peer: PeerId) -> float:
        elements = size + others * (load[peer] + part.stop - part.start)
        return elements / speeds.get(peer, median)

    return min(load, key=lambda peer: (through(peer), peer))


def repeated_plan(
    identity: Identity, place: Place, remains: Remains, patience_s: float, known: Plan | None = None
) -> Plan:
    """Propose again what a member has voted for: it may have been decided already.

    ``known``: this member's own newest plan, whose products are shown again if they are the same.
    """
    outcome = remains.voted
    if outcome is None:
        raise LocalProtocolError("nothing was voted for")
    grams = known.grams if known is not None and _weighs_alike(known, outcome) else ()
    parts = tuple(Part(r.start, r.stop, r.owner, r) for r in outcome.parts)
    plan = remains.lead(identity, place).plan(
        codec=outcome.codec,
        contributors=outcome.contributors,
        parts=parts,
        next_roster=outcome.next_roster,
        expected_s=0.0,
        patience_s=patience_s,
        grams=grams,
    )
    return dataclasses.replace(plan, servers=outcome.servers)


def _weighs_alike(plan: Plan, outcome: Outcome) -> bool:
    """Whether a plan has the same parts, contributors and scales as an outcome."""
    ranges = [(part.start, part.stop) for part in plan.parts]
    return ranges == [(result.start, result.stop) for result in outcome.parts] and basis_of(
        plan.codec, plan.contributors
    ) == basis_of(outcome.codec, outcome.contributors)


def next_roster_of(office: Iterable[PeerId], wanted: Iterable[PeerId]) -> tuple[PeerId, ...]:
    """``wanted`` in order; where they are too many, those who are in office stay."""
    wanted, office = set(wanted), set(office)
    stay = sorted(wanted & office)[:MAX_ROSTER]
    return tuple(sorted(stay + sorted(wanted - office)[: MAX_ROSTER - len(stay)]))


def _contributor(announce: Announce, most_tokens: int) -> Contributor:
    """What an island asks for, within the bounds that all check."""
    tokens = min(announce.tokens, most_tokens)
    weight = max(0.0, min(announce.weight, float(tokens)))
    norm = max(0.0, min(announce.norm, MAX_NORM))
    return Contributor(announce.peer, weight, tokens, True, norm)
