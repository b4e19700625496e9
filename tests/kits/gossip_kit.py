"""Plans, results, votes and announcements for tests of how rounds are agreed on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from blake3 import blake3

from gossip.membership.members import Membership
from gossip.membership.standing import first_announcement
from gossip.place import Place
from gossip.plans.certificate import (
    basis_of,
    certify,
    genesis,
    leader_order,
    outcome_hash,
    outcome_of,
    sign_result,
    sign_vote,
)
from gossip.plans.validity import Shape
from gossip.rounds.agreed import Adopted
from gossip.rounds.agreement import Agreement
from gossip.rounds.company import Company
from protocols.counts import Included, pack_counts
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Announce,
    Certificate,
    Contributor,
    Outcome,
    Part,
    PartResult,
    Plan,
)

RUN = b"r" * 32
SHAPE = Shape(64 * 1024, ("int4",))
EVERYBODY = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(1, 6)]
PLACE = Place(RUN, 0, 3, genesis(RUN), b"s" * 32, 500)


def roster_of(identities: Sequence[Identity]) -> tuple[PeerId, ...]:
    """All of them, in order."""
    return tuple(sorted(identity.peer_id for identity in identities))


def agreement_of(me: Identity, identities: Sequence[Identity], place: Place = PLACE) -> Agreement:
    """``me`` in a round that all ``identities`` decide."""
    return Agreement(me, place, SHAPE, roster_of(identities))


def leader(identities: Sequence[Identity], turn: int = 0, place: Place = PLACE) -> Identity:
    """Who leads a round first (or in a later turn)."""
    order = leader_order(place.run, place.fragment, place.round, roster_of(identities))
    return next(i for i in identities if i.peer_id == order[turn % len(order)])


def plan_of(
    by: Identity,
    identities: Sequence[Identity],
    *,
    ballot: tuple[int, int] = (0, 0),
    place: Place = PLACE,
    shape: Shape = SHAPE,
    owners: Sequence[Identity] | None = None,
    **changes: Any,
) -> Plan:
    """All contribute, and each of ``owners`` (else all) merges an equal part."""
    owners = sorted(owners or identities, key=lambda identity: identity.peer_id)
    step = shape.size // len(owners)
    ends = [*(step * (i + 1) for i in range(len(owners) - 1)), shape.size]
    starts = [0, *ends[:-1]]
    parts = tuple(
        Part(start, stop, owner.peer_id, None)
        for start, stop, owner in zip(starts, ends, owners, strict=True)
    )
    roster = roster_of(identities)
    plan = Plan(
        place.fragment,
        place.round,
        *ballot,
        by.peer_id,
        place.previous,
        place.state,
        shape.codecs[0],
        roster,
        tuple(Contributor(peer, 100.0, 100, True) for peer in roster),
        parts,
        roster,
        1.0,
        1.0,
    )
    return dataclasses.replace(plan, **changes)


def result_of(
    owner: Identity, plan: Plan, start: int, stop: int, content: bytes = b"", **changes: Any
) -> PartResult:
    """What ``owner`` says of its part: everybody is in it."""
    unsigned = PartResult(
        plan.fragment,
        plan.round,
        start,
        stop,
        owner.peer_id,
        plan.codec,
        blake3(b"%d %d" % (start, stop) + content).digest(),
        pack_counts([stop - start] * len(plan.contributors)),
        basis_of(plan.codec, plan.contributors),
        b"",
    )
    return sign_result(owner, RUN, dataclasses.replace(unsigned, **changes))


def counts_of(included: Iterable[Included]) -> bytes:
    """A part's counts from those who are in it."""
    elements = dict(included)
    return pack_counts([elements.get(index, 0) for index in range(max(elements, default=-1) + 1)])


def results_of(plan: Plan, identities: Sequence[Identity]) -> list[PartResult]:
    """Results for all parts of a plan."""
    by_peer = {identity.peer_id: identity for identity in identities}
    return [
        part.result or result_of(by_peer[part.owner], plan, part.start, part.stop)
        for part in plan.parts
    ]


def certificate_of(
    outcome: Outcome,
    voters: Sequence[Identity],
    roster: tuple[PeerId, ...],
    ballot: tuple[int, int] = (0, 0),
) -> Certificate:
    """A certificate with the votes of ``voters``."""
    hash_ = outcome_hash(outcome)
    votes = {
        voter.peer_id: sign_vote(
            voter, RUN, outcome.fragment, outcome.round, outcome.previous, ballot, hash_
        ).signature
        for voter in voters
    }
    return certify(RUN, ballot, roster, outcome, votes)


def decided(identities: Sequence[Identity], place: Place = PLACE) -> Certificate:
    """A round that was decided without any fault."""
    plan = plan_of(leader(identities, place=place), identities, place=place)
    outcome = outcome_of(plan, results_of(plan, identities), place.work)
    return certificate_of(outcome, identities, roster_of(identities))


def announce_of(peer: PeerId, place: Place = PLACE, **changes: Any) -> Announce:
    """An active island at ``place``, ready with 100 tokens."""
    announce = first_announcement(
        peer,
        place,
        version="0",
        ready=True,
        tokens=100,
        steps=10,
        weight=100.0,
        eta=0.0,
        tokens_per_second=100.0,
        steps_per_second=10.0,
        upload=1e7,
        download=1e7,
        loss=2.0,
    )
    return dataclasses.replace(announce, **changes)


def company_of(agreement: Agreement, now: float, *, forgot: bool = False) -> Company:
    """Whom one member counts on in a round to which all have come, and are heard at ``now``."""
    membership = Membership(agreement.me)
    for peer in agreement.roster:
        membership.on_announce(announce_of(peer, agreement.place), b"", 1, now)
    mine = announce_of(agreement.me, agreement.place)
    return Company(agreement, membership, lambda: mine, forgot)


def adopt(count: int = 3) -> tuple[list[Identity], Plan, Agreement]:
    """Members, their leader's plan, and one who has adopted it."""
    members = EVERYBODY[:count]
    first = leader(members)
    plan = plan_of(first, members)
    other = agreement_of(leader(members, 1), members)
    assert other.on_plan(first.peer_id, plan) == [Adopted(plan)]
    return members, plan, other
