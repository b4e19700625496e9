"""The round's state machines against a hostile world: delays, kills, freezes, restarts.

The world below delivers messages between real :class:`gossip.rounds.round.Round` objects under a
virtual clock and plays the tensors' part with random delays. Whatever it does, all commits of a
round must agree, and as long as somebody lives the chain must grow.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from gossip_kit import RUN, result_of
from round_kit import SIZE, Peer, World

from gossip.plans.agreed import Remains
from gossip.plans.certificate import basis_of, leader_order, outcome_of, sign_result
from gossip.plans.validity import key_of
from gossip.rounds import round as rounds
from gossip.rounds.candidacies import AT_ONCE
from gossip.rounds.company import BELIEVED, PASSED_OVER
from gossip.rounds.instructions import Send
from gossip.rounds.round import Round
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.messages import Outcome, Part, PartResult, Prepare, Promise, Suspect

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def agree(world: World) -> None:
    for number, heads in world.commits.items():
        assert len(heads) == 1, f"round {number} was decided twice: {heads}"


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16])
def test_without_faults_everybody_commits_every_round(count: int) -> None:
    world = World(count, seed=count)
    world.run(30.0 if count < 16 else 10.0)
    agree(world)
    lengths = [len(peer.chain) for peer in world.peers.values()]
    assert min(lengths) >= (18 if count < 16 else 5)
    assert max(lengths) - min(lengths) <= 1
    everyone = world.peers[min(world.peers)].chain[-1]
    assert len(everyone.outcome.contributors) >= max(1, count // 2)


@pytest.mark.parametrize("seed", range(4))
def test_random_kills_and_restarts(seed: int) -> None:
    world = World(4, seed)
    rng = random.Random(1000 + seed)
    while world.now < 120.0:
        world.run(world.now + rng.uniform(1.0, 6.0))
        peer = rng.choice([p for p in world.peers.values() if p.alive])
        world.kill(peer)
        world.after(rng.uniform(0.5, 8.0), lambda p=peer: None if p.alive else world.restart(p))
        world.run(world.now + rng.uniform(4.0, 9.0))
        agree(world)
    world.run(world.now + 25.0)
    agree(world)
    lengths = [len(peer.chain) for peer in world.peers.values()]
    assert all(peer.alive for peer in world.peers.values())
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) > 50
    assert set(world.peers[min(world.peers)].chain[-1].outcome.next_roster) == set(world.peers)


@pytest.mark.parametrize("seed", range(3))
def test_frozen_members_are_passed_over_and_come_back(seed: int) -> None:
    world = World(5, seed)
    rng = random.Random(seed)
    for _ in range(10):
        world.run(world.now + rng.uniform(1.0, 4.0))
        peer = rng.choice(list(world.peers.values()))
        world.freeze(peer)
        before = max(len(p.chain) for p in world.peers.values())
        world.run(world.now + rng.uniform(4.0, 20.0))
        assert max(len(p.chain) for p in world.peers.values()) > before
        world.thaw(peer)
        agree(world)
    world.run(world.now + 15.0)
    lengths = [len(peer.chain) for peer in world.peers.values()]
    agree(world)
    assert max(lengths) - min(lengths) <= 1


def test_the_last_survivor_goes_on_alone() -> None:
    world = World(3, seed=5)
    world.run(10.0)
    first, second, third = world.peers.values()
    world.kill(first)
    world.kill(second)
    world.run(60.0)
    length = len(third.chain)
    world.run(80.0)
    assert len(third.chain) > length
    assert third.chain[-1].roster == (third.identity.peer_id,)


def test_survivors_that_lose_one_more_go_on() -> None:
    """Three of seven are left, and open an epoch; then one dies before it has promised."""
    world = World(7, seed=2)
    world.run(6.0)
    peers = list(world.peers.values())
    for peer in peers[:4]:
        world.kill(peer)
    left = peers[4:]
    world.run(world.now + 20.0)

    def epoch(peer: Peer) -> int:
        return 0 if peer.round is None else peer.round.agreement.promised[0]

    while not any(map(epoch, left)):
        world.run(world.now + 0.001)
        assert world.now < 60.0
    candidate, *_, last = sorted(left, key=epoch, reverse=True)
    assert epoch(last) == 0
    world.kill(last)
    before = len(candidate.chain)
    world.run(world.now + 30.0)
    assert len(candidate.chain) > before + 5


def under_way(world: World) -> tuple[Peer, list[Peer]]:
    """Run until a round has a plan at all members, none of them done; its leader, the others."""
    peers = list(world.peers.values())

    def planned() -> bool:
        current = [peer.round for peer in peers]
        plans = {r.agreement.plan.leader for r in current if r and r.agreement.plan}
        return len(plans) == 1 and all(
            r is not None and not r.finished and r.agreement.plan is not None for r in current
        )

    while not planned():
        assert world.now < 20.0
        world.run(world.now + 0.01)
    leader = next(p for p in peers if p.round and p.round.agreement.plan.leader == p.round.me)  # type: ignore[union-attr]
    return leader, [peer for peer in peers if peer is not leader]


def test_who_leaves_this_side_of_a_fork_decides_nothing_until_it_stays_after_all() -> None:
    world = World(3, seed=1)
    leader, others = under_way(world)
    leaves, peers = True, [leader, *others]
    for peer in peers:
        assert peer.round is not None
        assert peer.round.agreement.voted is None
        peer.round.leaving = peer.round.agreement.abstains = lambda: leaves
    before = [(len(p.chain), p.round.agreement.promised) for p in peers if p.round]
    world.run(world.now + 20.0)
    assert [(len(p.chain), p.round.agreement.promised) for p in peers if p.round] == before
    leaves = False
    world.run(world.now + 1.0)
    assert all(len(peer.chain) > before[0][0] for peer in peers)
    agree(world)


def test_who_finds_most_of_the_others_at_fault_blames_nobody() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    assert leader.round is not None
    now = world.now
    for other in others[:2]:
        assert leader.round.on_fault(other.identity.peer_id, now) == []
    for later in (0.3, 0.6, 0.9):  # it leaves it to them to stand
        sent = leader.round.tick(now + later)
        told = [i.message for i in sent if isinstance(i, rounds.Send)]
        assert all(isinstance(message, Suspect) for message in told)
    assert leader.round.company.gone == set()


@pytest.mark.parametrize("silent", [0, 1, 2, 3])
def test_most_at_fault_and_nobody_goes_on(silent: int) -> None:
    """It stands itself once the others have had their time, if it hears most of them still."""
    world = World(4, seed=1)
    leader, others = under_way(world)
    peers = [other.identity.peer_id for other in others]
    current, begun = leader.round, world.now
    assert current is not None
    assert current.agreement.plan is not None
    for peer in peers:
        assert current.on_fault(peer, begun) == []
    plan = current.agreement.plan
    over = begun + PASSED_OVER * plan.patience_s + plan.expected_s
    for peer in peers[silent:]:
        leader.membership.on_contact(peer, over - 0.1)
    assert not any(isinstance(i, rounds.Send) for i in current.tick(over - 0.01))
    assert current.company.isolated
    sent = [i for i in current.tick(over + 0.01) if isinstance(i, rounds.Send)]
    if silent < 2:
        assert {type(i.message) for i in sent} == {Prepare}
        assert current.company.gone == set(peers[:silent])
    else:  # its own link may be dark
        assert sent == []
        assert current.company.gone == set()


@pytest.mark.parametrize("seed", range(3))
def test_all_doubt_all_again_and_again_while_links_come_and_go(seed: int) -> None:
    world = World(4, seed)
    rng = random.Random(seed)
    peers = list(world.peers.values())
    pairs = [frozenset((a, b)) for a in world.peers for b in world.peers if a < b]
    for _ in range(8):
        world.run(world.now + rng.uniform(1.0, 4.0))
        world.cut |= set(pairs)
        world.run(world.now + rng.uniform(0.5, 3.0))
        for peer in peers:
            assert peer.round is not None
            for other in world.peers:
                world.do(peer, peer.round.on_fault(other, world.now))
        world.cut -= set(pairs) - {rng.choice(pairs)}
        agree(world)
        before = max(len(peer.chain) for peer in peers)
        world.run(world.now + 12.0)
        assert max(len(peer.chain) for peer in peers) > before
        world.cut.clear()
    world.run(world.now + 15.0)
    agree(world)
    lengths = [len(peer.chain) for peer in peers]
    assert max(lengths) - min(lengths) <= 1


def test_one_that_does_not_deliver_is_blamed_after_a_moment() -> None:
    world = World(4, seed=1)
    _, others = under_way(world)
    current = others[1].round
    assert current is not None
    now, faulty = world.now, others[0].identity.peer_id
    current.on_fault(faulty, now)
    assert current.company.gone == set()
    current.tick(now + 0.3)
    assert current.company.gone == {faulty}


def test_a_leader_that_doubts_alone_asks_the_others_first() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = leader.round, world.now
    assert current is not None
    faulty = others[0].identity.peer_id
    assert current.on_fault(faulty, now) == []
    (told,) = current.tick(now + 0.3)
    assert isinstance(told, Send)
    assert isinstance(told.message, Suspect)
    assert told.message.peers == (faulty,)
    assert told.to not in (faulty, current.me)
    assert current.company.gone == set()
    sent = [i for i in current.tick(now + 1.01) if isinstance(i, Send)]  # nobody has done anything
    assert current.company.gone == {faulty}
    assert {type(i.message) for i in sent} == {Prepare}


def test_a_leader_whose_doubts_others_share_acts_at_once() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = leader.round, world.now
    assert current is not None
    assert current.agreement.plan is not None
    faulty, other = (one.identity.peer_id for one in others[:2])
    plan = current.agreement.plan
    current.on_fault(faulty, now)
    said = Suspect(plan.fragment, plan.round, plan.epoch, plan.ballot, (faulty,))
    current.on_message(other, said, now)
    current.tick(now + 0.3)
    assert current.company.gone == {faulty}


def test_who_was_left_out_lately_leads_last() -> None:
    world = World(4, seed=1)
    one = next(iter(world.peers.values()))
    for peer in world.peers.values():
        peer.absent.unreliable = lambda round_: frozenset({one.identity.peer_id})  # type: ignore[method-assign]
    world.run(20.0)
    agree(world)
    turns = []
    for certificate in one.chain[1:]:
        order = leader_order(RUN, 0, certificate.outcome.round, certificate.roster)
        turns.append(order.index(one.identity.peer_id))
        assert certificate.ballot != turns[-1]
    assert 0 in turns


def test_whom_the_others_can_do_without_gets_no_promise_to_lead() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    one, other = others[:2]
    current, now = one.round, world.now
    assert current is not None
    assert leader.round is not None
    candidate = leader.round.proposer.prepare(0, leader.round.roster)
    current.on_fault(leader.identity.peer_id, now)
    current.tick(now + 0.3)
    assert current.company.gone == {leader.identity.peer_id}
    with pytest.raises(RemoteRefused, match="deliver"):
        current.on_prepare(leader.identity.peer_id, candidate, now + 0.3)
    world.kill(other)  # with one more gone it is needed
    one.membership.expel(other.identity.peer_id)
    assert isinstance(current.on_prepare(leader.identity.peer_id, candidate, now + 0.3), Promise)


def test_whom_the_others_can_do_without_does_not_lead_by_a_plan_alone_either() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    assert leader.round is not None
    faulty = leader.identity.peer_id
    asked = leader.round.proposer.prepare(0, leader.round.roster)
    remains = Remains((0, asked.ballot), asked.roster, None, {})
    plan = leader.round.opening.compose(remains, now, 1.0)
    assert plan is not None
    known = current.agreement.plan
    current.on_fault(faulty, now)
    current.tick(now + 0.3)
    with pytest.raises(RemoteRefused, match="deliver"):
        current.on_message(faulty, plan, now + 0.3)
    assert (current.agreement.plan, current.company.gone) == (known, {faulty})


def test_who_voids_one_plan_after_the_other_leads_no_more() -> None:
    """But there is time for whoever plans anew as one after the other fails."""
    world = World(4, seed=1)
    _, others = under_way(world)
    current, other = others[0].round, others[1]
    assert current is not None
    assert other.round is not None
    patience, begun = current.doubt_s / BELIEVED, world.now
    asked = other.round.proposer.prepare(0, current.roster)
    ballots = range(asked.ballot, 2**10, len(current.roster))
    later = iter([replace(asked, ballot=ballot) for ballot in ballots])
    for now in [begun + 0.01 * number for number in range(AT_ONCE)] + [begun + 1.1 * patience]:
        answer = current.on_prepare(other.identity.peer_id, next(later), now)
        assert isinstance(answer, Promise)
    with pytest.raises(RemoteRefused, match="voids"):
        current.on_prepare(other.identity.peer_id, next(later), begun + 1.2 * patience)
    assert current.company.gone == {other.identity.peer_id}


def test_who_was_promised_the_lead_has_its_turn_though_it_is_found_at_fault() -> None:
    """Two who find each other at fault would void each other's plans before anybody has them."""
    world = World(4, seed=1)
    leader, others = under_way(world)
    assert leader.round is not None
    order = leader.round.agreement.order(leader.round.roster)
    one = min(others, key=lambda peer: order.index(peer.identity.peer_id))  # next to lead
    current, promised_at = one.round, world.now
    assert current is not None
    candidate = leader.round.proposer.prepare(0, leader.round.roster)
    current.on_prepare(leader.identity.peer_id, candidate, promised_at)
    current.on_fault(leader.identity.peer_id, promised_at)

    def stands(now: float) -> bool:
        for other in world.peers:
            one.membership.on_contact(other, now)
        return any(
            isinstance(i, Send) and isinstance(i.message, Prepare) for i in current.tick(now)
        )

    patience = current.doubt_s / BELIEVED
    early = [promised_at + patience * step / 20 for step in range(1, 20)]
    assert not any(map(stands, early))
    assert current.company.gone == {leader.identity.peer_id}
    late = [promised_at + patience * step / 20 for step in range(20, 120)]
    assert any(map(stands, late))  # it has made no plan of it


def test_a_plan_after_one_that_failed_has_as_long_again_as_was_spent() -> None:
    world = World(4, seed=1)
    _, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    plan = current.agreement.plan
    assert plan is not None
    remains = Remains((0, 1), current.roster, None, {})
    at_once = current.opening.compose(remains, now, plan.patience_s)
    later = current.opening.compose(remains, now + 8.0, plan.patience_s)
    assert at_once is not None
    assert later is not None
    assert at_once.patience_s == plan.patience_s
    assert later.expected_s >= 8.0
    assert later.patience_s >= 2.0
    assert later.patience_s > plan.patience_s
    assert others[1].round is not None
    assert others[1].round.opening.bounded(later, now + 8.0) == later
    hasty = others[1].round.opening.bounded(later, now)  # to whom it has not lasted so long
    assert hasty.expected_s < later.expected_s


def test_whom_a_new_leader_doubts_owns_nothing_in_its_plan_though_it_is_not_certain_yet() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    dark = leader.identity.peer_id
    current.on_fault(dark, now)
    assert current.company.gone == set()
    remains = Remains((0, 1), current.roster, None, {})
    plan = current.opening.compose(remains, now, 1.0)
    assert plan is not None
    assert dark not in {part.owner for part in plan.parts}
    assert {c.peer for c in plan.contributors if not c.active} == {dark}


def test_who_has_restarted_and_abstains_owns_nothing_in_a_plan() -> None:
    """It would go by none, and its part be waited for in vain, plan after plan."""
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    peer = leader.identity.peer_id
    said = others[0].membership.announcement(peer)
    assert said is not None
    others[0].membership.on_announce(replace(said, status="joining"), b"", 10_000, now)
    remains = Remains((0, 1), current.roster, None, {})
    plan = current.opening.compose(remains, now, 1.0)
    assert plan is not None
    assert peer not in {part.owner for part in plan.parts}
    assert peer in plan.roster


def test_a_candidate_with_promises_and_no_plan_is_at_fault() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    assert leader.round is not None
    candidate = leader.round.proposer.prepare(0, leader.round.roster)
    assert isinstance(
        current.on_prepare(current.agreement.order(current.roster)[0], candidate, now), Promise
    )
    stood = []
    while not stood and now < world.now + 5.0:
        now += 0.1
        for other in world.peers:
            others[0].membership.on_contact(other, now)
        stood = [i for i in current.tick(now) if isinstance(i, Send) and type(i.message) is Prepare]
    assert stood
    current.company.settle(now)
    assert current.company.gone == {leader.identity.peer_id}


def test_merged_parts_that_only_a_member_at_fault_has_are_merged_anew() -> None:
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    assert current.agreement.plan is not None
    slow, other = leader.identity.peer_id, others[1].identity.peer_id
    plan = current.agreement.plan
    part = next(part for part in plan.parts if part.owner == slow)
    result = result_of(leader.identity, plan, part.start, part.stop)
    remains = Remains((0, 1), current.roster, None, {key_of(result): result})
    current.on_fault(slow, now)
    current.opening.shown(slow, Promise(0, 1, 0, 0, None, (result,)))

    def owner() -> str:
        renewed = current.opening.compose(remains, now, 1.0)
        assert renewed is not None
        return next(p.owner for p in renewed.parts if p.start == part.start)

    assert owner() != slow
    current.opening.shown(other, Promise(0, 1, 0, 0, None, (result,)))
    assert owner() == slow  # somebody else has it as well


class Pretending(World):
    """``liar`` tells whoever asks for its promise that it has voted for what it alone has signed,
    and that is something else each time."""

    liar: Peer | None = None
    lies = 0

    def deliver(self, source: Peer, to: PeerId, action: Callable[[Peer], None]) -> None:
        if source is self.liar:  # it is the first to answer
            self.after(0.001, lambda: action(self.peers[to]) if self.peers[to].alive else None)
        else:
            super().deliver(source, to, action)

    def control(self, source: Peer, target: Peer, asked: Round, message: object) -> None:
        if source is not self.liar or not isinstance(message, Prepare):  # it never leads
            super().control(source, target, asked, message)

    def reply(self, peer: Peer, source: Peer, asked: Round, answer: object) -> None:
        if source is self.liar and isinstance(answer, Promise):
            self.lies += 1
            answer = replace(answer, voted_epoch=0, voted_ballot=0, voted=self.made_up(), held=())
        super().reply(peer, source, asked, answer)

    def made_up(self) -> Outcome:
        assert self.liar is not None
        assert self.liar.round is not None
        plan = self.liar.round.agreement.plan
        assert plan is not None
        me, contributors = self.liar.identity.peer_id, plan.contributors[:1]
        part = PartResult(
            0, plan.round, 0, SIZE, me, plan.codec, bytes([self.lies]) * 32, b"",
            basis_of(plan.codec, contributors), b"",
        )  # fmt: skip
        whole = replace(plan, contributors=contributors, parts=(Part(0, SIZE, me, None),))
        return outcome_of(
            whole, [sign_result(self.liar.identity, RUN, part)], self.place(self.liar).work
        )


@pytest.mark.parametrize("others", [3, 4])
def test_who_tells_of_a_vote_for_what_nobody_has_is_believed_once(others: int) -> None:
    """A leader has to repeat such a vote, and the next one, and so on, as long as it is told."""
    world = Pretending(others + 2, seed=1)
    leader, rest = under_way(world)
    world.liar = rest[0]
    at = len(leader.chain)
    world.kill(leader)
    world.run(world.now + 20.0)
    agree(world)
    assert world.lies
    assert min(len(peer.chain) for peer in rest) > at + 3


def test_a_vote_for_what_is_lost_counts_where_the_others_are_no_majority() -> None:
    """It may be true: then nobody decides without it."""
    world = World(4, seed=1)
    leader, others = under_way(world)
    current, now = others[0].round, world.now
    assert current is not None
    plan = current.agreement.plan
    assert plan is not None
    results = [
        result_of(world.peers[part.owner].identity, plan, part.start, part.stop)
        for part in plan.parts
    ]
    voted = outcome_of(plan, results, current.place.work)
    owner = next(part.owner for part in plan.parts if part.owner != current.me)
    tellers = [peer.identity.peer_id for peer in (leader, *others[1:])]
    doubts = current.opening.doubts
    assert not doubts(tellers[0], voted, now)
    current.on_lost(next(result for result in results if result.owner == owner), now)
    assert [doubts(teller, voted, now) for teller in tellers[:2]] == [True, False]
    for result in results:  # it was found after all
        current.agreement.held[key_of(result)] = result
    assert not doubts(tellers[2], voted, now)
