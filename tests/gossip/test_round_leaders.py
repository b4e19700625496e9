"""Who leads a round, and who is not let lead it any more."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gossip_kit import RUN
from round_kit import World, agree, under_way

from gossip.plans.certificate import leader_order
from gossip.plans.planning import Remains
from gossip.rounds.candidacies import AT_ONCE
from gossip.rounds.company import BELIEVED
from gossip.rounds.instructions import Send
from protocols.errors import RemoteRefused
from protocols.messages import Prepare, Promise

pytestmark = pytest.mark.usefixtures("remembered_signatures")


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
    plan = leader.round.leadership.compose(remains, now, 1.0)
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
