"""The mean over a stable group, without certificates: for modes that meet in every step.

A butterfly: everybody owns a part, gets the others' slices of it, merges, and sends the result to
all. Unlike a round (:mod:`gossip.exchange`) it knows no spare owner: if one member is missing the
mean is not there, and :class:`Incomplete` says who. Each step of classic data parallelism, of
SPARTA and of the streamed fragments goes this way in simulations.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossip.mailbox import Mailbox
from protocols.codecs import Codec
from protocols.errors import RemoteProtocolError
from protocols.identity import PeerId


class Incomplete(RuntimeError):
    """Somebody's slice or result did not come; the arguments are their names."""


@dataclass(frozen=True, slots=True)
class Mean:
    """What a collective came to, float32 [n] each."""

    mean: Tensor  # as everybody decodes it
    sent: Tensor  # what was merged of this member's vector: decoded, its own part as it is
    lost: Tensor  # mean − its encoding in the own part, zero elsewhere


@dataclass
class Collective:
    """One member's end."""

    box: Mailbox
    me: PeerId
    patience_s: float = 60.0

    async def mean(
        self,
        members: Sequence[PeerId],
        subject: str,
        vector: Tensor,
        codec: Codec,
        shares: Sequence[float],
    ) -> Mean:
        """Σ share · vector over ``members`` (in the same order everywhere), float32 [n].

        Raises :class:`Incomplete`.
        """
        cuts = [len(vector) * index // len(members) for index in range(len(members) + 1)]
        bounds = dict(zip(members, itertools.pairwise(cuts), strict=True))
        start, stop = bounds[self.me]
        sent, result = vector.clone(), torch.empty_like(vector)
        others = [peer for peer in members if peer != self.me]
        async with asyncio.TaskGroup() as group:
            coming = [
                group.create_task(self._get(f"part {subject}", peer, codec, stop - start))
                for peer in others
            ]
            for peer in others:
                first, last = bounds[peer]
                data = encoded(codec, vector[first:last])
                codec.decode(data, sent[first:last])
                group.create_task(self._put(peer, f"part {subject}", data))
        merged = torch.zeros(stop - start)
        pieces = dict(zip(others, [task.result() for task in coming], strict=True))
        pieces[self.me] = vector[start:stop]
        missing = [peer for peer in others if pieces[peer] is None]
        if missing:
            raise Incomplete(*missing)
        for peer, share in zip(members, shares, strict=True):
            piece = pieces[peer]
            assert piece is not None
            merged.add_(piece * share)
        data = encoded(codec, merged)
        codec.decode(data, result[start:stop])
        async with asyncio.TaskGroup() as group:
            coming = [
                group.create_task(self._get(f"mean {subject}", peer, codec, cut[1] - cut[0]))
                for peer, cut in bounds.items()
                if peer != self.me
            ]
            for peer in others:
                group.create_task(self._put(peer, f"mean {subject}", data))
        for peer, task in zip(others, coming, strict=True):
            piece = task.result()
            if piece is None:
                raise Incomplete(peer)
            result[slice(*bounds[peer])] = piece
        lost = torch.zeros_like(vector)
        torch.sub(merged, result[start:stop], out=lost[start:stop])
        return Mean(result, sent, lost)

    async def _get(self, subject: str, peer: PeerId, codec: Codec, count: int) -> Tensor | None:
        data = await self.box.receive(subject, peer, timeout=self.patience_s)
        if data is None:
            return None
        values = torch.empty(count)
        try:
            codec.decode(data, values)
        except RemoteProtocolError:  # garbage from a peer is as good as nothing from it
            return None
        return values

    async def _put(self, peer: PeerId, subject: str, data: Tensor) -> None:
        await self.box.send(peer, subject, data, timeout=self.patience_s)


def encoded(codec: Codec, values: Tensor) -> Tensor:
    """uint8 [m] of float32 values [n]."""
    data = torch.empty(codec.encoded_size(len(values)), dtype=torch.uint8)
    codec.encode(values, data)
    return data
