"""Proving from one chunk whether an owner weighed and merged what it was sent. Pure.

Where strangers merge, a rule that withstands liars is worth nothing if the owner of a part may
return anything for it. So contributors seal their slices, and an owner states, before weights are
known, the roots of all slices of its part and the tree of their inner products by chunk
(:mod:`gossip.plans.commitments`, :class:`~protocols.messages.Gram`). After the round anybody may
ask it for one chunk: that chunk of each slice, its products, and the ways up to what was stated. It
has kept nothing else that would fit, so either the chunk comes out as certified, or the answer
itself proves to everybody that it does not, under the signatures of the owner and of the
contributors. (Random checks whose evidence convicts: Gorbunov et al., 2106.11257, "Secure
distributed training at scale", ban by recomputed gradients; here it is the merge that is
recomputed.)

Layout of the evidence, in the order of those who are present: the way of each slice's chunk, the
chunk as it was sent, fp32 where it is the owner's own; then the way of the products, and the
products.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from gossip.exchange.bodies import as_bytes
from gossip.exchange.slicing import FINITE, encode_within, shares, within
from gossip.plans.commitments import (
    TreeNode,
    check_seal,
    leaf,
    leaf_of,
    packed,
    top,
    unpacked,
    way,
    way_length,
)
from gossip.plans.weighing import inner_products, triangle
from protocols.codecs import Chunk, RangeCodec
from protocols.errors import BadSignature, Malformed, NonFinite
from protocols.identity import PeerId
from protocols.messages import Gram, Outcome, PartResult, TransferHeader

# Tolerances, since sums may run in another order: an element at the edge between two steps of a
# codec may be rounded either way, one of a million; and the last bits of a double differ.
MERGED_OFF = 0.01  # of the chunk's norm
PRODUCTS_OFF = 1e-6  # of the product of two norms
_HASH, _NUMBER = 32, 8


@dataclass(frozen=True)
class Case:
    """One chunk of a part, as it was certified, and what its owner has stated of the part."""

    run: bytes
    outcome: Outcome
    result: PartResult
    merged: torch.Tensor | None  # the whole part's bytes, uint8; None: merged by another member
    gram: Gram
    number: int  # of the chunk
    codec: RangeCodec  # the round's

    @property
    def owner(self) -> PeerId:
        """Who answers for it: the member that stated the products, even if another one merged."""
        return self.gram.owner

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """Those of the part."""
        return self.codec.chunks(self.result.start, self.result.stop)

    @property
    def chunk(self) -> Chunk:
        """The one that is looked at."""
        return self.chunks[self.number]

    @cached_property
    def present(self) -> tuple[PeerId, ...]:
        """Whose slices the owner had."""
        return tuple(self.outcome.contributors[index].peer for index in self.gram.present)

    @property
    def size(self) -> int:
        """Bytes of the evidence."""
        steps = way_length(len(self.chunks), self.number)
        slices = sum(steps * _HASH + self._sent(peer) for peer in self.present)
        return slices + steps * (_HASH + self._numbers) + self._numbers

    @property
    def _numbers(self) -> int:
        """Bytes of the products of one chunk."""
        return _NUMBER * (len(self.present) * (len(self.present) + 1) // 2)

    def _sent(self, peer: PeerId) -> int:
        """Bytes of a contributor's chunk."""
        own = peer == self.owner
        return 4 * (self.chunk.stop - self.chunk.start) if own else self.chunk.size

    def judge(self, evidence: memoryview) -> str:
        """What the owner has done wrong; empty if nothing.

        Raises Malformed for what is no evidence: it is not what the owner has stated.
        """
        if len(evidence) != self.size:
            raise Malformed(f"{len(evidence)} bytes of evidence where {self.size} belong")
        steps = way_length(len(self.chunks), self.number)
        reader = _Reader(evidence)
        chunk, values = self.chunk, torch.empty(len(self.present), self._elements)
        for row, peer, root in zip(values, self.present, self.gram.roots, strict=True):
            beside = [TreeNode(bytes(reader.take(_HASH))) for _ in range(steps)]
            data = reader.take(self._sent(peer))
            if top(leaf(data), beside, len(self.chunks), self.number).hash != root:
                raise Malformed("a chunk of another slice than was stated")
            try:
                if peer == self.owner:
                    row.copy_(torch.frombuffer(bytearray(data), dtype=torch.float32))
                    if not within(row, FINITE):  # beside an infinite norm any product would do
                        raise NonFinite("a value is not finite")
                else:
                    self.codec.decode_chunk(chunk, bytearray(data), row)
            except (Malformed, NonFinite) as error:
                return f"a slice that cannot be merged ({error})"
        beside = [reader.node(self._numbers) for _ in range(steps)]
        said = unpacked(reader.take(self._numbers))
        whole = top(leaf_of(said), beside, len(self.chunks), self.number)
        if whole.hash != self.gram.tree:
            raise Malformed("other inner products than were stated")
        return next(self._wrong(values, said, whole), "")

    @property
    def _elements(self) -> int:
        return self.chunk.stop - self.chunk.start

    def _wrong(self, values: torch.Tensor, said: torch.Tensor, whole: TreeNode) -> Iterator[str]:
        for peer, root, signature in zip(
            self.present, self.gram.roots, self.gram.signatures, strict=True
        ):
            try:
                if peer != self.owner:
                    check_seal(peer, self._draft, root + signature)
            except BadSignature:
                yield "a slice that its contributor has not sent"
        if packed(whole.total) != self.gram.products:
            yield "inner products that are not the sum of those of its chunks"
        products = inner_products(values)
        norms = products.diagonal().sqrt()
        bound = triangle(norms[:, None] * norms) * PRODUCTS_OFF
        if not bool(((triangle(products) - said).abs() <= bound).all()):
            yield "inner products that are not those of its slices"
        if self.merged is None:
            return
        counted = shares(self.outcome.contributors)
        scales = {c.peer: c.scale for c in self.outcome.contributors}
        if not counted.keys() <= set(self.present):
            yield "less than what was weighed"
        total = torch.zeros(self._elements)
        for row, peer in zip(values, self.present, strict=True):
            if peer in counted:
                total += row * (counted[peer] * scales[peer])
        if not self._is_near(total, self.merged):
            yield "another sum than that of its slices"

    def _is_near(self, total: torch.Tensor, part: torch.Tensor) -> bool:
        """Whether the certified chunk is what ``total`` is encoded as, but for rounding."""
        chunk = self.chunk
        data, wanted = torch.empty(chunk.size, dtype=torch.uint8), torch.empty(self._elements)
        found = torch.empty(self._elements)
        encode_within(self.codec, chunk, total, data)
        self.codec.decode_chunk(chunk, data, wanted)
        merged = part[chunk.span]
        self.codec.decode_chunk(chunk, merged, found)
        off = (found.double() - wanted).norm()
        return bool(off <= MERGED_OFF * wanted.double().norm())

    @property
    def _draft(self) -> TransferHeader:
        """The header under which slices were sent."""
        at = self.result
        return TransferHeader(
            self.run, at.fragment, at.round, at.start, at.stop, at.codec, self.gram.basis, 0
        )


class _Reader:
    """Takes pieces of known sizes."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._at = data, 0

    def take(self, size: int) -> memoryview:
        self._at += size
        return self._data[self._at - size : self._at]

    def node(self, numbers: int) -> TreeNode:
        return TreeNode(bytes(self.take(_HASH)), unpacked(self.take(numbers)))


@dataclass(frozen=True)
class Shown:
    """What the owner of a part keeps of it, to answer for it."""

    slices: Sequence[Mapping[PeerId, torch.Tensor]]  # by chunk: uint8, as sent; fp32 of its own
    leaves: Mapping[PeerId, Sequence[TreeNode]]  # of the slices that came whole, in order
    products: Sequence[TreeNode]  # by chunk

    def evidence(self, number: int) -> bytes:
        """For one chunk, laid out as above."""
        found = []
        for peer, leaves in self.leaves.items():
            found += [node.hash for node in way(leaves, number)]
            found.append(bytes(as_bytes(self.slices[number][peer])))
        found += [node.bytes for node in way(self.products, number)]
        return b"".join([*found, packed(self.products[number].total)])
