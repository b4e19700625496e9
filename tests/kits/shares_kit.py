"""Islands that do nothing but give each other shares, and books on which their sum is read."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from gossip.pairs.account import Account, Balance
from gossip.pairs.letters import Letters, Mail
from gossip.pairs.meeting import Post
from gossip.pairs.postman import Postman
from gossip.pairs.service import receive
from gossip.wiring import Wiring
from node.replicas.blending import Blend
from protocols.codecs import Encoded, RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory.transport import MemoryNetwork
from protocols.tasks import Tasks

RUN = b"r" * 32


@dataclass
class PaperBook:
    """What is on an island's disk; ``written`` is called after each change."""

    brought: float  # weight with which the island came
    balance: Balance | None = None
    full: Callable[[], bool] = lambda: False
    written: Callable[[], None] = lambda: None

    def read(self) -> Balance | None:
        return self.balance

    def write(self, balance: Balance) -> None:
        if self.full():
            raise OSError(28, "No space left on device")
        self.balance = balance
        self.written()


def all_weights(books: dict[PeerId, PaperBook]) -> float:
    """What there is on these disks: here, and on its way to somebody that has not taken it in."""
    total = 0.0
    for sender, book in books.items():
        if book.balance is None:
            total += book.brought
            continue
        total += book.balance.own
        for to, given in book.balance.given.items():
            theirs = books[to].balance if to in books else None
            if theirs is None or theirs.came.get(sender) != given.name:
                total += given.weight
    return total


@dataclass
class Giver:
    """One island: each second or so it gives shares, and mixes in what has come."""

    identity: Identity
    network: MemoryNetwork
    dice: random.Random
    book: PaperBook
    base: torch.Tensor
    everybody: list[PeerId]
    slow_disk: float = 0.0  # seconds that a write takes at most
    stopped: bool = False  # it gives nothing more
    blurred: bool = False  # a share came back without its parameters
    group: asyncio.TaskGroup = field(default_factory=asyncio.TaskGroup)

    def __post_init__(self) -> None:
        loop, peer = asyncio.get_running_loop(), self.identity.peer_id
        codec = RangeCodec("fp32", len(self.base))
        spawn = Tasks(self.group).spawn
        transport = self.network.join(peer)
        wiring = Wiring(transport, self.identity, RUN, codec, spawn, self._offload, loop.time)
        self.account = Account(self.book.brought, self.book, self._offload)
        self.blend = Blend(self.base, codec, shares=True)
        self.blend.weight = self.account.balance.own
        self.blending = asyncio.Lock()
        mail = Mail(
            welcome=lambda peer: peer in self.members.islands,
            coming=lambda peer: None,
            broken=lambda peer: None,
            arrived=lambda letter: None,
            dropped=lambda stamp: None,
            rejected=lambda peer, error: None,
            counts=lambda answer: True,
        )
        self.letters = Letters(
            wiring,
            len(self.base),
            mail,
            room=4,
            keep_all=True,
            heaviest=lambda: 1e9,
            account=self.account,
        )
        receive([self.letters])
        self.members: Any = SimpleNamespace(
            islands={},
            patience=SimpleNamespace(heartbeat_s=1.0),
            stillness_s=lambda peers, unknown: 2.0,
            answer_s=lambda peer, unknown: 2.0,
        )
        for other in self.everybody:
            self.learn(other)
        core: Any = SimpleNamespace(
            owed=set(self.account.balance.given),
            patience=SimpleNamespace(longest_s=20.0),
            on_posted=lambda to, now: [],
            on_failed=lambda to, now: [],
        )
        presence: Any = SimpleNamespace(contact=lambda p: None, unreachable=lambda p: None)
        self.postman = Postman(
            wiring,
            presence,
            self.members,
            core,
            self.letters,
            self._take_back,
            lambda instructions: None,
        )

    def learn(self, other: PeerId) -> None:
        """It knows ``other`` from now on."""
        said = SimpleNamespace(expelled=False, announce=SimpleNamespace(status="active"))
        if other != self.identity.peer_id:
            self.members.islands[other] = said

    def forget(self, other: PeerId) -> None:
        """As after ten minutes of silence."""
        self.members.islands.pop(other, None)

    @property
    def weight(self) -> float:
        """What is here, mixed in or not."""
        return self.blend.weight + sum(letter.weight for letter in self.letters.held.values())

    async def _offload(self, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.dice.random() * self.slow_disk)
        result = work()
        await asyncio.sleep(self.dice.random() * self.slow_disk)
        return result

    async def _take_back(self, letter: Encoded | None, weight: float) -> None:
        self.blurred |= letter is None
        self.blend.take_back(letter, weight)

    async def live(self) -> None:
        """Until it is killed."""
        async with self.group:
            self.postman.resume()
            self.blend.start(self.base)
            round_ = 0
            while True:
                await asyncio.sleep(self.dice.uniform(0.2, 1.5))
                self._mix()
                free = [p for p in self.members.islands if p not in self.postman.core.owed]
                if free and not self.stopped and self.blend.gives:
                    to = self.dice.sample(free, min(len(free), self.dice.choice([1, 1, 2])))
                    posts = [Post(peer, round_, 0, None, True) for peer in to]
                    body, weight = self.blend.encode(len(posts), "fp32")
                    await self.postman.send_all(posts, body, weight)
                    round_ += 1

    def _mix(self) -> None:
        letters = [self.letters.take(stamp) for stamp in list(self.letters.held)]
        given = [(one.body, one.weight, None) for one in letters if one is not None]
        if given:
            self.blend.mix(given)
        self.base.copy_(self.blend.fast)
