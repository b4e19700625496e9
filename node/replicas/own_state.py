"""The state of an island that gossips: its own parameters and momentum, which nobody else has.

What :class:`~node.replicas.replica.OuterReplica` is for certified rounds. The trainer sees no
difference: it goes on with its inner steps while exchanges run, and does θ ← base + (θ − sent)
between two of them when the outer step is taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from bootstrap.manifest import Manifest
from bootstrap.state import state_digest
from diloco.optimizers import Rates
from diloco.outer import outer_rates
from gossip.exchange.slicing import flaw, narrowest
from gossip.pairs.letters import Letter
from node.replicas.blending import Blend
from node.replicas.replica import OuterReplica
from node.trainer.shared import SharedVectors
from protocols.codecs import CHUNK, Encoded, RangeCodec
from protocols.identity import PeerId
from protocols.tasks import Offload


class Exchanging:
    """What exchanges do with an island's parameters, off the event loop: one thing at a time.

    Several letters may fail at once, while others are mixed in, and each changes all of it.
    """

    blend: Blend
    sent: torch.Tensor  # θ at the last snapshot
    offload: Offload
    blending: asyncio.Lock

    @property
    def lost(self) -> float:
        """Mean square of an element of what the codec of the newest letter lost."""
        return self.blend.lost

    @property
    def gives(self) -> bool:
        """Whether letters may be sent: with push-sum there must be weight left to share."""
        return self.blend.gives

    async def start(self) -> None:
        """What the trainer has learnt, in ``sent``, becomes what is exchanged."""
        await self._alone(lambda: self.blend.start(self.sent))

    async def encode(self, receivers: int, codec: str) -> tuple[Encoded, float]:
        """A letter for this many receivers, and its weight."""
        found: tuple[Encoded, float] = await self._alone(
            lambda: self.blend.encode(receivers, codec)
        )
        return found

    async def take_back(self, letter: Encoded | None, weight: float) -> None:
        """Take a letter that did not arrive back in; None: its weight, at any time."""
        await self._alone(lambda: self.blend.take_back(letter, weight))

    async def mix(self, letters: Sequence[tuple[Letter, Encoded | None]]) -> float:
        """Move towards letters, each paired with an own one; RMS of the first difference."""
        given = [(letter.body, letter.weight, own) for letter, own in letters]
        difference: float = await self._alone(lambda: self.blend.mix(given))
        return difference

    async def _alone(self, work: Callable[[], Any]) -> Any:
        async with self.blending:
            return await self.offload(work)


class OwnReplica(Exchanging, OuterReplica):
    """This island's φ and momentum; a :class:`gossip.pairs.replica.PairReplica`.

    Its round is this island's own count, its roster whoever trains at the moment.
    """

    def __init__(
        self,
        manifest: Manifest,
        me: PeerId,
        vectors: SharedVectors,
        codec: RangeCodec,
        offload: Offload,
        founders: tuple[PeerId, ...] = (),
        fragment: int = 0,
        cut: slice = slice(None),
    ) -> None:
        """As of an :class:`~node.replicas.replica.OuterReplica`; whoever founded the run."""
        super().__init__(manifest, me, vectors, codec, offload, (me,), fragment, cut)
        self.blend = Blend(self.base, codec, shares=manifest.gossip.rule == "push-sum")
        self.blending = asyncio.Lock()
        self.who: Callable[[], tuple[PeerId, ...]] = lambda: (me,)
        self.here: Callable[[], float] = lambda: self.blend.weight  # or what an account says

    @property
    def roster(self) -> tuple[PeerId, ...]:
        """Everybody who trains: decides which windows of the data are this island's."""
        return self.who()

    @property
    def weight(self) -> float:
        """Push-sum weight that goes into a checkpoint: shares that wait count as this island's φ.

        So the sum of all weights stays the same when an island stops and resumes; its parameters
        differ from what the shares would have made of them by less than islands differ.
        """
        return self.here()

    def flaw(self) -> str:
        """Why not every codec of the run can carry the snapshot in ``sent``; empty: they can."""
        bound = narrowest(self.codec, self.manifest.rounds.allowed_codecs)
        return flaw(torch.split(self.sent, CHUNK), *bound)

    async def finish(self, round_: int, *, ours: bool) -> None:
        """Take the outer step of a round and hand the result to the trainer.

        ``ours``: what was exchanged is the trainer's snapshot; else (it was started anew
        meanwhile) what it has learnt since then stays on top of the result.
        """
        snapshot = await self.trainer.hold() if self.trainer is not None else None
        counted = ours and snapshot is not None
        lr, momentum = outer_rates(round_, **self.manifest.outer.schedule)

        def step() -> bytes:
            if not counted:
                self.sent.copy_(self.base)
            self.blend.step(self.rule, self.vectors, Rates(lr, momentum, round_ + 1))
            return bytes(state_digest(self.state)[0])

        await self._thawed()
        digest: bytes = await self._alone(step)
        self._place = replace(self._place, round=round_ + 1, state=digest)
        if self.trainer is not None:
            await self.trainer.release(contributed=counted, reset=False)
