"""What somebody who is not in office can have the members of a round do."""

from __future__ import annotations

import asyncio

import pytest
from simulated_swarm import RUN, SimulatedSwarm, simulated_swarm

from gossip.spreading import passed
from protocols import virtual_time
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.messages import Passed, Votes
from protocols.wire import decode_any

STRANGER = Identity.from_seed(b"s" * 32)


def passed_on(swarm: SimulatedSwarm) -> list[tuple[PeerId, PeerId]]:
    """Notes that go from hand to hand from now on: from whom, to whom."""
    found: list[tuple[PeerId, PeerId]] = []

    def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
        if name == "round" and data and isinstance(_decoded(data), Passed):
            found.append((sender, receiver))
        return data

    swarm.network.tamper = tap
    return found


def _decoded(data: bytes) -> object:
    try:
        return decode_any(data, Passed)
    except Exception:  # noqa: BLE001  # any other message
        return None


async def said_by(swarm: SimulatedSwarm, author: Identity, round_: int) -> None:
    """A note of ``author`` to the first member, for all others."""
    first, *others = swarm.living()
    note = passed(author, RUN, Votes(0, round_, bytes(32), 0, 0, bytes(32), ()))
    told = Passed(
        note.fragment,
        note.round,
        note.author,
        tuple(member.peer for member in others),
        note.body,
        note.signature,
    )
    transport = swarm.network.join(author.peer_id)
    await transport.call(first.peer, "round", told.encode(), timeout=5.0)


@pytest.mark.parametrize("round_", [0, 1])
def test_nothing_of_a_stranger_is_passed_on(round_: int) -> None:
    async def main() -> None:
        async with simulated_swarm(4, think=(30.0, 31.0)) as swarm:
            await asyncio.sleep(0.5)
            found = passed_on(swarm)
            with pytest.raises(RemoteRefused, match="stranger"):
                await said_by(swarm, STRANGER, round_)
            await asyncio.sleep(6.0)
            assert found == [(STRANGER.peer_id, swarm.living()[0].peer)]

    virtual_time.run(main())
