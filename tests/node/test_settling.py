"""An island of push-sum that is about to leave: its weight is all there when it is saved."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import pytest
from leaving_kit import Leaver
from roamer_kit import ToyState, islands

from node import leaving
from protocols.errors import TransferStalled
from protocols.memory import virtual_time


@pytest.mark.parametrize("silent", [0.0, 4.0])
def test_what_it_gave_away_has_come_or_is_back_and_no_more_is_given(silent: float) -> None:
    """Its checkpoint would lack the weight of a share in doubt, or have that of a later one."""

    async def main() -> float:
        async with islands(2, rule="push-sum", spread=0.0) as swarm:
            await swarm.rounds(2)
            leaver, other = swarm.members[0], swarm.members[1]
            if silent:
                swarm.network.freeze(other.peer)
                await swarm.until(lambda: bool(leaver.roamer.core.owed))
            settling = asyncio.ensure_future(leaver.roamer.settle())
            await asyncio.sleep(silent)
            assert settling.done() is not bool(silent)
            swarm.network.thaw(other.peer)
            await asyncio.wait_for(settling, 20.0)
            assert not leaver.roamer.core.owed
            before = leaver.roamer.letters.transfers.bytes_sent
            await asyncio.sleep(30.0)
            assert leaver.roamer.letters.transfers.bytes_sent == before
            swarm.limit = 0  # and what the other one gives has come as well
            await asyncio.sleep(30.0)
            return leaver.weight + other.weight

    assert virtual_time.run(main()) == pytest.approx(2, abs=1e-9)


@pytest.mark.parametrize("bytes_a_second", [4000.0, 400.0])
def test_a_share_that_arrives_while_it_leaves_is_its_own_or_its_senders(
    bytes_a_second: float,
) -> None:
    """Its weight is read once, and its files are written after that: meanwhile none may come."""

    async def main() -> tuple[float, bool]:
        async with islands(2, rule="push-sum", spread=0.0) as swarm:
            await swarm.rounds(2)
            leaver, other = swarm.members[0], swarm.members[1]
            swarm.shape(bytes_a_second, 1)
            await swarm.until(lambda: bool(leaver.roamer.letters._pushes))
            before = leaver.weight
            with suppress(TimeoutError):
                async with asyncio.timeout(leaving.SETTLE_S):
                    await leaver.roamer.settle()
            saved = leaver.weight
            await asyncio.sleep(60.0)  # the trainer writes its files
            assert leaver.weight == saved
            await swarm.kill(0)
            swarm.limit = 0
            await asyncio.sleep(60.0)
            assert not other.roamer.core.owed
            return saved + other.weight, saved > before

    total, came = virtual_time.run(main())
    assert total == pytest.approx(2, abs=1e-9)
    assert came is (bytes_a_second > 1000)


def test_shares_of_a_round_that_is_about_to_begin_are_waited_for() -> None:
    async def main() -> tuple[bool, float]:
        async with islands(2, rule="push-sum", spread=0.0) as swarm:
            await swarm.rounds(2)
            leaver, start, go_on = swarm.members[0], ToyState.start, asyncio.Event()

            async def slowly() -> None:
                await go_on.wait()
                await start(leaver.state)

            leaver.state.start = slowly  # type: ignore[method-assign]
            await swarm.until(lambda: leaver.roamer._beginning)
            settling = asyncio.ensure_future(leaver.roamer.settle())
            await asyncio.sleep(1.0)
            early = settling.done()
            go_on.set()
            await asyncio.wait_for(settling, 5.0)
            saved = leaver.weight
            await asyncio.sleep(5.0)
            return early, leaver.weight - saved

    assert virtual_time.run(main()) == (False, 0.0)


def test_who_leaves_says_whether_a_share_has_come_before_it_is_gone() -> None:
    """It takes along what has come, which its sender would mix in as well."""

    async def main() -> float:
        async with islands(2, rule="push-sum", spread=0.0) as swarm:
            await swarm.rounds(2)
            leaver, other = swarm.members[0], swarm.members[1]
            push = other.roamer.letters.send

            async def unheard(*args: Any, **more: Any) -> None:
                await push(*args, **more)
                if not more.get("again"):
                    raise TransferStalled("its answer is lost")

            other.roamer.letters.send = unheard  # type: ignore[method-assign]
            await swarm.until(lambda: bool(other.roamer.core.owed))
            swarm.limit = 0
            await leaver.roamer.settle()
            await leaver.roamer.presence.leave()
            saved = leaver.weight
            await asyncio.sleep(60.0)
            await swarm.kill(0)
            await asyncio.sleep(60.0)
            assert not other.roamer.core.owed
            return saved + other.weight

    assert virtual_time.run(main()) == pytest.approx(2, abs=1e-9)


@pytest.mark.parametrize("why", ["it is silent", "the link is slow"])
def test_it_does_not_wait_for_who_does_not_get_its_share_and_says_so(why: str) -> None:
    async def main() -> list[str]:
        async with islands(2, rule="push-sum", spread=0.0) as swarm:
            await swarm.rounds(2)
            one, other = swarm.members[0], swarm.members[1]
            if why == "it is silent":
                swarm.network.freeze(other.peer)
                await swarm.until(lambda: bool(one.roamer.core.owed))
            else:
                swarm.shape(400.0, 0)
                await swarm.until(lambda: bool(one.roamer._sending))
            leaver: Any = Leaver()
            leaver.swarm.chains = (one.roamer,)
            told: list[Any] = []
            leaver.events = SimpleNamespace(emit=told.append)
            began = asyncio.get_running_loop().time()
            await leaving.leave(leaver, AsyncExitStack())
            assert asyncio.get_running_loop().time() - began <= leaving.SETTLE_S + 0.1
            assert leaver.did == ["farewell", "save, still from now on", "stop"]
            return [event.text for event in told]

    (said,) = virtual_time.run(main())
    assert "does not know whether shares of its weight have come" in said
