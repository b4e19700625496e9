"""Three peers that exchange letters over a simulated network."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from gossip.pairs.letters import Letter, Letters, Mail
from gossip.pairs.meeting import Key, Post
from gossip.pairs.service import receive
from gossip.wiring import Wiring
from protocols.codecs import Encoded, RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import inline, run

RUN = b"r" * 32
SIZE = 700_000
A, B, C = (Identity.from_seed(bytes([n] * 32)) for n in (1, 2, 3))


class Box:
    """One node with letters, and what it was told."""

    def __init__(
        self, network: MemoryNetwork, identity: Identity, codec: str = "bf16", **more: Any
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.arrived: list[Letter] = []
        self.rejected: list[str] = []
        self.strangers: set[PeerId] = set()
        self.in_vain: set[Key | None] = set()  # its letters to which no answer counts any more
        self.coming = 0  # letters that have begun to arrive
        self.broken = 0  # and have stopped to

        def spawn(coroutine: Any) -> asyncio.Task[None]:
            task = asyncio.get_running_loop().create_task(coroutine)
            self.tasks.add(task)
            return task

        loop = asyncio.get_running_loop()
        self.codec = RangeCodec(codec, SIZE)
        wiring = Wiring(
            network.join(identity.peer_id), identity, RUN, self.codec, spawn, inline, loop.time
        )
        mail = Mail(
            welcome=lambda peer: peer not in self.strangers,
            coming=self._count,
            broken=self._broke,
            arrived=self.arrived.append,
            dropped=lambda stamp: None,
            rejected=lambda peer, error: self.rejected.append(str(error)),
            counts=lambda answer: answer.answers not in self.in_vain,
        )
        self.letters = Letters(wiring, SIZE, mail, **more)
        receive([self.letters])

    def _count(self, peer: PeerId) -> None:
        self.coming += 1

    def _broke(self, peer: PeerId) -> None:
        self.broken += 1

    def body(self, value: float, codec: str = "") -> Encoded:
        chosen = self.codec.named(codec or self.codec.name)
        data = torch.empty(chosen.encoded_size(0, SIZE), dtype=torch.uint8)
        chosen.encode(0, torch.full((SIZE,), value), data)
        return Encoded(chosen, data)

    async def send(
        self,
        to: Identity,
        value: float,
        codec: str = "",
        answers: Key | None = None,
        **more: Any,
    ) -> None:
        post = Post(to.peer_id, 4, 1, answers, awaited=False)
        await self.letters.send(post, self.body(value, codec), **{"timeout": 5.0} | more)


def with_boxes(test: Callable[[Box, Box, Box], Awaitable[None]], **more: Any) -> None:
    async def main() -> None:
        network = MemoryNetwork(1, link=more.pop("link", Link(latency=0.01)), upload=12.5e6)
        a, b, c = Box(network, A), Box(network, B, **more), Box(network, C)
        await test(a, b, c)

    run(main())
