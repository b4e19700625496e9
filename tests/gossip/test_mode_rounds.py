"""Modes in rounds under a virtual clock: who is waited for, who contributes, who merges."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from round_kit import RULES, Peer, World

from bootstrap.manifest import Manifest
from gossip.place import Place
from gossip.plans.rules import Rules
from node.modes import at_will, clients_of, is_over, weight_of
from protocols.identity import PeerId
from protocols.messages import Outcome

pytestmark = pytest.mark.usefixtures("remembered_signatures")

AT_WILL = dataclasses.replace(RULES, quorum=1e-3, grace_fraction=0.0, min_grace_s=0.0)


def outcomes(world: World) -> list[Outcome]:
    """Of the longest chain; no round was decided twice."""
    assert all(len(heads) == 1 for heads in world.commits.values())
    longest = max(world.peers.values(), key=lambda peer: len(peer.chain))
    return [certificate.outcome for certificate in longest.chain]


def merged(outcome: Outcome) -> set[PeerId]:
    """Whose work is in it."""
    return {
        outcome.contributors[included.contributor].peer
        for part in outcome.parts
        for included in part.included
    }


def lone(count: int, rules: Rules, **options: int) -> tuple[World, list[Peer]]:
    world = World(count, 1, rules=rules, **options)
    return world, list(world.peers.values())


def test_at_will_nobody_waits_and_the_slow_are_in_it_when_they_are_ready() -> None:
    world, peers = lone(4, AT_WILL)
    world.run(40.0)
    found = [merged(outcome) for outcome in outcomes(world)]
    assert len(found) > 60  # each is ready after 0.65 s, and a round of its own begins then
    assert all(sum(p.identity.peer_id in who for who in found) > 8 for p in peers)
    assert sum(len(who) for who in found) / len(found) < 2.5


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_the_bound_on_staleness_spans_from_lock_step_on(bound: int) -> None:
    world, peers = lone(4, dataclasses.replace(AT_WILL, staleness=bound))
    world.run(30.0)
    found = [merged(outcome) for outcome in outcomes(world)]
    assert len(found) > 10
    for peer in peers:
        there = [at for at, who in enumerate(found) if peer.identity.peer_id in who]
        gaps = [later - before for before, later in itertools.pairwise(there)]
        assert max(gaps) <= bound + 1
    if bound == 0:
        assert all(len(who) == 4 for who in found)


@pytest.mark.parametrize("seed", range(1, 5))
def test_the_bound_holds_where_the_others_are_ready_before_they_hear_of_the_slow(seed: int) -> None:
    """The next round could be planned before everybody has said that it is there."""
    rules = dataclasses.replace(AT_WILL, staleness=2)
    world = World(4, seed, rules=rules, think=(0.0, 0.01))
    slow = next(iter(world.peers.values()))
    slow.slower = 100.0
    world.open(slow)  # it thinks anew
    world.run(30.0)
    found = [merged(outcome) for outcome in outcomes(world)]
    there = [at for at, who in enumerate(found) if slow.identity.peer_id in who]
    assert len(there) > 5
    gaps = [later - before for before, later in itertools.pairwise(there)]
    assert max(gaps) == 3


def test_lock_step_waits_for_one_that_is_four_times_slower() -> None:
    """Every round of mode allreduce has all gradients, and takes as long as the slowest needs."""
    world, peers = lone(4, dataclasses.replace(AT_WILL, staleness=0))
    peers[0].slower = 4.0
    world.run(60.0)
    found = outcomes(world)
    assert all(len(merged(outcome)) == 4 for outcome in found)
    assert 60.0 / (4 * 1.0 + 1.0) < len(found) < 60.0 / (4 * 0.3)


def test_the_only_merge_waits_for_a_branch_that_is_four_times_slower() -> None:
    only = dataclasses.replace(RULES, calls=True, staleness=0)
    world = World(4, 1, rules=only, think=(60.0, 61.0))
    slow = next(iter(world.peers.values()))
    slow.slower = 4.0
    world.open(slow)  # it thinks anew
    world.run(235.0)
    assert not any(outcome.work for outcome in outcomes(world))
    world.run(300.0)
    assert merged(next(o for o in outcomes(world) if o.work)) == set(world.peers)


def test_lock_step_goes_on_without_the_dead() -> None:
    world, peers = lone(4, dataclasses.replace(AT_WILL, staleness=0))
    world.run(5.0)
    world.kill(peers[1])
    world.run(40.0)
    assert len(merged(outcomes(world)[-1])) == 3


def draw(place: Place, islands: Sequence[PeerId]) -> Sequence[PeerId]:
    choose = clients_of(Manifest.model_validate({"mode": "fedavg"}))
    assert choose is not None
    return list(choose(place, islands))


def test_a_drawn_share_of_the_clients_contributes_and_the_draw_changes() -> None:
    world, peers = lone(6, dataclasses.replace(RULES, clients=draw))
    world.run(20.0)
    found = [merged(outcome) for outcome in outcomes(world)]
    assert len(found) > 8
    assert all(1 <= len(who) <= 3 for who in found)
    assert set().union(*found) == set(world.peers)
    world.kill(peers[0])
    world.kill(peers[1])
    before = len(found)
    world.run(60.0)
    assert len(outcomes(world)) > before + 8  # a client that was drawn and died holds nobody up


def test_no_plan_counts_on_who_abstains() -> None:
    """It is there, and ready, but goes by no plan of a round in which it may have voted before."""
    world, peers = lone(4, RULES)
    world.run(10.0)
    back = peers[1]
    world.kill(back)
    back.slower = 1e-6  # its checkpoint was of the last step
    world.restart(back)
    back.abstain_until = 0.0
    back.forgotten = until = len(peers[0].chain) + 4
    world.run(30.0)
    chain = max((peer.chain for peer in peers), key=len)
    assert len(chain) > until + 5
    me = back.identity.peer_id
    assert not any(
        c.peer == me for o in chain[until - 3 : until + 1] for c in o.outcome.contributors
    )
    assert me in merged(chain[-1].outcome)


def test_servers_merge_alone_and_members_do_where_none_is_left() -> None:
    world, peers = lone(5, dataclasses.replace(RULES, servers=True), servers=2)
    servers = {peer.identity.peer_id for peer in peers[:2]}
    world.run(10.0)
    found = outcomes(world)
    assert len(found) > 5
    for outcome in found:
        assert {part.owner for part in outcome.parts} == servers
        assert not servers & merged(outcome)
    world.kill(peers[0])
    world.run(30.0)
    assert {part.owner for part in outcomes(world)[-1].parts} == {peers[1].identity.peer_id}
    world.kill(peers[1])
    world.run(60.0)
    last = outcomes(world)[-1]
    assert len(outcomes(world)) > len(found) + 5
    assert not servers & {part.owner for part in last.parts}
    world.restart(peers[0])
    world.run(90.0)
    assert {part.owner for part in outcomes(world)[-1].parts} == {peers[0].identity.peer_id}


def test_the_roll_is_called_for_newcomers_where_rounds_are_far_apart() -> None:
    slow = dataclasses.replace(RULES, calls=True, staleness=0)
    world = World(3, 1, rules=slow, think=(60.0, 61.0), outside=2)
    world.run(30.0)
    found = outcomes(world)
    assert 1 <= len(found) <= 3
    assert set(found[-1].next_roster) == set(world.peers)
    assert not any(merged(outcome) for outcome in found)
    assert found[-1].work == 0
    assert all(peer.status == "active" for peer in world.peers.values())
    world.run(150.0)
    assert merged(next(o for o in outcomes(world) if o.work)) == set(world.peers)


def test_who_restarts_before_the_only_merge_is_in_it() -> None:
    """It abstains where it may have voted before: that round is not to be the merge."""
    slow = dataclasses.replace(RULES, calls=True, staleness=0)
    world = World(3, 1, rules=slow, think=(60.0, 61.0))
    world.run(57.0)
    back = list(world.peers.values())[1]
    world.kill(back)
    world.run(60.0)
    back.slower = 1e-6  # its checkpoint was of the last step
    world.restart(back)
    back.forgotten = 1  # and it hears of a round that others have begun since
    world.run(250.0)
    assert merged(next(o for o in outcomes(world) if o.work)) == set(world.peers)


def test_a_server_that_owns_no_part_is_told_from_an_island_all_the_same() -> None:
    rules = dataclasses.replace(AT_WILL, servers=True, size=1024)  # a single part
    world, peers = lone(5, rules, servers=2)
    world.run(5.0)
    found = outcomes(world)
    assert len(found) > 5
    assert all(len(outcome.parts) == 1 for outcome in found)
    assert {outcome.servers for outcome in found} == {2}
    world.kill(peers[0])
    world.run(20.0)
    last = outcomes(world)[-1]
    assert len(last.next_roster) == 4
    assert last.servers == 1


def test_islands_come_into_office_where_only_servers_are() -> None:
    world, _ = lone(3, dataclasses.replace(RULES, servers=True), servers=1, outside=2)
    world.run(20.0)
    assert len(merged(outcomes(world)[-1])) == 2
    assert len(outcomes(world)) > 5


def test_islands_come_into_office_where_one_of_two_servers_has_died() -> None:
    """The other one is no majority, and nobody in office has anything to merge."""
    world, peers = lone(4, dataclasses.replace(RULES, servers=True), servers=2, outside=2)
    world.kill(peers[0])
    world.run(40.0)
    assert len(merged(outcomes(world)[-1])) == 2
    assert len(outcomes(world)) > 5


def test_what_follows_from_the_manifest() -> None:
    plain, late, single = (
        Manifest.model_validate({"mode": mode}) for mode in ("diloco", "async", "btm")
    )
    assert (at_will(plain), at_will(late), at_will(single)) == (False, True, True)
    assert is_over(plain, 60, 1)
    assert not is_over(plain, 59, 1)
    assert is_over(single, 4, 1)
    assert not is_over(single, 4, 0)
    assert clients_of(plain) is None
    assert weight_of(plain, 100, 10) == 100.0
    light, heavy = weight_of(late, 100, 10), weight_of(late, 200, 10)
    assert heavy == pytest.approx(4 * light)
    assert weight_of(late, 2**40, 1) == 2**40


EVERYBODY = dataclasses.replace(RULES, quorum=1.0)


def gathered(seed: int, rules: Rules = EVERYBODY, rounds: int = 2) -> tuple[World, Peer]:
    """Three whose inner steps are nothing beside a message, once they have begun; the creator."""
    world = World(3, seed, rules=rules, think=(0.0, 0.01), outside=2)
    creator = next(iter(world.peers.values()))
    creator.gathering.least, creator.gathering.able = 3, True
    creator.slower = 1e6
    world.open(creator)
    world.run(0.5)
    creator.slower = 1.0
    while len(outcomes(world)) < rounds:
        assert world.now < 20.0
        world.run(world.now + 0.01)
    return world, creator


def test_a_creator_that_waits_begins_with_all_it_waits_for() -> None:
    """Until they are enough there is no round; then one that merges nothing lets them in."""
    world = World(3, 1, outside=2)
    creator, _, third = world.peers.values()
    world.cut = {frozenset({third.identity.peer_id, p}) for p in world.peers}  # it is not there yet
    creator.gathering.least, creator.gathering.able = 3, True
    creator.slower = 1e6  # its trainer is not told to begin
    world.open(creator)
    world.run(60.0)
    assert outcomes(world) == []
    creator.slower = 1.0
    world.cut.clear()
    world.run(90.0)
    first, *later = outcomes(world)
    assert not merged(first)
    assert set(first.next_roster) == set(world.peers)
    assert merged(later[0]) == set(world.peers)


@pytest.mark.parametrize("seed", [6, 7])
def test_whom_a_roll_brings_into_office_is_waited_for_before_it_has_said_that_it_is_here(
    seed: int,
) -> None:
    """The others may have taken their inner steps by then, and all of three are to be ready."""
    world, creator = gathered(seed)
    assert merged(outcomes(world)[1]) == set(world.peers)
    assert creator.round is not None
    assert not creator.round.company.coming(world.now)


def test_who_comes_into_office_and_says_nothing_more_holds_the_others_up_for_the_grace() -> None:
    rules = dataclasses.replace(EVERYBODY, min_grace_s=2.0)
    world, creator = gathered(6, rules, rounds=1)
    _, second, third = world.peers.values()
    world.cut = {frozenset({third.identity.peer_id, p}) for p in world.peers}
    began = world.now
    world.run(began + 1.9)
    assert len(outcomes(world)) == 1
    world.run(began + 2.6)  # it is not missed yet: a heartbeat or two have not come
    assert creator.round is not None
    assert creator.round.company.alive(third.identity.peer_id, world.now)
    assert merged(outcomes(world)[1]) == {creator.identity.peer_id, second.identity.peer_id}


def test_a_creator_that_leaves_before_all_are_there_lets_in_who_is() -> None:
    world = World(2, 1, outside=1)
    creator, second = world.peers.values()
    creator.gathering.least, creator.gathering.able = 3, True
    creator.slower = 1e6
    world.open(creator)
    world.run(20.0)
    assert outcomes(world) == []
    creator.gathering.end()
    world.run(30.0)
    assert second.identity.peer_id in outcomes(world)[0].next_roster
