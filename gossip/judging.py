"""Merges that look at all slices of a chunk, or of the part, before any of them counts.

Slices are kept encoded as they arrive. Where members merge equal parts that is about one encoded
vector for all contributors together; who merges more keeps more, and a lone server an encoded
vector of each. :class:`ColumnMerge` lets go of a chunk as soon as it is merged, and streams it on
like any other; :class:`WeighedMerge` looks at every chunk twice: once for the inner products, and
once with the scales that came of them, so nothing leaves it before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from gossip.merging import AT_A_TIME, PartMerge
from gossip.mixing import Column
from protocols.identity import PeerId

PIECE = 8192  # elements of each slice that are multiplied in double at a time


class KeptMerge(PartMerge):
    """A part whose slices are kept; what is made of them is up to the subclasses."""

    def __init__(self, *args: Any, order: Sequence[PeerId], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._order = [peer for peer in order if peer in self._shares]
        self._kept: list[dict[PeerId, torch.Tensor]] = [{} for _ in self.chunks]

    @property
    def copies(self) -> int:
        return 1 if self.done else 1 + len(self._order)

    def _take(self, peer: PeerId, index: int, data: torch.Tensor) -> None:
        scratch = self._scratch()
        self._decoded(peer, index, data, scratch)  # it must be fit to be merged later
        self._spare.append(scratch)
        self._kept[index][peer] = data.clone()
        self._counts[index] += 1
        self._weights[index] += self._shares[peer]

    def _values(self, index: int) -> tuple[list[PeerId], torch.Tensor]:
        """Who is in a chunk, in order, and their values: fp32 [K, n]."""
        chunk, kept = self.chunks[index], self._kept[index]
        peers = [p for p in self._order if p in kept or (p == self._me and self._source)]
        values = torch.empty(len(peers), chunk.stop - chunk.start)
        for peer, row in zip(peers, values, strict=True):
            if peer in kept:
                self.codec.decode_chunk(chunk, kept[peer], row)
            else:
                assert self._source is not None
                row.copy_(self._source.delta(chunk.start, chunk.stop, row))
        return peers, values

    def _note_lost(self, index: int, mean: torch.Tensor, data: torch.Tensor) -> None:
        """Nothing: where values are sorted or weighed, being louder makes up for no loss."""


class ColumnMerge(KeptMerge):
    """A part merged element by element: ``column`` makes fp32 [n] of [K, n] and weights."""

    def __init__(self, *args: Any, column: Column, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._column = column

    def _sum_of_all(self, index: int) -> torch.Tensor:
        total = self._sum(index)
        peers, values = self._values(index)
        self._kept[index].clear()
        if not peers:
            return total.zero_()
        return total.copy_(self._column(values, [self._shares[peer] for peer in peers]))


class WeighedMerge(KeptMerge):
    """A part merged with scales that follow from its own slices, and from those of other parts.

    ``judged`` is called once, when all slices are in that will come: then :attr:`present` and
    :attr:`products` are known. Nothing is merged before :meth:`deal`.
    """

    def __init__(self, *args: Any, judged: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._judged = judged
        self._all = torch.zeros(len(self._order), len(self._order), dtype=torch.float64)
        self._looked = 0  # chunks whose products are in
        self._dealt: Mapping[PeerId, float] | None = None

    @property
    def dealt(self) -> bool:
        """The scales are known."""
        return self._dealt is not None

    @property
    def present(self) -> list[PeerId]:
        """Whose slices came whole, in order."""
        number = len(self.chunks)
        mine = {self._me} if self._source is not None else set()
        return [p for p in self._order if p in mine or self._reached.get(p, 0) == number]

    @property
    def products(self) -> torch.Tensor:
        """Inner products of the slices of those who are :attr:`present`: float64 [K, K]."""
        rows = [self._order.index(peer) for peer in self.present]
        return self._all[rows][:, rows]

    def deal(self, coefficients: Mapping[PeerId, float]) -> None:
        """Merge: the sum of these, who are all present, each times its coefficient."""
        if self._dealt is None:
            self._dealt = coefficients
            self._advance()

    def close(self) -> None:
        """As :meth:`PartMerge.close`."""
        super().close()
        self._judged = lambda: None  # it refers to whoever holds this

    def counted(self, peer: PeerId) -> int:
        return self.stop - self.start if self._dealt and peer in self._dealt else 0

    def _advance(self) -> None:
        if self._dealt is not None:
            super()._advance()
            return
        if self._busy:
            return
        for _ in range(AT_A_TIME):
            if not self._next_is_complete():
                return
            self._multiply(self._looked)
            self._looked += 1
            if self._looked == len(self.chunks):
                self._judged()
                return
        self._busy = True
        self._post(self._go_on)

    def _next_is_complete(self) -> bool:
        if self._dealt is not None:
            return super()._next_is_complete()
        open_ = self._settled and not self._closed and self._looked < len(self.chunks)
        return open_ and not self._missing[self._looked]

    def _multiply(self, index: int) -> None:
        peers, values = self._values(index)
        rows = torch.tensor([self._order.index(peer) for peer in peers], dtype=torch.int64)
        for piece in torch.split(values, PIECE, dim=1):
            wide = piece.double()  # fp32 would overflow where a liar sends huge values
            self._all[rows[:, None], rows] += wide @ wide.T

    def _sum_of_all(self, index: int) -> torch.Tensor:
        assert self._dealt is not None
        total = self._sum(index).zero_()
        peers, values = self._values(index)
        self._kept[index].clear()
        for peer, row in zip(peers, values, strict=True):
            if peer in self._dealt:
                total.add_(row.mul_(self._dealt[peer]))
        return total
