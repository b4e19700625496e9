"""Whose fault it is what is handed on: of who has signed it, or of who hands it on."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import weakref
from collections.abc import Callable
from contextlib import suppress

import pytest
from gossip_kit import plan_of
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm
from toy_replica import RUN

from gossip.place import Place
from gossip.plans.certificate import sign_vote
from gossip.rounds.round import Round
from gossip.rounds.spreading import passed
from protocols.errors import RemoteRefused
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.messages import Part, Passed, Plan, TransferHeader, Votes


@dataclasses.dataclass
class Scene:
    """A round without a plan yet: who is to lead it, and two more of its members."""

    swarm: SimulatedSwarm
    leader: Member
    hander: Member
    taker: Member
    place: Place

    def plan(self) -> Plan:
        """One that keeps to the rules."""
        members = self.swarm.living()
        shape = self.taker.swarm.chains[0].rules.shape
        identities = [member.identity for member in members]
        return plan_of(self.leader.identity, identities, place=self.place, shape=shape)

    def signed(self, plan: Plan | Votes) -> Passed:
        return passed(self.leader.identity, RUN, plan)

    async def hand_on(self, note: Passed) -> bytes:
        node = self.swarm.network.node(self.hander.peer)
        assert node is not None
        return await node.transport.call(self.taker.peer, "round", note.encode(), timeout=5.0)

    def told(self) -> list[tuple[PeerId, str]]:
        return self.taker.rejected


def scene(swarm: SimulatedSwarm) -> Scene:
    members = {member.peer: member for member in swarm.living()}
    agreement = next(iter(members.values())).swarm.chains[0].round.agreement
    leader = members.pop(agreement.proposer_of((0, 0), agreement.roster))
    hander, taker, *_ = members.values()
    return Scene(swarm, leader, hander, taker, taker.replica.place)


def staged(play: Callable[[Scene], object]) -> None:
    async def main() -> None:
        async with simulated_swarm(4, think=(30.0, 31.0)) as swarm:
            await asyncio.sleep(0.5)
            await play(scene(swarm))  # type: ignore[misc]

    virtual_time.run(main())


def unknown_codec(it: Scene) -> Passed:
    return it.signed(dataclasses.replace(it.plan(), codec="morse"))


def stranger_owns(it: Scene) -> Passed:
    plan = it.plan()
    part = dataclasses.replace(plan.parts[0], owner=PeerId("somebody"))
    return it.signed(dataclasses.replace(plan, parts=(part, *plan.parts[1:])))


def hole(it: Scene) -> Passed:
    plan = it.plan()
    parts: tuple[Part, ...] = plan.parts[1:]
    return it.signed(dataclasses.replace(plan, parts=parts))


def another_leads(it: Scene) -> Passed:
    return it.signed(dataclasses.replace(it.plan(), leader=it.hander.peer))


BROKEN = [unknown_codec, stranger_owns, hole, another_leads]


@pytest.mark.parametrize("broken", BROKEN, ids=lambda make: make.__name__)
def test_a_plan_that_breaks_the_rules_is_its_signers(broken: Callable[[Scene], Passed]) -> None:
    async def play(it: Scene) -> None:
        with pytest.raises(RemoteRefused, match="unsound"):
            await it.hand_on(broken(it))
        assert [peer for peer, _ in it.told()] == [it.leader.peer]

    staged(play)


def test_it_is_its_signers_as_well_where_a_member_was_asked_for_it() -> None:
    """Which goes by a plan that the asking one does not know."""

    async def play(it: Scene) -> None:
        chain, node = it.hander.swarm.chains[0], it.swarm.network.node(it.hander.peer)
        assert node is not None
        chain.signed_plan = unknown_codec(it)
        at = (RUN, 0, it.place.round, it.place.previous)
        vote = sign_vote(it.hander.identity, *at, (0, 0), b"o" * 32)
        await node.transport.call(it.taker.peer, "round", vote.encode(), timeout=5.0)
        await asyncio.sleep(10.0)
        assert [peer for peer, _ in it.told()] == [it.leader.peer]

    staged(play)


def forged(it: Scene) -> Passed:
    note = it.signed(it.plan())
    return dataclasses.replace(note, body=dataclasses.replace(it.plan(), codec="morse").encode())


def of_another_round(it: Scene) -> Passed:
    plan = dataclasses.replace(it.plan(), round=it.place.round + 1)
    return dataclasses.replace(it.signed(plan), round=it.place.round)


def of_another_fork(it: Scene) -> Passed:
    """It was right where it was said, for all that anybody knows."""
    return it.signed(dataclasses.replace(it.plan(), previous=b"f" * 32))


WRONG = [forged, of_another_round, of_another_fork]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda make: make.__name__)
def test_what_is_handed_on_wrongly_is_the_fault_of_who_does(
    wrong: Callable[[Scene], Passed],
) -> None:
    async def play(it: Scene) -> None:
        with pytest.raises(RemoteRefused):
            await it.hand_on(wrong(it))
        assert [peer for peer, _ in it.told()] == [it.hander.peer]
        assert it.leader.peer not in it.taker.swarm.chains[0].round.company.faulty

    staged(play)


def test_a_plan_that_keeps_to_the_rules_is_nobodys_fault() -> None:
    async def play(it: Scene) -> None:
        assert await it.hand_on(it.signed(it.plan())) == b""
        assert it.taker.swarm.chains[0].under_way
        assert not it.told()

    staged(play)


def test_who_is_named_many_times_is_told_once() -> None:
    """A note may be as long as two megabytes, and each of its copies would be."""

    async def play(it: Scene) -> None:
        told: list[PeerId] = []

        def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
            if sender == it.taker.peer and name == "round" and note.body in data:
                told.append(receiver)
            return data

        note = it.signed(it.plan())
        it.swarm.network.tamper = tap
        node = it.swarm.network.node(it.leader.peer)
        assert node is not None
        many = dataclasses.replace(note, to=(it.hander.peer,) * 500)
        await node.transport.call(it.taker.peer, "round", many.encode(), timeout=5.0)
        await asyncio.sleep(1.0)
        assert told == [it.hander.peer]

    staged(play)


def test_a_question_about_a_plan_keeps_no_vector_once_its_round_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the plan to come by itself, for longer than short rounds last."""
    monkeypatch.setattr(Round, "doubt_s", 60.0)

    async def main() -> None:
        async with simulated_swarm(4, think=(1.0, 1.1)) as swarm:
            it = scene(swarm)
            chain, node = it.taker.swarm.chains[0], swarm.network.node(it.hander.peer)
            assert node is not None
            there = (RUN, 0, it.place.round, 0, chain.rules.shape.size, "fp32", bytes(32))
            exchange = weakref.ref(chain.exchange)
            with suppress(RemoteRefused):
                header = TransferHeader(*there, 0).encode()
                await node.transport.call(it.taker.peer, "slice", header, timeout=5.0)
            await asyncio.sleep(20.0)
            assert chain.replica.place.round > it.place.round + 2
            gc.collect()
            assert exchange() is None

    virtual_time.run(main())
