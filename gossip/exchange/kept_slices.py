"""Merging by rules that must see all slices of a chunk, or of a part, before any of them counts.

Slices are kept encoded as they arrive. Where members merge equal parts that is about one encoded
vector for all contributors together; who merges more keeps more, and a lone server an encoded
vector of each. :class:`ColumnMerge` lets go of a chunk as soon as it is merged, and streams it on
like any other; :class:`WeighedMerge` looks at every chunk twice: once for the inner products, and
once with the scales that came of them, so nothing leaves it before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from gossip.exchange.auditing import Shown
from gossip.exchange.bodies import as_bytes
from gossip.exchange.drains import MergeDrain
from gossip.exchange.merging import AT_A_TIME, PartMerge
from gossip.exchange.slicing import FINITE, within
from gossip.plans.commitments import SEAL_SIZE, TreeNode, check_seal, leaf, leaf_of, root, root_of
from gossip.plans.mix import Column
from gossip.plans.weighing import inner_products, triangle
from protocols.errors import BadSignature, Malformed
from protocols.identity import PeerId
from protocols.messages import TransferHeader


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
        peers = [peer for peer in self._order if peer in kept]
        values = torch.empty(len(peers), chunk.stop - chunk.start)
        for peer, row in zip(peers, values, strict=True):
            if peer == self._me:
                row.copy_(kept[peer].view(torch.float32))
            else:
                self.codec.decode_chunk(chunk, kept[peer], row)
        return peers, values

    def _keep_mine(self, index: int) -> None:
        """Take my own values of a chunk as they are, never encoded, if they still are finite."""
        if self._source is None or index >= self._sound:
            return
        chunk, scratch = self.chunks[index], self._scratch()
        mine = self._source.delta(chunk.start, chunk.stop, scratch[: chunk.stop - chunk.start])
        if within(mine, FINITE):
            self._kept[index][self._me] = mine.clone().view(torch.uint8)
        else:  # as in PartMerge._sum_of_all
            self._sound = index
        self._spare.append(scratch)

    def _note_lost(self, index: int, mean: torch.Tensor, data: torch.Tensor) -> None:
        """Nothing: where values are sorted or weighed, being louder makes up for no loss."""


class ColumnMerge(KeptMerge):
    """A part merged element by element: ``column`` makes fp32 [n] of [K, n] and weights."""

    def __init__(self, *args: Any, column: Column, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._column = column

    def _sum_of_all(self, index: int) -> torch.Tensor:
        total = self._sum(index)
        self._keep_mine(index)
        peers, values = self._values(index)
        self._kept[index].clear()
        if not peers:
            return total.zero_()
        return total.copy_(self._column(values, [self._shares[peer] for peer in peers]))


class WeighedMerge(KeptMerge):
    """A part merged with scales that follow from its own slices, and from those of other parts.

    ``weighed`` is called once, when all slices are in that will come: then :attr:`seals` and
    :attr:`products` are known. Nothing is merged before :meth:`merge_with`. ``header`` is what
    slices are sealed under; all of them are kept, to answer for the part (:meth:`shown`).
    """

    def __init__(
        self, *args: Any, weighed: Callable[[], None], header: TransferHeader, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._weighed, self._header = weighed, header
        self._leaves: dict[PeerId, list[TreeNode]] = {peer: [] for peer in self._order}
        self._seals: dict[PeerId, bytes] = {}
        self._products: list[tuple[list[PeerId], torch.Tensor]] = []  # float64 [K, K] of each chunk
        self._tree: list[TreeNode] = []  # of the slices that came whole, once all are in
        self._coefficients: Mapping[PeerId, float] | None = None

    @property
    def copies(self) -> int:
        return 1 + len(self._order)

    @property
    def seals(self) -> dict[PeerId, bytes]:
        """Of those whose slices came whole, in order; of mine the root alone."""
        return {peer: self._seals[peer] for peer in self._order if peer in self._seals}

    @property
    def products(self) -> TreeNode:
        """The inner products of those slices: the lower triangle of float64 [K, K]."""
        return root(self._tree)

    def shown(self) -> Shown:
        """What is kept as evidence once the part is merged."""
        return Shown(self._kept, {peer: self._leaves[peer] for peer in self.seals}, self._tree)

    def merge_with(self, coefficients: Mapping[PeerId, float]) -> None:
        """Merge: the sum of these slices, all of them present, each times its coefficient."""
        if self._coefficients is None:
            self._coefficients = coefficients
            self._advance()

    def drain(self, peer: PeerId, first: int) -> MergeDrain:
        """As :meth:`PartMerge.drain`; the last chunk counts once the seal behind it is in."""
        last = len(self.chunks) - 1

        def whole(index: int, data: torch.Tensor, seal: bytes) -> None:
            if index == last:
                self.add_last(peer, index, data, seal)
            else:
                self.add(peer, index, data)

        def behind(index: int) -> int:
            return SEAL_SIZE if index == last else 0

        return MergeDrain(self.chunks, first, partial(self.moved, peer), whole, behind)

    def add_last(self, peer: PeerId, index: int, data: torch.Tensor, seal: bytes) -> None:
        """A contributor's last chunk, and the seal. Raises as :meth:`add`, and BadSignature."""
        if peer in self._expected and index == self._reached[peer]:
            whole = root([*self._leaves[peer], leaf(as_bytes(data))]).hash
            try:
                check_seal(peer, self._header, seal)
                if root_of(seal) != whole:
                    raise Malformed("the seal of another slice")
            except (BadSignature, Malformed):
                self.give_up(peer)
                raise
            self._seals[peer] = seal
        self.add(peer, index, data)

    def give_up(self, peer: PeerId) -> None:
        """As :meth:`PartMerge.give_up`; a seal counts with the chunk in front of it."""
        if self._reached.get(peer, 0) < len(self.chunks):
            self._seals.pop(peer, None)
        super().give_up(peer)

    def close(self) -> None:
        """As :meth:`PartMerge.close`."""
        super().close()
        self._weighed = lambda: None  # breaks the cycle with whoever holds this

    def counted(self, peer: PeerId) -> int:
        return self.stop - self.start if self._coefficients and peer in self._coefficients else 0

    def _take(self, peer: PeerId, index: int, data: torch.Tensor) -> None:
        super()._take(peer, index, data)
        self._leaves[peer].append(leaf(as_bytes(data)))

    def _advance(self) -> None:
        if self._coefficients is not None:
            super()._advance()
            return
        if self._busy:
            return
        for _ in range(AT_A_TIME):
            if not self._next_is_complete():
                return
            self._multiply(len(self._products))
            if len(self._products) == len(self.chunks):
                if len(self._leaves.get(self._me, ())) == len(self.chunks):
                    self._seals[self._me] = root(self._leaves[self._me]).hash
                self._tree = self._by_chunk()
                self._weighed()
                return
        self._busy = True
        self._post(self._go_on)

    def _next_is_complete(self) -> bool:
        if self._coefficients is not None:
            return super()._next_is_complete()
        looked = len(self._products)
        open_ = self._settled and not self._closed and looked < len(self.chunks)
        return open_ and not self._missing[looked]

    def _multiply(self, index: int) -> None:
        self._keep_mine(index)
        if (mine := self._kept[index].get(self._me)) is not None:
            self._leaves[self._me].append(leaf(as_bytes(mine)))
        peers, values = self._values(index)
        self._products.append((peers, inner_products(values)))

    def _by_chunk(self) -> list[TreeNode]:
        """The products of those who are present, chunk by chunk."""
        present = list(self.seals)
        found = []
        for peers, products in self._products:
            rows = [peers.index(peer) for peer in present]
            found.append(leaf_of(triangle(products[rows][:, rows])))
        return found

    def _sum_of_all(self, index: int) -> torch.Tensor:
        assert self._coefficients is not None
        total = self._sum(index).zero_()
        for peer, row in zip(*self._values(index), strict=True):
            if peer in self._coefficients:
                total.add_(row.mul_(self._coefficients[peer]))
        return total
