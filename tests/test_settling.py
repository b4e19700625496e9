"""An island of push-sum that is about to leave: its weight is all there when it is saved."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from roamer_kit import Islander, islands
from test_leaving import Leaver

from node import leaving
from protocols import virtual_time


def weight(islander: Islander) -> float:
    return islander.state.blend.weight + islander.roamer.waiting_weight()


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
            return weight(leaver) + weight(other)

    assert virtual_time.run(main()) == pytest.approx(2, abs=1e-9)


def test_it_does_not_wait_for_who_stays_silent_and_says_so() -> None:
    async def main() -> list[str]:
        async with islands(2, rule="push-sum", spread=0.0) as swarm:
            await swarm.rounds(2)
            one, other = swarm.members[0], swarm.members[1]
            swarm.network.freeze(other.peer)
            await swarm.until(lambda: bool(one.roamer.core.owed))
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
