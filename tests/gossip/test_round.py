"""The round's state machines against a hostile world: delays, kills, freezes, restarts.

The world below delivers messages between real :class:`gossip.rounds.round.Round` objects under a
virtual clock and plays the tensors' part with random delays. Whatever it does, all commits of a
round must agree, and as long as somebody lives the chain must grow.
"""

from __future__ import annotations

import random

import pytest
from round_kit import Peer, World, agree, under_way
from suites import slow

pytestmark = pytest.mark.usefixtures("remembered_signatures")


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


@pytest.mark.parametrize("seed", [0, 1, *slow(2, 3)])
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


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
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


def test_who_leaves_this_side_of_a_fork_decides_nothing_until_it_stays_after_all() -> None:
    world = World(3, seed=1)
    leader, others = under_way(world)
    leaves, peers = True, [leader, *others]
    for peer in peers:
        assert peer.round is not None
        assert peer.round.agreement.voted is None
        peer.round.changes_sides = peer.round.agreement.abstains = lambda: leaves
    before = [(len(p.chain), p.round.agreement.promised) for p in peers if p.round]
    world.run(world.now + 20.0)
    assert [(len(p.chain), p.round.agreement.promised) for p in peers if p.round] == before
    leaves = False
    world.run(world.now + 1.0)
    assert all(len(peer.chain) > before[0][0] for peer in peers)
    agree(world)
