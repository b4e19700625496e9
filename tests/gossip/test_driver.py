"""Whole members against each other on the simulated network, in virtual time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exchange_kit import until
from simulated_swarm import seed_of, simulated_swarm
from suites import slow
from toy_replica import ToyReplica

from gossip.catchup import lineage
from gossip.membership.members import Patience
from protocols.codecs import CHUNK
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link
from protocols.messages import Certificate, Handover

pytestmark = pytest.mark.usefixtures("remembered_signatures")


def test_four_members_commit_round_after_round_with_equal_bits() -> None:
    async def main() -> None:
        async with simulated_swarm(4, think=(0.4, 0.5)) as swarm:
            await asyncio.sleep(12.0)
            swarm.agree()
            lengths = [len(m.replica.history) for m in swarm.members.values()]
            assert min(lengths) >= 12
            assert max(lengths) - min(lengths) <= 1
            for member in swarm.members.values():
                assert member.rejected == []
                assert member.replica.counted > 0
            newest = next(iter(swarm.members.values())).swarm.chains[0].ledger.newest()
            assert newest is not None
            assert len(newest.outcome.contributors) == 4

    virtual_time.run(main())


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8"])
def test_other_codecs(codec: str) -> None:
    async def main() -> None:
        async with simulated_swarm(3, codec=codec) as swarm:
            await asyncio.sleep(6.0)
            swarm.agree()
            assert min(len(m.replica.history) for m in swarm.members.values()) >= 4

    virtual_time.run(main())


@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_kills_and_restarts_never_split_a_round(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with simulated_swarm(4, seed=seed) as swarm:
            for _ in range(5):
                await asyncio.sleep(rng.uniform(1.0, 4.0))
                victim = rng.choice(swarm.living())
                await swarm.kill(victim)
                before = max(len(m.replica.history) for m in swarm.living())
                await asyncio.sleep(rng.uniform(5.0, 8.0))
                assert max(len(m.replica.history) for m in swarm.living()) > before
                swarm.restart(victim)
                swarm.agree()
            await asyncio.sleep(12.0)
            swarm.agree()
            lengths = [len(m.replica.history) for m in swarm.members.values()]
            assert max(lengths) - min(lengths) <= 1
            statuses = {m.swarm.status.status for m in swarm.members.values()}
            assert statuses == {"active"}

    virtual_time.run(main())


@pytest.mark.parametrize("seed", range(2))
def test_a_frozen_member_is_passed_over_and_catches_up(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with simulated_swarm(4, seed=seed) as swarm:
            for _ in range(3):
                await asyncio.sleep(rng.uniform(2.0, 4.0))
                member = rng.choice(swarm.living())
                before = len(member.replica.history)
                swarm.network.freeze(member.peer)
                others = [m for m in swarm.living() if m is not member]
                await asyncio.sleep(8.0)
                assert all(len(m.replica.history) > before + 2 for m in others)
                swarm.network.thaw(member.peer)
                await asyncio.sleep(8.0)
                swarm.agree()
                assert len(member.replica.history) >= len(others[0].replica.history) - 1

    virtual_time.run(main())


def test_nothing_reads_a_replica_while_it_is_put_elsewhere() -> None:
    """A download ends in the middle of an exchange that sends what it replaces."""

    async def main() -> None:
        async with simulated_swarm(3, size=500_000, codec="fp32", uploads=[1e6] * 3) as swarm:
            member = next(iter(swarm.members.values()))
            read, jumping = 0, False
            delta = member.replica.delta

            def watched(start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
                nonlocal read
                assert not jumping
                read += 1
                return delta(start, stop, out)

            async def jump() -> None:
                nonlocal jumping
                jumping = True
                await asyncio.sleep(3.0)
                jumping = False

            member.replica.delta = watched  # type: ignore[method-assign]
            checked = -(-500_000 // CHUNK)  # a look at all of it comes before
            await until(lambda: read > checked)
            before = member.swarm.chains[0].exchange
            assert not before.closed
            chain, here = member.swarm.chains[0], member.replica.place
            moves = 0

            def moved() -> None:
                nonlocal moves
                moves += 1

            chain.hooks.moved = moved
            await chain.move(jump, here, None, chain.lineage)
            assert not before.closed, "it is there already"
            assert moves == 0
            further = replace(
                here, round=here.round + 1, previous=bytes(32), work=2 * here.work + 1
            )
            await chain.move(jump, further, None, chain.lineage)
            assert before.closed
            assert chain.exchange is not before
            assert moves == 1, "who waits for the run's end looks whether it has come"

    virtual_time.run(main())


def test_two_members_one_dies_the_other_goes_on_alone() -> None:
    async def main() -> None:
        async with simulated_swarm(2) as swarm:
            await asyncio.sleep(5.0)
            first, second = swarm.members.values()
            await swarm.kill(first)
            before = len(second.replica.history)
            await asyncio.sleep(15.0)
            assert len(second.replica.history) > before + 5

    virtual_time.run(main())


def test_a_newcomer_is_taken_into_the_roster_and_contributes() -> None:
    async def main() -> None:
        async with simulated_swarm(3) as swarm:
            await asyncio.sleep(5.0)
            identity = Identity.from_seed(b"n" * 32)
            newcomer = swarm.start(identity, status="joining")
            await asyncio.sleep(10.0)
            swarm.agree()
            assert newcomer.swarm.status.status == "active"
            assert newcomer.replica.counted > 0
            assert identity.peer_id in newcomer.replica.roster

    virtual_time.run(main())


def test_a_swarm_goes_on_when_there_is_no_room_for_who_handed_office_to_whom(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lineage, "MAX_BYTES", Handover.MAX_BYTES + 100)

    async def main() -> None:
        async with simulated_swarm(3) as swarm:
            first, *_ = swarm.members.values()
            for seed in (b"m", b"n"):  # the first is all that there is room for
                identity = Identity.from_seed(seed * 32)
                newcomer = swarm.start(identity, status="joining")
                await until(lambda new=newcomer: new.peer in first.replica.roster, 20.0)
            rounds = first.replica.place.round
            await swarm.committed(rounds + 5)
            swarm.agree()
            for member in swarm.members.values():
                assert not member.task.done()
                assert len(member.swarm.chains[0].lineage) == 1

    virtual_time.run(main())


@pytest.mark.parametrize("new_identity", [True, False])
def test_a_newcomer_is_in_office_only_once_it_votes(new_identity: bool) -> None:
    """Two need each other's vote, so one that abstains would stop the other."""

    async def main() -> None:
        async with simulated_swarm(1) as swarm:
            loop = asyncio.get_running_loop()
            [founder] = swarm.members.values()
            await asyncio.sleep(3.0)
            started = loop.time()
            newcomer = swarm.start(
                Identity.from_seed(b"n" * 32), status="joining", new_identity=new_identity
            )
            done, moments = len(founder.replica.history), [started]
            while newcomer.replica.counted < 3:
                await asyncio.sleep(0.05)
                if len(founder.replica.history) > done:
                    done = len(founder.replica.history)
                    moments.append(loop.time())
            assert max(b - a for a, b in itertools.pairwise(moments)) < 2.0
            assert moments[-1] - started < (7.0 if new_identity else 12.0)
            swarm.agree()

    virtual_time.run(main())


def test_a_slow_link_merges_less() -> None:
    async def main() -> None:
        async with simulated_swarm(
            3, size=400_000, uploads=[12.5e6, 12.5e6, 0.5e6], think=(1.0, 1.2)
        ) as swarm:
            await asyncio.sleep(15.0)
            swarm.agree()
            slow = list(swarm.members)[2]
            newest = swarm.members[slow].swarm.chains[0].ledger.newest()
            assert newest is not None
            sizes: dict[PeerId, int] = {}
            for part in newest.outcome.parts:
                sizes[part.owner] = sizes.get(part.owner, 0) + part.stop - part.start
            assert sizes.get(slow, 0) < min(size for peer, size in sizes.items() if peer != slow)

    virtual_time.run(main())


def test_a_leaver_is_not_waited_for() -> None:
    async def main() -> None:
        async with simulated_swarm(3) as swarm:
            await asyncio.sleep(5.0)
            leaver = next(iter(swarm.members.values()))
            await leaver.swarm.presence.leave()
            await swarm.kill(leaver)
            rest = swarm.living()
            before = len(rest[0].replica.history)
            await asyncio.sleep(5.0)
            assert len(rest[0].replica.history) >= before + 5
            assert leaver.peer not in rest[0].replica.roster

    virtual_time.run(main())


@pytest.mark.parametrize("members", [2, 3, 5])
def test_a_leaver_that_stands_still_holds_nobody_up(members: int) -> None:
    """It writes a large checkpoint, and takes no round after it."""

    async def main() -> None:
        async with simulated_swarm(members) as swarm:
            await asyncio.sleep(5.0)
            leaver, *rest = swarm.members.values()
            await leaver.swarm.presence.leave()
            async with leaver.swarm.still():
                here = len(leaver.replica.history)
                await asyncio.sleep(5.0)
                before = len(rest[0].replica.history)
                await asyncio.sleep(60.0)
                assert len(rest[0].replica.history) >= before + 50
                assert len({tuple(one.replica.history) for one in rest}) <= 2  # one round apart
                assert leaver.peer not in rest[0].replica.roster
                assert len(leaver.replica.history) == here
                await swarm.kill(leaver)

    virtual_time.run(main())


def test_who_leave_all_at_once_make_no_round_that_nobody_keeps() -> None:
    async def main() -> None:
        async with simulated_swarm(3) as swarm:
            await asyncio.sleep(5.0)
            for member in swarm.members.values():
                await member.swarm.presence.leave()
            await asyncio.sleep(1.0)
            kept = [len(member.replica.history) for member in swarm.members.values()]
            await asyncio.sleep(60.0)
            assert [len(member.replica.history) for member in swarm.members.values()] == kept

    virtual_time.run(main())


def test_same_seed_same_history() -> None:
    async def history() -> list[tuple[bytes, bytes]]:
        async with simulated_swarm(3, seed=11) as swarm:
            await asyncio.sleep(5.0)
            return list(next(iter(swarm.members.values())).replica.history)

    def once(main: Coroutine[Any, Any, list[tuple[bytes, bytes]]]) -> list[tuple[bytes, bytes]]:
        return virtual_time.run(main)

    assert once(history()) == once(history())


@pytest.mark.parametrize("recorded", [False, True])
def test_a_swarm_that_was_restarted_as_a_whole_goes_on_together(
    recorded: bool, tmp_path: Path
) -> None:
    async def main() -> None:
        async with simulated_swarm(3, records=tmp_path if recorded else None) as swarm:
            await asyncio.sleep(5.0)
            for member in list(swarm.members.values()):
                await swarm.kill(member)
            longest = max(swarm.members.values(), key=lambda m: len(m.replica.history))
            for member in list(swarm.members.values()):
                if len(member.replica.history) == len(longest.replica.history):
                    swarm.restart(member)
            before = len(longest.replica.history)
            assert len(swarm.living()) >= 2
            await asyncio.sleep(25.0)
            swarm.agree()
            assert all(len(m.replica.history) > before + 8 for m in swarm.living())
            newest = swarm.living()[0].swarm.chains[0].ledger.newest()
            assert newest is not None
            assert newest.epoch == 0  # nobody went off alone

    virtual_time.run(main())


@pytest.mark.parametrize(("count", "rounds"), [(16, 5), (64, 2)])
def test_many_members(count: int, rounds: int) -> None:
    async def main() -> None:
        patience = Patience(heartbeat_s=3.0)
        async with simulated_swarm(count, think=(0.4, 0.5), patience=patience) as swarm:
            await asyncio.sleep((1.0 if count <= 16 else 1.5) * rounds)  # rumours take longer
            swarm.agree()
            lengths = [len(m.replica.history) for m in swarm.members.values()]
            assert min(lengths) >= rounds
            assert max(lengths) - min(lengths) <= 1
            for member in swarm.members.values():
                assert member.rejected == []
                assert member.behind == []
            counted = sum(m.replica.counted for m in swarm.members.values())
            assert counted > 0.9 * sum(lengths)  # the grace goes by who is late

    virtual_time.run(main())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_hundred_and_fifty_six_members() -> None:
    async def main() -> None:
        patience = Patience(heartbeat_s=60.0)
        async with simulated_swarm(256, think=(0.4, 0.5), patience=patience) as swarm:
            members = list(swarm.members.values())
            while min(len(m.replica.history) for m in members) < 1:
                await asyncio.sleep(0.1)
                assert asyncio.get_running_loop().time() < 5.0
            swarm.agree()
            newest = members[0].swarm.chains[0].ledger.newest()
            assert newest is not None
            contributors, parts = newest.outcome.contributors, newest.outcome.parts
            assert len(contributors) > 0.9 * len(members)
            first, round_ = members[0].replica, newest.outcome.round
            learnt = torch.empty(len(contributors), len(first.theta))  # by all with equal weights
            for row, one in zip(learnt, contributors, strict=True):
                learner = ToyReplica(one.peer, first.roster, len(row), swarm.codec)
                learner.train(seed_of(one.peer, 0, round_))
                row[:] = -learner.sent
            for part in parts:
                included = sorted(i.contributor for i in part.included)
                assert len(set(included)) > 0.9 * len(members)
                mean = learnt[included, part.start : part.stop].mean(0)
                off = first.means[round_][part.start : part.stop] - mean
                assert off.norm() < 0.2 * mean.norm()  # int4, twice
            assert len(newest.encode()) < Certificate.MAX_BYTES / 4
            assert not any(m.rejected for m in members)

    virtual_time.run(main())


def test_a_network_that_loses_and_breaks() -> None:
    async def main() -> None:
        link = Link(latency=0.02, jitter=0.02, loss=0.02, drop=0.02)
        async with simulated_swarm(4, link=link) as swarm:
            await asyncio.sleep(25.0)
            swarm.agree()
            lengths = [len(m.replica.history) for m in swarm.members.values()]
            assert min(lengths) >= 12
            assert max(lengths) - min(lengths) <= 2
            assert not any(m.behind for m in swarm.members.values())

    virtual_time.run(main())
