"""What an island of a run of gossip does with parameters: encode them, mix them, step. Pure.

``base`` is φ, this island's slow parameters; ``fast`` starts as θ, what its inner steps made of
them, and is moved towards others by its exchanges; the outer step then leads from φ to it. So one
tensor an exchange travels, and one rule serves all of :mod:`diloco.mixing`:

- ``noloco`` (2506.10911, equation 2 with β = γ: the partners' slow parameters cancel):
  m ← α m + β (fast − φ), φ ← φ + m, where fast is the mean of θ over the pair;
- ``average``: φ ← fast;
- ``push-sum`` (1811.10792): φ ← x / w, with x and w moved by shares. What inner steps made counts
  with the island's weight w, which is 1 in the mean; in the paper it counts 1, which would throw
  an island far off that nobody has sent to for long.

What coarse codecs lose does not move the mean of all: an island adds ``share`` of the difference
of the two vectors *as they travelled*, its own as well as the other's, so what one adds the other
takes away; and push-sum gives away what was sent as it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco import mixing
from protocols.codecs import CHUNK, Chunk, RangeCodec


class Blend:
    """One island's parameters between a snapshot and its outer step; fp32 [N] vectors."""

    def __init__(self, base: Tensor, momentum: Tensor, codec: RangeCodec, rule: str) -> None:
        """``base`` and ``momentum`` are changed in place by :meth:`step`."""
        self.base, self.momentum, self.codec, self.rule = base, momentum, codec, rule
        self.fast = torch.empty(0)  # taken when there is something to exchange
        self.weight = 1.0  # of push-sum

    @property
    def _chunks(self) -> list[Chunk]:
        return self.codec.chunks(0, len(self.base))

    @torch.inference_mode()
    def start(self, sent: Tensor) -> None:
        """Begin with θ as it is in ``sent``."""
        if not len(self.fast):
            self.fast = torch.empty_like(self.base)
        self.fast.copy_(sent)

    @torch.inference_mode()
    def encode(self, receivers: int) -> tuple[Tensor, float]:
        """A letter for so many receivers, uint8, and its weight.

        With push-sum that gives away as much: of equal shares one stays.
        """
        data = torch.empty(self.codec.encoded_size(0, len(self.base)), dtype=torch.uint8)
        self.codec.encode(0, self.fast, data)
        if self.rule != "push-sum":
            return data, 1.0
        self.weight /= receivers + 1
        for chunk in self._chunks:  # x − n·sent: what rounding lost stays here
            fast = self.fast[chunk.start : chunk.stop]
            sent = torch.empty_like(fast)
            self._decode(chunk, data, sent)
            fast.add_(fast - sent, alpha=receivers)
        return data, self.weight

    def take_back(self, data: Tensor, weight: float) -> None:
        """A share that did not arrive."""
        self.mix(None, [(data, weight, 0.0)])

    @torch.inference_mode()
    def mix(self, own: Tensor | None, letters: Sequence[tuple[Tensor, float, float]]) -> float:
        """Take letters (data, weight, share of the way) in; RMS difference to the first.

        ``own``: this island's letter of the same exchange; None where it sent none.
        """
        square = 0.0
        whole = self.weight + sum(weight for _, weight, _ in letters)
        mine = torch.empty(min(CHUNK, len(self.base)))
        theirs = torch.empty_like(mine)
        for chunk in self._chunks:
            fast = self.fast[chunk.start : chunk.stop]
            own_here, other = mine[: len(fast)], theirs[: len(fast)]
            own_here.copy_(fast)
            if own is not None and self.rule != "push-sum":
                self._decode(chunk, own, own_here)
            if self.rule == "push-sum":
                fast.mul_(self.weight / whole)
            for index, (data, weight, share) in enumerate(letters):
                self._decode(chunk, data, other)
                if index == 0:
                    difference = other - own_here
                    square += torch.dot(difference, difference).item()
                if self.rule == "push-sum":
                    fast.add_(other, alpha=weight / whole)
                else:
                    fast.add_(other.sub_(own_here), alpha=share)
        if self.rule == "push-sum":
            self.weight = whole
        return math.sqrt(square / len(self.base))

    @torch.inference_mode()
    def step(self) -> None:
        """The outer step, from φ towards what the exchanges made of θ."""
        for start in range(0, len(self.base), CHUNK):
            here = slice(start, start + CHUNK)
            slow, fast = self.base[here], self.fast[here]
            if self.rule == "noloco":
                mixing.noloco(
                    slow, self.momentum[here], fast, fast, alpha=mixing.ALPHA, beta=mixing.BETA
                )
            else:
                slow.copy_(fast)

    def _decode(self, chunk: Chunk, data: Tensor, out: Tensor) -> None:
        self.codec.decode_chunk(chunk, data[chunk.offset : chunk.offset + chunk.size], out)
