"""Whatever befalls islands of push-sum, in whatever order: each share counts exactly once.

After each write to any disk, the weights on all disks add up to what was brought: also while
islands are killed between two writes, come back with parameters of long ago, are cut off until
they are forgotten, lose letters and answers, and find their disks full.
"""

from __future__ import annotations

import asyncio
import random

import pytest
import torch
from exchange_kit import until
from hypothesis import given, settings
from hypothesis import strategies as st
from shares_kit import Giver, PaperBook, all_weights

from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import run

SIZE = 64
LASTS_S = 60.0
HEALED_S = 120.0
KINDS = ("kill", "kill", "kill", "freeze", "cut", "forget", "forget", "full", "narrow")


class Story:
    """Some islands, and what befalls them."""

    def __init__(self, seed: int, *, deaths: bool) -> None:
        self.dice = random.Random(seed)
        self.deaths = deaths
        self.network = MemoryNetwork(seed, link=Link(latency=0.02, drop=self.dice.choice([0, 0.2])))
        self.slow_disk = self.dice.choice([0.0, 0.05, 0.5])
        identities = [
            Identity.from_seed(bytes([n + 1] * 32)) for n in range(self.dice.choice([2, 3, 4]))
        ]
        self.identities = {one.peer_id: one for one in identities}
        self.everybody = [one.peer_id for one in identities]
        self.books = {
            peer: PaperBook(self.dice.choice([0.25, 1.0, 1.0])) for peer in self.everybody
        }
        self.brought = sum(book.brought for book in self.books.values())
        self.full: set[PeerId] = set()
        for peer, book in self.books.items():
            book.written = self.check
            book.full = lambda peer=peer: peer in self.full  # type: ignore[misc]
        self.givers: dict[PeerId, Giver] = {}
        self.tasks: dict[PeerId, asyncio.Task[None]] = {}
        self.checkpoints = {peer: torch.randn(SIZE) for peer in self.everybody}

    def check(self) -> None:
        assert all_weights(self.books) == pytest.approx(self.brought, abs=1e-9)

    def start(self, peer: PeerId, group: asyncio.TaskGroup) -> None:
        giver = Giver(
            self.identities[peer],
            self.network,
            self.dice,
            self.books[peer],
            self.checkpoints[peer].clone(),
            self.everybody,
            self.slow_disk,
        )
        self.givers[peer], self.tasks[peer] = giver, group.create_task(giver.live())

    async def kill(self, peer: PeerId) -> None:
        self.network.kill(peer)
        self.tasks[peer].cancel()
        await asyncio.wait([self.tasks[peer]])
        del self.givers[peer]

    async def befall(self, group: asyncio.TaskGroup) -> None:
        dice = self.dice
        kind, peer = dice.choice(KINDS), dice.choice(self.everybody)
        other = dice.choice([one for one in self.everybody if one != peer])
        if dice.random() < 0.5 and peer in self.givers:
            self.checkpoints[peer] = self.givers[peer].base.clone()
        match kind:
            case "kill" if self.deaths and peer in self.givers:
                await self.kill(peer)
                group.create_task(self._again(peer, dice.choice([0.01, 0.5, 5.0]), group))
            case "freeze":
                self.network.freeze(peer)
                group.create_task(self._thawed(peer, dice.choice([0.1, 3.0, 15.0])))
            case "cut":
                self.network.cut(peer, other, both=dice.random() < 0.5)
                group.create_task(self._spliced(peer, other, dice.choice([0.1, 3.0, 15.0])))
            case "forget" if peer in self.givers:
                self.givers[peer].forget(other)
                group.create_task(self._met(peer, other, dice.choice([2.0, 15.0])))
            case "full":
                self.full ^= {peer}
            case "narrow" if (machine := self.network.node(peer)) is not None:
                machine.upload = machine.download = dice.choice([50.0, 1e6])

    async def _again(self, peer: PeerId, seconds: float, group: asyncio.TaskGroup) -> None:
        await asyncio.sleep(seconds)
        self.start(peer, group)

    async def _thawed(self, peer: PeerId, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.network.thaw(peer)

    async def _spliced(self, peer: PeerId, other: PeerId, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.network.splice(peer, other)

    async def _met(self, peer: PeerId, other: PeerId, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if peer in self.givers:
            self.givers[peer].learn(other)

    def settled(self) -> bool:
        """Whether nobody is in doubt about a share of its own."""
        return len(self.givers) == len(self.everybody) and not any(
            one.account.balance.given or one.letters._pushes for one in self.givers.values()
        )

    async def play(self) -> None:
        first = [value.clone() for value in self.checkpoints.values()]
        start = sum(
            book.brought * value.double()
            for book, value in zip(self.books.values(), first, strict=True)
        )
        async with asyncio.TaskGroup() as group:
            for peer in self.everybody:
                self.start(peer, group)
            now = asyncio.get_running_loop().time
            end = now() + LASTS_S
            while now() < end:
                await asyncio.sleep(self.dice.expovariate(1.0))
                await self.befall(group)
            self.full.clear()
            for peer in self.everybody:
                machine = self.network.node(peer)
                assert machine is not None
                machine.upload = machine.download = 1e6
                machine.up_free = machine.down_free = 0.0
            await asyncio.sleep(20.0)  # what was to heal has healed
            for one in self.givers.values():
                one.stopped = True
            await until(self.settled, HEALED_S, every=0.5)
            await asyncio.sleep(5.0)
            for task in self.tasks.values():
                task.cancel()
        givers = self.givers.values()
        assert sum(one.weight for one in givers) == pytest.approx(self.brought, abs=1e-9)
        for one in givers:  # what is in memory is what is on disk
            assert one.weight == pytest.approx(one.account.balance.own, abs=1e-9)
        low, high = torch.stack(first).min(0).values, torch.stack(first).max(0).values
        total = sum(one.blend.weight * one.base.double() for one in givers)
        for one in givers:  # the parameters of old count with a weight that is theirs
            assert (one.base >= low - 1e-4).all()
            assert (one.base <= high + 1e-4).all()
        if not self.deaths and not any(one.blurred for one in givers):
            assert isinstance(total, torch.Tensor)
            assert (total - start).abs().max().item() < 1e-3


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**31), deaths=st.booleans())
def test_each_share_counts_once_whatever_happens(seed: int, deaths: bool) -> None:
    torch.manual_seed(seed)

    async def main() -> None:
        await Story(seed, deaths=deaths).play()

    run(main())


@pytest.mark.slow
@settings(max_examples=2000, deadline=None)
@given(seed=st.integers(0, 2**31), deaths=st.booleans())
def test_each_share_counts_once_whatever_happens_many_times(seed: int, deaths: bool) -> None:
    torch.manual_seed(seed)

    async def main() -> None:
        await Story(seed, deaths=deaths).play()

    run(main())
