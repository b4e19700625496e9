"""Paxos: whatever the network does, one outcome; and nothing malformed gets in."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from gossip_kit import (
    PLACE,
    RUN,
    SHAPE,
    agreement_of,
    decided,
    leader,
    plan_of,
    result_of,
    results_of,
    roster_of,
)
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gossip.agreement import (
    LEAP,
    NONE,
    VOTES_KEPT,
    Adopted,
    Agreement,
    CastVote,
    Decided,
    DecidedElsewhere,
    Remains,
)
from gossip.certificate import (
    check_certificate,
    outcome_hash,
    outcome_of,
    sign_result,
    sign_vote,
)
from gossip.planning import renewed_plan, repeated_plan
from gossip.validity import MAX_TOKENS, key_of
from protocols.errors import BadSignature, Malformed, RemoteProtocolError, Stale
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Certificate,
    Contributor,
    Included,
    Part,
    PartResult,
    Plan,
    Prepare,
    Promise,
    Vote,
)

pytestmark = pytest.mark.usefixtures("remembered_signatures")

EVERYBODY = [Identity.from_seed(number.to_bytes(32, "big")) for number in range(1, 6)]
Message = Plan | Prepare | Promise | Vote | PartResult | Certificate


class Network:
    """Agreements and the messages between them, delivered as somebody else decides."""

    def __init__(self, count: int) -> None:
        self.identities = EVERYBODY[:count]
        self.members = {i.peer_id: agreement_of(i, self.identities) for i in self.identities}
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
        if member.promised == NONE and member.owner_of((0, 0), member.roster) == member.me:
            self.lead(member, Remains((0, 0), member.roster, None, {}, frozenset()), number)
            return
        prepare = member.prepare(0, member.roster)
        self.tell(member, prepare)
        mine = member.on_prepare(member.me, prepare)
        assert isinstance(mine, Promise)
        assert member.on_promise(member.me, mine) is None

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
                remains = member.on_promise(sender, message)
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


def adopt(count: int = 3) -> tuple[list[Identity], Plan, Agreement]:
    """Members, their leader's plan, and one who has adopted it."""
    members = EVERYBODY[:count]
    first = leader(members)
    plan = plan_of(first, members)
    other = agreement_of(leader(members, 1), members)
    assert other.on_plan(first.peer_id, plan) == [Adopted(plan)]
    return members, plan, other


def test_a_member_votes_when_it_holds_every_part_and_once_only() -> None:
    members, plan, other = adopt()
    results = results_of(plan, members)
    for result in results[:-1]:
        assert other.on_held(result) == []
    assert [part[2] for part in other.missing()] == [results[-1].owner]
    (event,) = other.on_held(results[-1])
    assert isinstance(event, CastVote)
    assert event.vote.outcome == outcome_hash(outcome_of(plan, results, PLACE.work))
    assert other.on_held(results[-1]) == []
    assert other.on_plan(plan.leader, plan) == []


def test_the_first_of_two_results_for_one_part_counts() -> None:
    members, plan, other = adopt()
    first, *rest = results_of(plan, members)
    owner = next(i for i in members if i.peer_id == first.owner)
    other.on_held(first)
    other.on_held(result_of(owner, plan, first.start, first.stop, b"another"))
    (event,) = [event for result in rest for event in other.on_held(result)]
    assert isinstance(event, CastVote)
    assert event.vote.outcome == outcome_hash(outcome_of(plan, [first, *rest], PLACE.work))


def test_a_result_merged_for_other_contributors_does_not_count() -> None:
    """Its indices would mean other islands."""
    members, plan, other = adopt()
    fewer = dataclasses.replace(plan, contributors=plan.contributors[1:])
    owner = next(i for i in members if i.peer_id == plan.parts[0].owner)
    foreign = result_of(owner, fewer, plan.parts[0].start, plan.parts[0].stop)
    other.on_held(foreign)
    assert len(other.missing()) == len(plan.parts)
    assert other.on_prepare(  # and is not passed on to a new leader
        leader(members, 2).peer_id, Prepare(0, 3, 0, 2, PLACE.previous, other.roster)
    ) == Promise(0, 2, 0, 0, None, ())


def test_a_majority_of_votes_decides_for_who_holds_it_and_is_pointed_out_to_who_does_not() -> None:
    members, plan, other = adopt()
    results = results_of(plan, members)
    hash_ = outcome_hash(outcome_of(plan, results, PLACE.work))
    votes = [sign_vote(i, RUN, 0, 3, (0, 0), hash_) for i in members if i.peer_id != other.me]
    assert other.on_vote(votes[0]) == []
    assert other.on_vote(votes[0]) == []  # the same again
    (event,) = other.on_vote(votes[1])
    assert isinstance(event, DecidedElsewhere)
    assert set(event.peers) == {vote.voter for vote in votes}
    events = [event for result in results for event in other.on_held(result)]
    assert [type(event) for event in events] == [CastVote, Decided]
    assert other.certificate is not None
    assert len(other.certificate.votes) == 3
    assert other.on_vote(votes[0]) == other.on_held(results[0]) == []


def test_a_later_ballot_ends_the_earlier_one() -> None:
    members, plan, other = adopt()
    challenger = agreement_of(leader(members, 2), members)
    prepare = challenger.prepare(0, challenger.roster)
    promise = other.on_prepare(challenger.me, prepare)
    assert promise == Promise(0, prepare.ballot, 0, 0, None, ())
    for result in results_of(plan, members):
        assert other.on_held(result) == []  # holds everything, and must not vote for it
    assert other.on_plan(plan.leader, plan) == []
    again = other.on_prepare(challenger.me, prepare)
    assert isinstance(again, Promise)
    assert len(again.held) == len(plan.parts)


def test_a_new_leader_repeats_the_vote_of_the_highest_ballot() -> None:
    members = EVERYBODY[:3]
    plans = {
        (0, 0): plan_of(leader(members), members),
        (0, 4): plan_of(leader(members, 4), members, ballot=(0, 4)),
    }
    plans[0, 4] = dataclasses.replace(plans[0, 4], contributors=plans[0, 4].contributors[:2])
    candidate = agreement_of(leader(members, 2), members)
    candidate.promised = (0, 6)
    prepare = candidate.prepare(0, candidate.roster)
    assert prepare.ballot == 8
    mine = candidate.on_prepare(candidate.me, prepare)
    assert isinstance(mine, Promise)
    outcomes = {
        at: outcome_of(plan, results_of(plan, members), PLACE.work) for at, plan in plans.items()
    }
    others = [peer for peer in candidate.roster if peer != candidate.me]
    assert candidate.on_promise(others[0], Promise(0, 8, 0, 0, outcomes[0, 0], ())) is None
    remains = candidate.on_promise(others[1], Promise(0, 8, 0, 4, outcomes[0, 4], ()))
    assert remains is not None
    assert remains.voted == outcomes[0, 4]


def test_a_higher_promise_ends_a_candidacy_and_strangers_promise_nothing() -> None:
    members = EVERYBODY[:3]
    candidate = agreement_of(leader(members, 1), members)
    prepare = candidate.prepare(0, candidate.roster)
    mine = candidate.on_prepare(candidate.me, prepare)
    assert isinstance(mine, Promise)
    candidate.on_promise(candidate.me, mine)
    ask = Promise(0, prepare.ballot, 0, 0, None, ())
    assert candidate.on_promise(EVERYBODY[4].peer_id, ask) is None
    other = next(peer for peer in candidate.roster if peer != candidate.me)
    assert candidate.on_promise(other, Promise(0, prepare.ballot + 3, 0, 0, None, ())) is None
    assert candidate.on_promise(other, ask) is None  # too late: somebody is ahead


def test_in_a_later_epoch_all_must_promise() -> None:
    members = EVERYBODY[:3]
    candidate = agreement_of(leader(members, 1), members)
    prepare = candidate.prepare(1, candidate.roster)
    mine = candidate.on_prepare(candidate.me, prepare)
    assert isinstance(mine, Promise)
    assert candidate.on_promise(candidate.me, mine) is None
    for peer in candidate.roster:
        if peer != candidate.me:
            other = agreement_of(next(i for i in members if i.peer_id == peer), members)
            promise = other.on_prepare(candidate.me, prepare)
            assert isinstance(promise, Promise)
            remains = candidate.on_promise(peer, promise)
    assert remains is not None


def test_one_ballot_of_a_later_epoch_belongs_to_one_roster() -> None:
    """Two groups of survivors that overlap may come upon the same number."""
    members = EVERYBODY[:3]
    shared = agreement_of(members[0], members)
    for partner in members[1:]:
        mine = roster_of([members[0], partner])
        candidate = agreement_of(partner, members)
        number = candidate.prepare(1, mine).ballot
        prepare = Prepare(0, 3, 1, number + 2 * 5, PLACE.previous, mine)
        if partner is members[1]:
            first = prepare.ballot
            assert isinstance(shared.on_prepare(partner.peer_id, prepare), Promise)
        elif prepare.ballot == first:
            with pytest.raises(Stale):
                shared.on_prepare(partner.peer_id, prepare)
        else:  # the hash gave them different numbers: the same question with the number taken
            taken = dataclasses.replace(prepare, ballot=first)
            with pytest.raises(RemoteProtocolError):
                shared.on_prepare(partner.peer_id, taken)


# --- what is refused ------------------------------------------------------------------------------


def bent(plan: Plan, members: list[Identity]) -> dict[str, Plan]:
    """Plans no honest leader makes."""
    replace = dataclasses.replace
    first, *others = plan.contributors
    part, *parts = plan.parts
    owner = next(i for i in members if i.peer_id == part.owner)
    good = result_of(owner, plan, part.start, part.stop)

    def with_result(**changes: Any) -> Plan:
        bad = sign_result(owner, RUN, replace(good, **changes))
        return replace(plan, parts=(replace(part, result=bad), *parts))

    length = part.stop - part.start
    return {
        "no contributors": replace(plan, contributors=()),
        "a contributor twice": replace(plan, contributors=(first, first, *others)),
        "a negative weight": replace(plan, contributors=(replace(first, weight=-1.0), *others)),
        "more weight than tokens": replace(
            plan, contributors=(replace(first, weight=1e9), *others)
        ),
        "tokens beyond measure": replace(
            plan, contributors=(replace(first, tokens=MAX_TOKENS + 1), *others)
        ),
        "a stranger contributes": replace(
            plan, contributors=(Contributor(EVERYBODY[4].peer_id, 1.0, 1, True), *others)
        ),
        "no parts": replace(plan, parts=()),
        "a gap": replace(plan, parts=tuple(parts)),
        "a hole at the end": replace(plan, parts=plan.parts[:-1]),
        "too long": replace(plan, parts=(*plan.parts, Part(SHAPE.size, 2**62, part.owner, None))),
        "an empty part": replace(plan, parts=(Part(0, 0, part.owner, None), *plan.parts)),
        "a stranger merges": replace(
            plan, parts=(replace(part, owner=EVERYBODY[4].peer_id), *parts)
        ),
        "another codec": replace(plan, codec="fp32"),
        "no next roster": replace(plan, next_roster=()),
        "a doubled next roster": replace(plan, next_roster=plan.roster * 2),
        "endless patience": replace(plan, patience_s=1e300),
        "no patience": replace(plan, patience_s=0.0),
        "negative time": replace(plan, expected_s=-1.0),
        "endless time": replace(plan, expected_s=1e300),
        "a result that is not signed": replace(
            plan, parts=(replace(part, result=replace(good, signature=b"")), *parts)
        ),
        "a result of another round": with_result(round=4),
        "a result for another range": with_result(stop=part.stop + 1024),
        "a result in another codec": with_result(codec="fp32"),
        "a result for other contributors": with_result(basis=b"x" * 32),
        "a result with a short digest": with_result(digest=b"x"),
        "nothing, with contributors": with_result(digest=b""),
        "an unknown contributor": with_result(included=(Included(3, length),)),
        "a contributor counted twice": with_result(
            included=(Included(0, length), Included(0, length))
        ),
        "more elements than there are": with_result(included=(Included(0, length + 1),)),
        "another state": replace(plan, state=b"x" * 32),
        "another predecessor": replace(plan, previous=b"x" * 32),
        "another round": replace(plan, round=4),
        "another roster": replace(plan, roster=plan.roster[:2]),
        "a roster of strangers": replace(
            plan, epoch=1, roster=(*plan.roster, EVERYBODY[4].peer_id)
        ),
        "somebody else's ballot": replace(plan, ballot=1),
        "a ballot out of reach": replace(plan, ballot=3 * LEAP),
        "an epoch out of reach": replace(plan, epoch=2 * LEAP),
    }


BENT = bent(plan_of(leader(EVERYBODY[:3]), EVERYBODY[:3]), EVERYBODY[:3])


@pytest.mark.parametrize("how", BENT)
def test_a_bent_plan_is_refused_and_changes_nothing(how: str) -> None:
    members = EVERYBODY[:3]
    other = agreement_of(leader(members, 1), members)
    with pytest.raises(RemoteProtocolError):
        other.on_plan(BENT[how].leader, BENT[how])
    assert (other.plan, other.promised) == (None, NONE)


def test_a_plan_must_come_from_its_leader() -> None:
    members = EVERYBODY[:3]
    other = agreement_of(leader(members, 1), members)
    with pytest.raises(Malformed):
        other.on_plan(leader(members, 2).peer_id, plan_of(leader(members), members))


@pytest.mark.parametrize("how", ["a gap", "a negative weight", "no next roster", "another state"])
def test_a_bent_vote_in_a_promise_is_refused(how: str) -> None:
    """A new leader would have to propose it again, and be refused by everybody."""
    members = EVERYBODY[:3]
    results = results_of(plan_of(leader(members), members), members)
    candidate = agreement_of(leader(members, 1), members)
    prepare = candidate.prepare(0, candidate.roster)
    bad = outcome_of(BENT[how], results[-len(BENT[how].parts) :], PLACE.work)
    for outcome in (bad, dataclasses.replace(bad, work=bad.work + 5)):
        with pytest.raises(RemoteProtocolError):
            candidate.on_promise(
                leader(members).peer_id, Promise(0, prepare.ballot, 0, 0, outcome, ())
            )


def test_unsigned_or_foreign_results_in_a_promise_are_refused() -> None:
    members = EVERYBODY[:3]
    plan = plan_of(leader(members), members)
    good = results_of(plan, members)[0]
    owner = next(i for i in members if i.peer_id == good.owner)
    stranger = result_of(EVERYBODY[4], plan, 0, 1024)
    bad = [
        dataclasses.replace(good, signature=b""),
        dataclasses.replace(good, digest=b"x" * 32),
        result_of(owner, plan, good.start, good.stop, round=9),
        result_of(owner, plan, 0, 2**60),
        stranger,
    ]
    candidate = agreement_of(leader(members, 1), members)
    prepare = candidate.prepare(0, candidate.roster)
    for result in bad:
        with pytest.raises(RemoteProtocolError):
            candidate.on_promise(
                leader(members).peer_id, Promise(0, prepare.ballot, 0, 0, None, (good, result))
            )
    answer = Promise(0, prepare.ballot, 0, 0, None, (good,))
    candidate.on_promise(leader(members).peer_id, answer)
    remains = candidate.on_promise(leader(members, 2).peer_id, answer)
    assert remains is not None
    assert remains.held == {key_of(good): good}


def test_a_vote_under_a_ballot_only_just_promised_is_refused() -> None:
    members = EVERYBODY[:3]
    outcome = decided(members).outcome
    candidate = agreement_of(leader(members, 1), members)
    ballot = candidate.prepare(0, candidate.roster).ballot
    with pytest.raises(Malformed):
        candidate.on_promise(leader(members).peer_id, Promise(0, ballot, 0, ballot, outcome, ()))


def test_ballots_as_high_as_they_get_do_not_stop_anybody() -> None:
    """Finding the next number of mine takes no longer for large numbers."""
    members = EVERYBODY[:3]
    other = agreement_of(leader(members, 1), members)
    step = LEAP - LEAP % 3 - 1  # a number of the third in the order
    reached = 0
    for _ in range(5):
        reached += step if reached == 0 else step - step % 3
        assert isinstance(
            other.on_prepare(
                leader(members, 2).peer_id,
                Prepare(0, 3, 0, reached, PLACE.previous, other.roster),
            ),
            Promise,
        )
    ballot = other.prepare(0, other.roster).ballot
    assert reached < ballot <= reached + 3
    assert ballot % 3 == 1
    with pytest.raises(Malformed):
        other.on_prepare(
            leader(members, 2).peer_id,
            Prepare(0, 3, 0, 3 * 2**61 + 2, PLACE.previous, other.roster),
        )


def test_one_voter_cannot_crowd_out_the_others() -> None:
    members, plan, other = adopt()
    liar, honest = (i for i in members if i.peer_id != other.me)
    for number in range(300):
        other.on_vote(sign_vote(liar, RUN, 0, 3, (0, number), bytes([number % 256]) * 32))
    assert len(other._votes) <= VOTES_KEPT
    results = results_of(plan, members)
    for result in results:
        other.on_held(result)
    hash_ = outcome_hash(outcome_of(plan, results, PLACE.work))
    events = other.on_vote(sign_vote(honest, RUN, 0, 3, (0, 0), hash_))
    assert [type(event) for event in events] == [Decided]


def test_votes_that_are_refused() -> None:
    members, _, other = adopt()
    voter = next(i for i in members if i.peer_id != other.me)
    vote = sign_vote(voter, RUN, 0, 3, (0, 0), b"a" * 32)
    other.on_vote(vote)
    with pytest.raises(Malformed):  # two votes under one ballot
        other.on_vote(sign_vote(voter, RUN, 0, 3, (0, 0), b"b" * 32))
    with pytest.raises(BadSignature):
        other.on_vote(dataclasses.replace(vote, ballot=1))
    with pytest.raises(BadSignature):
        other.on_vote(sign_vote(EVERYBODY[4], RUN, 0, 3, (0, 0), b"a" * 32))
    with pytest.raises(BadSignature):  # nor under a ballot whose roster is not known
        other.on_vote(sign_vote(EVERYBODY[4], RUN, 0, 3, (7, 0), b"a" * 32))
    with pytest.raises(Stale):
        other.on_vote(sign_vote(voter, RUN, 0, 4, (0, 0), b"a" * 32))


def test_rosters_of_later_epochs_are_not_collected_for_ever() -> None:
    members = EVERYBODY[:3]
    other = agreement_of(members[0], members)
    roster = roster_of(members[:2])
    for epoch in range(1, 100):
        number = agreement_of(members[1], members).prepare(epoch, roster).ballot
        other.on_prepare(members[1].peer_id, Prepare(0, 3, epoch, number, PLACE.previous, roster))
    assert len(other._rosters) <= 32
    assert other.office == roster
