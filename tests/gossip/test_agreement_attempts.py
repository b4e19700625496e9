"""Attempts that reach some members only, in any order: never two outcomes of one round."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from gossip_kit import (
    EVERYBODY,
    PLACE,
    RUN,
    agreement_of,
    plan_of,
    result_of,
    roster_of,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossip.plans.certificate import (
    check_certificate,
    outcome_hash,
)
from gossip.plans.planning import Remains, renewed_plan, repeated_plan
from gossip.rounds.agreed import Adopted, CastVote, Decided
from gossip.rounds.agreement import NONE, Agreement
from gossip.rounds.proposer import Proposer
from protocols.identity import PeerId
from protocols.messages import (
    Certificate,
    Part,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Vote,
)

pytestmark = pytest.mark.usefixtures("remembered_signatures")

Message = Plan | Prepare | Promise | Vote | PartResult | Certificate


class Network:
    """Agreements and the messages between them, delivered as somebody else decides."""

    def __init__(self, count: int) -> None:
        self.identities = EVERYBODY[:count]
        self.members = {i.peer_id: agreement_of(i, self.identities) for i in self.identities}
        self.proposers = {peer: Proposer(member) for peer, member in self.members.items()}
        self.flying: list[tuple[PeerId, PeerId, Message]] = []
        self.merged: dict[tuple[int, int, PeerId, bytes], PartResult] = {}
        self.certificates: list[Certificate] = []
        self.plans: dict[tuple[int, int], Plan] = {}

    def tell(self, sender: Agreement, message: Message) -> None:
        for peer in sender.roster:
            if peer != sender.me:
                self.flying.append((sender.me, peer, message))

    def stand(self, number: int) -> None:
        """The member leads under (0, 0) if it may and nothing has happened yet; else it asks."""
        member = self.members[self.identities[number % len(self.identities)].peer_id]
        if member.certificate is not None:
            return
        if member.promised == NONE and member.proposer_of((0, 0), member.roster) == member.me:
            self.lead(member, Remains((0, 0), member.roster, None, {}), number)
            return
        prepare = self.proposers[member.me].prepare(0, member.roster)
        self.tell(member, prepare)
        mine = member.on_prepare(member.me, prepare)
        assert isinstance(mine, Promise)
        assert self.proposers[member.me].on_promise(member.me, mine) is None

    def lead(self, member: Agreement, remains: Remains, chance: int) -> None:
        identity, roster = member.identity, member.roster[chance % 2 :]  # see who lives differently
        if remains.voted is not None:
            plan = repeated_plan(identity, PLACE, remains, 1.0)
        elif member.plan is not None:
            gone = {member.roster[chance % len(member.roster)]} - {member.me}
            live = [peer for peer in member.roster if peer not in gone]
            plan = renewed_plan(identity, PLACE, member.plan, remains, gone, live, roster)
        else:  # leaders see different members as ready
            owners = self.identities[chance % 2 :][:2]
            plan = plan_of(identity, self.identities, ballot=remains.ballot, owners=owners)
            ready = plan.contributors[: 1 + chance % len(plan.contributors)]
            plan = dataclasses.replace(plan, contributors=ready, next_roster=roster)
        assert self.plans.setdefault(remains.ballot, plan) == plan
        self.tell(member, plan)
        self.take(member, member.on_plan(member.me, plan))

    def take(self, member: Agreement, events: list[Any]) -> None:
        for event in events:
            match event:
                case Adopted(plan):
                    for part in plan.parts:
                        if part.owner == member.me and part.result is None:
                            self.flying.append((member.me, member.me, self.merge(member, part)))
                case CastVote(vote):
                    self.tell(member, vote)
                case Decided(certificate):
                    self.certificates.append(certificate)

    def merge(self, member: Agreement, part: Part) -> PartResult:
        """An owner's result for a part: the same whenever the same plan asks for it."""
        assert member.plan is not None
        key = (part.start, part.stop, member.me, member.basis)
        if key not in self.merged:
            self.merged[key] = result_of(
                member.identity, member.plan, part.start, part.stop, bytes([len(self.merged)])
            )
        return self.merged[key]

    def deliver(self, number: int, *, again: bool = False) -> None:
        if not self.flying:
            return
        at = number % len(self.flying)
        sender, to, message = self.flying[at] if again else self.flying.pop(at)
        member = self.members[to]
        match message:
            case Plan():
                self.take(member, member.on_plan(sender, message))
            case Prepare():
                answer = member.on_prepare(sender, message)
                self.flying.append((to, sender, answer))
            case Promise():
                remains = self.proposers[to].on_promise(sender, message)
                if remains is not None:
                    self.lead(member, remains, number)
            case Vote():
                self.take(member, member.on_vote(message))
            case PartResult():
                if sender == to:
                    self.tell(member, message)
                self.take(member, member.on_held(message))
            case Certificate():  # whoever is told catches up and takes part no more
                member.certificate = message

    def fetch(self, number: int) -> None:
        """A member gets hold of the parts that its plan takes as merged already."""
        member = self.members[self.identities[number % len(self.identities)].peer_id]
        for *_, result in member.missing():
            if result is not None:
                self.take(member, member.on_held(result))

    def check(self) -> None:
        assert len({outcome_hash(c.outcome) for c in self.certificates}) <= 1
        for certificate in self.certificates:
            check_certificate(
                certificate, run=RUN, previous=PLACE.previous, roster=roster_of(self.identities)
            )

    def sweep(self, kinds: tuple[type[Message], ...], reached: int) -> None:
        """Deliver what is of these kinds to those members whose bit is set in ``reached``."""
        numbers = {peer: number for number, peer in enumerate(self.members)}
        while True:
            fits = [
                at
                for at, (_, to, message) in enumerate(self.flying)
                if isinstance(message, kinds) and reached >> numbers[to] & 1
            ]
            if not fits:
                return
            self.deliver(fits[0])
            self.check()

    def end(self) -> None:
        """From here on nothing is lost, and one leads at a time: it must be decided."""
        for _ in range(4 * len(self.members)):
            if self.certificates:
                break
            highest = max(member.promised for member in self.members.values())
            self.stand(highest[1] + 1)
            while self.flying:
                self.deliver(0)
                for number in range(len(self.members)):
                    self.fetch(number)
        self.check()
        assert self.certificates


ACTIONS: list[Callable[[Network, int], None]] = [
    Network.stand,
    Network.fetch,
    lambda network, number: network.deliver(number),
    lambda network, number: network.deliver(number),
    lambda network, number: network.deliver(-1),  # the newest overtakes all others
    lambda network, number: network.deliver(number, again=True),
    lambda network, number: network.flying and network.flying.pop(number % len(network.flying)),
]
SOME = st.integers(0, 31)  # a set of members
ATTEMPT = st.tuples(st.integers(0, 99), SOME, SOME, SOME, SOME, SOME)


@settings(max_examples=300)
@given(st.integers(3, 5), st.lists(ATTEMPT, min_size=2, max_size=6))
def test_attempts_that_reach_some_members_only(
    count: int, attempts: list[tuple[int, int, int, int, int, int]]
) -> None:
    """Each leader's messages stop somewhere, and may arrive when the next ones are at work."""
    network = Network(count)
    for who, asked, answering, planned, merging, voting in attempts:
        network.stand(who)
        network.sweep((Prepare,), asked)
        network.sweep((Promise, Certificate), answering)
        network.sweep((Plan,), planned)
        network.sweep((PartResult,), merging)
        for number in range(count):
            if merging >> number & 1:
                network.fetch(number)
        network.sweep((Vote,), voting)
        network.check()
    network.end()


@settings(max_examples=25)
@given(
    st.integers(3, 5),
    st.lists(
        st.tuples(st.integers(0, len(ACTIONS) - 1), st.integers(0, 999)), min_size=80, max_size=200
    ),
)
@example(3, [(0, n) for n in range(3)] + [(2, 0)] * 200)
def test_messages_in_any_order_lost_and_doubled(count: int, script: list[tuple[int, int]]) -> None:
    network = Network(count)
    for action, number in script:
        ACTIONS[action](network, number)
        network.check()
    network.end()
