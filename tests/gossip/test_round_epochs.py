"""A round whose members are in several epochs of it: all know of all, not the candidates alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from exchange_kit import until
from gossip_kit import plan_of
from round_kit import Peer, World
from simulated_swarm import simulated_swarm

from gossip.rounds.agreement import NONE
from gossip.rounds.round import Round
from protocols.errors import RemoteRefused
from protocols.memory import virtual_time
from protocols.messages import Prepare, Promise

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def opened(world: World) -> list[tuple[Peer, Round]]:
    """Run until all are in one round that nobody has begun; its members, the last to lead first."""

    def all_wait() -> list[tuple[Peer, Round]]:
        rounds = [(peer, peer.round) for peer in world.peers.values() if peer.round is not None]
        same = len({it.place.previous for _, it in rounds}) == 1
        begun = any(it.agreement.plan or it.agreement.awaits_plan for _, it in rounds)
        return rounds if same and not begun else []

    while not (members := all_wait()):
        world.run(world.now + 0.01)
        assert world.now < 20.0
    order = members[0][1].agreement.order(members[0][1].roster)
    return sorted(members, key=lambda member: -order.index(member[1].me))


@pytest.mark.parametrize("seed", range(2))
def test_those_who_are_too_few_without_others_follow_them_into_a_later_epoch(seed: int) -> None:
    """Six of sixteen have promised one, which a seventh has not; two are dead: it is eight short
    of a majority, which each of them takes the fourteen for that it hears of."""
    world = World(16, seed=seed)
    world.run(5.0)
    members = opened(world)
    later, (_, asked), dead = [it for _, it in members[:6]], members[6], members[7:9]
    candidate, roster = later[0], tuple(sorted(it.me for it in (*later, asked)))
    number = candidate.agreement.order(roster).index(candidate.me) or len(roster)
    place = candidate.place
    asks = Prepare(place.fragment, place.round, 1, number, place.previous, roster)
    for it in later:
        it.agreement.on_prepare(candidate.me, asks)
    for peer, _ in dead:
        world.kill(peer)
    world.run(world.now + 6.0)
    assert all(len(peer.chain) > place.round for peer, _ in members if peer.alive)
    assert {len(heads) for heads in world.commits.values()} == {1}


def test_who_may_have_forgotten_a_promise_is_out_of_its_round_but_for_later_epochs() -> None:
    """What it has promised before it started again was in the epoch that all begin with."""
    world = World(4, seed=1)
    (again, _), *others, (leader, leads) = opened(world)
    again.forgotten = leads.place.round
    world.open(again)
    current, now = again.round, world.now
    assert current is not None
    identities = [peer.identity for peer in world.peers.values()]
    plan = plan_of(leader.identity, identities, place=leads.place, shape=world.rules.shape)
    assert current.on_message(leads.me, plan, now) == []
    with pytest.raises(RemoteRefused, match="restarted"):
        current.on_prepare(leads.me, leads.proposer.prepare(0, plan.roster), now)
    assert (current.agreement.plan, current.agreement.promised) == (None, NONE)

    for gone, _ in others:
        again.membership.expel(gone.identity.peer_id)
    prepare = leads.proposer.prepare(1, tuple(sorted((leads.me, current.me))))
    assert isinstance(current.on_prepare(leads.me, prepare, now), Promise)
    assert current.agreement.promised == (1, prepare.ballot)


def test_what_is_said_of_an_epoch_is_of_one_round() -> None:
    world = World(3, seed=1)
    world.run(3.0)
    [(_, mine), (other, theirs), _] = opened(world)
    said = replace(world.announce(other), epoch=1)
    mine.on_news(replace(said, round=said.round + 1))
    mine.on_news(replace(said, head=bytes(32)))
    assert mine.agreement.beyond == set()
    mine.on_news(said)
    assert mine.agreement.beyond == {theirs.me}


def test_members_say_in_which_epoch_they_are_until_the_round_is_over() -> None:
    async def main() -> None:
        async with simulated_swarm(4, size=5_000) as swarm:
            first, second, *others = swarm.members.values()
            [chain] = first.swarm.chains
            place, agreement = chain.replica.place, chain.round.agreement
            number = agreement.order(agreement.roster).index(second.peer) or 4
            asks = Prepare(0, place.round, 1, number, place.previous, agreement.roster)
            agreement.on_prepare(second.peer, asks)  # which asks nobody else, and knows of nothing
            agreements = [other.swarm.chains[0].round.agreement for other in (second, *others)]
            await until(lambda: all(it.beyond == {first.peer} for it in agreements), 0.3)
            assert first.swarm.status.epoch == 1
            await until(lambda: chain.replica.place.round > place.round, 30.0)
            assert first.swarm.status.epoch == 0

    virtual_time.run(main())
