"""Who lies in a large swarm: with heartbeats of others, things that there are not, and floods."""

from __future__ import annotations

import asyncio
import random

from crowd_kit import COUNT, SKETCH, crowd, run
from exchange_kit import until

from gossip.membership.crowd import ASKED_AT_ONCE
from gossip.membership.members import Liveness
from gossip.membership.pulse import Beat, HashChain
from protocols.identity import PeerId
from protocols.messages import PULSE_BYTES, TAG_BYTES, Known


def test_nobody_is_kept_alive_by_heartbeats_that_it_has_not_made() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            dead, liar, honest, *_ = swarm.nodes.values()
            island, dice = honest.view.islands[dead.peer], random.Random(1)
            swarm.kill(dead)
            await asyncio.sleep(1.0)
            heard = island.heard
            transport = liar.presence.wiring.transport
            for number in range(island.beat, 60):
                values = [
                    island.pulse,
                    dice.randbytes(PULSE_BYTES),
                    HashChain(dead.peer, b"").next(),
                ]
                beats = b"".join(Beat(island.tag, number, value).packed() for value in values)
                await transport.call(honest.peer, "gossip", Known((), beats).encode(), timeout=5.0)
            assert island.heard == heard
            now = asyncio.get_running_loop().time
            await until(lambda: honest.view.liveness(dead.peer, now()) is Liveness.DEAD, 15.0)

    run(main)


def test_who_names_what_there_is_not_is_asked_and_nothing_comes_of_it() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            liar, honest, *_ = swarm.nodes.values()
            transport, dice = liar.presence.wiring.transport, random.Random(1)
            for _ in range(20):
                strange = b"".join(
                    Beat(dice.randbytes(TAG_BYTES), 1, dice.randbytes(PULSE_BYTES)).packed()
                    for _ in range(512)
                )
                sketches = (dice.randbytes(SKETCH), b"", dice.randbytes(16))
                body = Known((), strange, sketches).encode()
                await transport.call(honest.peer, "gossip", body, timeout=5.0)
            rumours = honest.presence._crowd.rumours
            assert len(rumours._asked) <= 4096
            await asyncio.sleep(3.0)
            assert swarm.agree()

    run(main)


def test_who_names_things_without_end_is_asked_for_a_few_at_a_time() -> None:
    async def main() -> None:
        async with crowd(COUNT) as swarm:
            await until(swarm.agree, 5.0)
            liar, honest, *_ = swarm.nodes.values()
            transport, dice = liar.presence.wiring.transport, random.Random(1)
            asked = most = 0

            async def slow(sender: PeerId, body: bytes) -> bytes:
                nonlocal asked, most
                asked += sender == honest.peer
                most = max(most, asked)
                await asyncio.sleep(4.0)
                asked -= sender == honest.peer
                return Known(()).encode()

            transport.on_call("known", slow)
            for _ in range(100):
                strange = Beat(dice.randbytes(TAG_BYTES), 1, dice.randbytes(PULSE_BYTES)).packed()
                body = Known((), strange).encode()
                await transport.call(honest.peer, "gossip", body, timeout=5.0)
            assert 0 < most <= ASKED_AT_ONCE + 1  # one may be the usual question who is there

    run(main)
