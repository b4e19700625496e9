"""Rounds whose members do not deliver: who is blamed, and who asks the others first."""

from __future__ import annotations

import random

import pytest
from round_kit import World, agree, under_way

from gossip.rounds import round as rounds
from gossip.rounds.company import PASSED_OVER
from gossip.rounds.instructions import Send
from protocols.messages import Prepare, Suspect

pytestmark = pytest.mark.usefixtures("remembered_signatures")


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
