"""An owner of parameters that islands bring work to: lock-step, stale-synchronous or asynchronous.

Of simulations (:mod:`node.simulate`) alone: in a running swarm rounds are certified, and who merges
a part of one is :mod:`gossip.owning`.

Sans-IO: work goes in, replies come out. A parameter server is one owner of everything; several
owners, one a part of the vector each, share its load, and with every island owning a part there is
no centre. How work is taken into the parameters is injected (:mod:`diloco.asynchronous`,
:mod:`diloco.optimizers`), as all arithmetic of merging is.

A reply carries what the client lacks: the owner remembers what each client holds and sends the
difference in the codec of the run. What coding loses is part of the next difference, so nothing is
lost for good, and both directions are coarse. It costs a vector for each client.

>>> owner.arrive("a", round_=3, work=delta, weight=1.0)    # who may go on now
['a']
>>> owner.reply("a")                                       # what it lacks, encoded
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossip.collective import encoded
from protocols.codecs import Codec
from protocols.identity import PeerId

Take = Callable[[Tensor, list[tuple[Tensor, float, int]]], None]
"""Work into parameters in place: (pseudo-gradient, weight, staleness in versions) of each."""
MayStart = Callable[[int, int], bool]
"""Whether who has brought so many rounds may begin another, where the slowest has so many."""


@dataclass
class Client:
    """What an owner knows of an island."""

    holds: Tensor  # float32 [n]
    version: int = 0  # of the parameters when it was last told
    rounds: int = 0  # it has brought


@dataclass
class Owner:
    """One part of the parameters and those who train it."""

    params: Tensor  # float32 [n]
    codec: Codec
    take: Take
    gather: int = 1  # work of so many is taken at a time: 1 asynchronous, all of them lock-step
    may_start: MayStart = lambda mine, slowest: True
    version: int = 0
    clients: dict[PeerId, Client] = field(default_factory=dict)
    waiting: dict[PeerId, None] = field(default_factory=dict)  # in the order of arrival
    _pile: list[tuple[PeerId, Tensor, float]] = field(default_factory=list)

    def join(self, client: PeerId, holds: Tensor) -> None:
        """A client that starts from ``holds`` [n]; it counts as being where the slowest is."""
        slowest = min((one.rounds for one in self.clients.values()), default=0)
        self.clients[client] = Client(holds.clone(), self.version, slowest)

    def leave(self, client: PeerId) -> list[PeerId]:
        """A client that is gone; who may go on since nobody waits for it any more."""
        self.clients.pop(client, None)
        self.waiting.pop(client, None)
        return self._released()

    def arrive(self, client: PeerId, work: Tensor, weight: float) -> list[PeerId]:
        """Take a pseudo-gradient [n]; who may go on now, the client itself or others."""
        known = self.clients[client]
        known.rounds += 1
        self._pile.append((client, work, weight))
        self.waiting[client] = None
        if len(self._pile) >= self.gather:
            self.take_pile()
        return self._released()

    def take_pile(self) -> None:
        """Take what has come, though some are missing (a round whose time is over)."""
        if self._pile:
            taken = [
                (work, weight, self.version - self.clients[who].version)
                for who, work, weight in self._pile
                if who in self.clients
            ]
            self.take(self.params, taken)
            self.version += 1
            self._pile.clear()

    def reply(self, client: PeerId) -> Tensor:
        """The difference between the parameters and what the client holds, encoded."""
        known = self.clients[client]
        data = encoded(self.codec, self.params - known.holds)
        gained = torch.empty_like(known.holds)
        self.codec.decode(data, gained)
        known.holds.add_(gained)
        known.version = self.version
        return data

    def _released(self) -> list[PeerId]:
        piled = {client for client, _, _ in self._pile} if self._pile and self.gather > 1 else set()
        slowest = min((one.rounds for one in self.clients.values()), default=0)
        free = [
            client
            for client in self.waiting
            if client not in piled and self.may_start(self.clients[client].rounds, slowest)
        ]
        for client in free:
            del self.waiting[client]
        return free
