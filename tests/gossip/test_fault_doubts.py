"""Members that all find each other at fault at once: whole swarms on the virtual clock.

All links are dark for a moment, or nothing long gets through though calls do (a machine that runs
all of them is busy): every transfer of the round is given up on by both ends, so everybody doubts
most of the others, and would leave it to them to go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from exchange_kit import until
from simulated_swarm import Member, SimulatedSwarm, lengths, simulated_swarm
from toy_replica import RUN

from gossip.plans.certificate import leader_order, outcome_hash
from gossip.plans.rules import PATIENCE_S
from protocols.errors import TransferStalled
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.messages import TransferHeader
from protocols.transport import Feed, Outgoing

SLOW = 20e3  # bytes a second
WITHIN = 10.0  # patiences: doubts, the time in which others could go on, a plan or two


async def planned(members: Sequence[Member], number: int) -> float:
    """Wait until all have the plan of a round; returns its patience in seconds."""
    chains = [member.swarm.chains[0] for member in members]
    await until(
        lambda: all(
            c.round.place.round == number and c.round.agreement.plan is not None for c in chains
        ),
        30.0,
    )
    plan = chains[0].round.agreement.plan
    assert plan is not None
    return plan.patience_s


def part(swarm: SimulatedSwarm, members: Sequence[Member]) -> None:
    """Nothing gets from anybody to anybody."""
    swarm.network.partition(*({member.peer} for member in members))


def stall(members: Sequence[Member], number: int, seconds: float) -> Callable[[], bool]:
    """From the first slice of a round on no transfer of it moves, for so long; whether it began."""
    clock, ends = asyncio.get_running_loop().time, list[float]()

    def stalling(member: Member) -> None:
        transport = member.swarm.wiring.transport
        honest = transport.push

        async def push(
            peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, *, timeout: float
        ) -> bytes:
            if TransferHeader.decode(header).round == number:
                if not ends:
                    ends.append(clock() + seconds)
                if clock() < ends[0]:
                    await asyncio.sleep(timeout)
                    raise TransferStalled(f"nothing moved for {timeout} s")
            return await honest(peer, name, header, body, timeout=timeout)

        transport.push = push  # type: ignore[method-assign]

    for member in members:
        stalling(member)
    return lambda: bool(ends)


@pytest.mark.parametrize("servers", [0, 3], ids=["islands", "servers"])
@pytest.mark.parametrize("dark", [0.6, 1.2, 2.0])
def test_all_links_are_dark_for_a_moment(dark: float, servers: int) -> None:
    """Servers have nothing of their own: what they merge is to be sent to them once more."""

    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            for member in members[:servers]:
                member.swarm.presence.note(role="server")
            await until(lambda: min(lengths(members)) >= 4, 30.0)
            number = max(lengths(members))
            patience = await planned(members, number)
            begun = asyncio.get_running_loop().time()
            part(swarm, members)
            await asyncio.sleep(dark)
            swarm.network.heal()
            end = await until(lambda: min(lengths(members)) > number, 60.0)
            assert end - begun < dark + WITHIN * patience
            await until(lambda: min(lengths(members)) > number + 3, 30.0)
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("seconds", [0.5, 2.0])
@pytest.mark.parametrize("count", [2, 3, 4, 6])
def test_no_transfer_moves_for_a_while_though_all_are_heard(count: int, seconds: float) -> None:
    async def main() -> None:
        async with simulated_swarm(count) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(members)) >= 4, 30.0)
            number = max(lengths(members)) + 1
            begun = stall(members, number, seconds)
            await until(begun, 30.0)
            at = asyncio.get_running_loop().time()
            patience = await planned(members, number)
            end = await until(lambda: min(lengths(members)) > number, 60.0)
            assert end - at < seconds + WITHIN * patience
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize(("who", "seconds"), [(0, 0.5), (1, 2.0), (2, 0.5), (3, 2.0)])
def test_one_of_them_is_frozen_for_real(who: int, seconds: float) -> None:
    """The others cannot tell it from themselves at first, and go on without it all the same."""

    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(members)) >= 4, 30.0)
            number = max(lengths(members)) + 1
            begun = stall(members, number, seconds)
            await until(begun, 30.0)
            at = asyncio.get_running_loop().time()
            patience = await planned(members, number)
            frozen = members[who]
            others = [member for member in members if member is not frozen]
            swarm.network.freeze(frozen.peer)
            end = await until(lambda: min(lengths(others)) > number, 60.0)
            assert end - at < seconds + WITHIN * patience
            await until(lambda: min(lengths(others)) > number + 3, 30.0)
            swarm.network.thaw(frozen.peer)
            await until(lambda: max(lengths(members)) - len(frozen.replica.history) <= 1, 30.0)
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("seconds", [1.2, 3.0])
def test_the_links_come_back_but_for_some_between_pairs(seconds: float) -> None:
    """Each has lost one of the others for good: nobody is held up for long, and all agree."""

    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            first, second, third, fourth = members
            await until(lambda: min(lengths(members)) >= 4, 30.0)
            number = max(lengths(members))
            await planned(members, number)
            part(swarm, members)
            await asyncio.sleep(seconds)
            swarm.network.cut(first.peer, second.peer)
            swarm.network.cut(third.peer, fourth.peer)
            swarm.network.heal()
            await until(lambda: min(lengths(members)) > number + 3, 60.0)
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("seconds", [1.2, 3.0])
def test_two_of_four_decide_nothing_without_a_new_epoch(seconds: float) -> None:
    """Each has lost two of the others for good, and has the third back after a while."""

    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(members)) >= 4, 30.0)
            await planned(members, max(lengths(members)))
            part(swarm, members)
            await asyncio.sleep(seconds)
            swarm.network.partition(
                *({m.peer for m in half} for half in (members[:2], members[2:]))
            )
            await asyncio.sleep(15.0)
            decided: dict[bytes, set[bytes]] = {}  # in epoch 0, after each round
            for certificate in (one for member in members for one in member.replica.certificates):
                if certificate.epoch == 0:
                    outcome = certificate.outcome
                    decided.setdefault(outcome.previous, set()).add(outcome_hash(outcome))
            assert all(len(heads) == 1 for heads in decided.values())

    virtual_time.run(main())


def fail_one_by_one(member: Member, number: int, apart: float) -> list[float]:
    """What a member sends in a round gets nowhere; it finds out by one owner after the other.

    They are ``apart`` seconds from each other; returns when the first failed, once it has.
    """
    transport = member.swarm.wiring.transport
    clock, honest = asyncio.get_running_loop().time, transport.push
    failed: list[float] = []
    order: list[PeerId] = []

    async def push(
        peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, *, timeout: float
    ) -> bytes:
        if name == "slice" and TransferHeader.decode(header).round == number:
            if not failed:
                failed.append(clock())
            if peer not in order:
                order.append(peer)
                await asyncio.sleep(max(0.0, failed[0] + order.index(peer) * apart - clock()))
            raise TransferStalled("nothing moved")
        return await honest(peer, name, header, body, timeout=timeout)

    transport.push = push  # type: ignore[method-assign]
    return failed


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "member"])
@pytest.mark.parametrize(("count", "apart"), [(4, 0.6), (6, 0.6), (6, 1.2)])
def test_who_loses_the_others_one_by_one_blames_one_of_them_at_most(
    count: int, apart: float, leads: bool
) -> None:
    """Doubts further apart than they wait for each other: still it is the one who has them all.

    ``apart`` is in patiences, a doubt waits for a quarter of one.
    """

    async def main() -> None:
        uploads = [SLOW] * count  # so that it is early in the round that it finds out
        async with simulated_swarm(count, think=(0.4, 0.45), uploads=uploads) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(members)) >= 2, 60.0)
            number = max(lengths(members)) + 1
            order = leader_order(RUN, 0, number, [member.peer for member in members])
            faulty = swarm.members[order[0] if leads else order[-1]]
            failed = fail_one_by_one(faulty, number, apart * PATIENCE_S)
            await until(lambda: min(lengths(members)) > number, 60.0)
            assert failed
            took = asyncio.get_running_loop().time() - failed[0]
            assert took < (count + WITHIN) * PATIENCE_S
            outcome = faulty.replica.certificates[number].outcome
            counted = {
                outcome.contributors[one.contributor].peer
                for part in outcome.parts
                for one in part.included
            }
            lost = set(order) - counted - {faulty.peer}
            assert len(lost) <= 1, f"{len(lost)} of {count - 1} were taken for faulty"
            assert faulty.swarm.chains[0].status.status == "active"
            await until(lambda: min(lengths(members)) > number + 2, 30.0)
            swarm.agree()

    virtual_time.run(main())


def only_words(members: Sequence[Member], halves: Sequence[Sequence[Member]]) -> Callable[[], None]:
    """Between the halves calls get through and nothing long does; returns how to mend it."""
    half = {member.peer: number for number, some in enumerate(halves) for member in some}
    mended = False

    def narrow(member: Member) -> None:
        transport = member.swarm.wiring.transport

        push, pull = transport.push, transport.pull

        async def pass_on(peer: PeerId, timeout: float) -> None:
            if not mended and half[peer] != half[member.peer]:
                await asyncio.sleep(timeout)
                raise TransferStalled("too long for this way")

        async def narrow_push(peer: PeerId, *what: Any, timeout: float) -> bytes:
            await pass_on(peer, timeout)
            return await push(peer, *what, timeout=timeout)

        @asynccontextmanager
        async def narrow_pull(peer: PeerId, *what: Any, timeout: float, **more: Any) -> Any:
            await pass_on(peer, timeout)
            async with pull(peer, *what, timeout=timeout, **more) as incoming:
                yield incoming

        transport.push = narrow_push  # type: ignore[method-assign]
        transport.pull = narrow_pull  # type: ignore[method-assign]

    def mend() -> None:
        nonlocal mended
        mended = True

    for member in members:
        narrow(member)
    return mend


@pytest.mark.parametrize("count", [4, 6])
def test_two_halves_that_only_talk_decide_nothing_and_go_on_together_after(count: int) -> None:
    """Each half finds the other at fault: neither can commit, as a majority has to hold it all."""

    async def main() -> None:
        async with simulated_swarm(count) as swarm:
            members = list(swarm.members.values())
            await until(lambda: min(lengths(members)) >= 3, 30.0)
            mend = only_words(members, [members[: count // 2], members[count // 2 :]])
            before = max(lengths(members))
            await asyncio.sleep(12.0)
            assert max(lengths(members)) <= before + 1  # one may have been all but done
            swarm.agree()
            mend()
            await until(lambda: min(lengths(members)) > before + 4, 60.0)
            assert all(one.epoch == 0 for m in members for one in m.replica.certificates)
            swarm.agree()

    virtual_time.run(main())
