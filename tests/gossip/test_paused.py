"""A member whose trainer stands still: its node lives on, and has no state of a later round."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
import torch
from catching_up_kit import Stateful, at_one_place, merging, played, scene
from exchange_kit import until
from simulated_swarm import Member

from gossip.chain.own_status import STUCK_S
from protocols.messages import Certificate

pytestmark = pytest.mark.usefixtures("remembered_signatures")

PAUSE_S = 75.0


class Pausing(Stateful):
    """One that takes no round in while its trainer stands still."""

    going: asyncio.Event | None = None

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        if self.going is not None:
            await self.going.wait()
        await super().apply(certificate, parts)


def rounds(members: Sequence[Member]) -> int:
    return min(member.replica.place.round for member in members)


@pytest.mark.parametrize("count", [2, 3])
def test_the_others_go_on_and_it_comes_back(count: int) -> None:
    async def story() -> None:
        async with scene(count, kind=Pausing, think=(0.4, 0.45)) as here:
            paused, *others = here.founders
            await until(lambda: rounds(here.founders) >= 3, 20.0)
            assert isinstance(paused.replica, Pausing)
            paused.replica.going = asyncio.Event()
            await asyncio.sleep(STUCK_S + 5.0)
            before = rounds(others)
            await asyncio.sleep(PAUSE_S - STUCK_S - 5.0)
            assert rounds(others) > before + 60
            assert paused.replica.place.round == 3
            paused.replica.going.set()
            await until(merging(here.founders), 60.0)
            await until(lambda: at_one_place(here.founders), 10.0)
            assert paused.swarm.chains[0].status.status == "active"

    played(story)
