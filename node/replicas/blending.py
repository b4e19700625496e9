"""What an island of a run of gossip does with parameters: encode them, mix them, step. No IO.

``base`` is φ, this island's slow parameters; ``fast`` starts as θ, what its inner steps made of
them, and is moved towards others by its exchanges; the outer step leads from φ towards it, with
D = φ − fast in the place of a merged pseudo-gradient. So one tensor an exchange travels, and the
run's outer optimizer (:mod:`diloco.optimizers`) makes the difference between the rules:

- ``noloco`` (2506.10911, equation 2 with β = γ, where the partners' slow parameters cancel:
  :mod:`diloco.mixing`) is heavy ball with η = β and μ = α: v ← α v + D, φ ← φ − β v;
- ``average`` is φ ← fast, plain SGD with η = 1;
- ``push-sum`` (1811.10792, :func:`diloco.mixing.give_shares` and :func:`diloco.mixing.take_share`)
  likewise, where fast is z = x / w. What inner steps made counts with the island's weight w, which
  is 1 in the mean; in the paper it counts 1, which would throw an island far off that nobody has
  sent to for long.

What coarse codecs lose does not move the mean of all, and the two letters of an exchange may have
different ones: an island adds half of the difference of the two vectors *as they travelled*,
its own as well as the other's, so what one adds the other takes away; and push-sum gives away what
was sent as it arrives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from diloco import mixing, optimizers
from gossip.exchange.slicing import largest
from protocols.codecs import CHUNK, Chunk, Encoded, RangeCodec

SAMPLED = 16  # chunks of a letter whose coding loss is measured
LEAST_WEIGHT = 2.0**-32  # of push-sum: an island that receives nothing would halve it to 0
HALF = 0.5  # of the way to the other's letter, on both sides: else the mean of all would move


class Blend:
    """One island's parameters between a snapshot and its outer step; fp32 [N] vectors."""

    def __init__(self, base: Tensor, codec: RangeCodec, *, shares: bool) -> None:
        """``base`` is changed in place by :meth:`step`; ``shares``: by push-sum.

        ``codec`` is any of the vector's: each letter has its own.
        """
        self.base, self.codec, self.shares = base, codec, shares
        self.fast = torch.empty(0)  # taken when there is something to exchange
        self.weight = 1.0  # of push-sum
        self.lost = 0.0  # mean square of an element, by the codec of the newest letter

    @property
    def gives(self) -> bool:
        """Whether there is enough weight left to give some away."""
        return not self.shares or self.weight >= LEAST_WEIGHT

    @torch.no_grad()
    def start(self, sent: Tensor) -> None:
        """Begin with θ as it is in ``sent``, float32 [n]."""
        if not len(self.fast):
            self.fast = torch.empty_like(self.base)
        self.fast.copy_(sent)

    @torch.no_grad()
    def encode(self, receivers: int, codec: str) -> tuple[Encoded, float]:
        """A letter for this many receivers, and its weight.

        With push-sum the weight is split equally: each receiver gets a share, and one stays.
        """
        chosen = self.codec.named(codec)
        letter = Encoded(
            chosen, torch.empty(chosen.encoded_size(0, len(self.base)), dtype=torch.uint8)
        )
        for chunk in self._chunks(letter):
            self._encode_chunk(letter, chunk)
        self.lost = self._loss_of(letter)
        if not self.shares:
            return letter, 1.0
        left = self.weight
        for chunk in self._chunks(letter):
            fast = self.fast[chunk.start : chunk.stop]
            sent = torch.empty_like(fast)
            letter.decode_chunk(chunk, sent)
            left = mixing.give_shares(fast, self.weight, sent, receivers)
        self.weight = left
        return letter, self.weight

    def take_back(self, letter: Encoded | None, weight: float) -> None:
        """A share that did not arrive; None: what it was is not known, and it counts as φ does."""
        if letter is None:
            self.weight += weight
            return
        self.mix([(letter, weight, None)])

    @torch.no_grad()
    def mix(self, letters: Sequence[tuple[Encoded, float, Encoded | None]]) -> float:
        """Take letters in: body, weight, this island's letter of that exchange.

        Returns the RMS difference to the first. Without an own letter the move begins at ``fast``.
        A weight below 1, a newcomer's, shortens the move; with push-sum it is the share's weight.
        """
        square, whole = 0.0, self.weight
        mine = torch.empty(min(CHUNK, len(self.base)))
        theirs = torch.empty_like(mine)
        # codecs cut a vector at the same elements, and each puts its bytes elsewhere
        cuts = [self._chunks(body) for body, *_ in letters]
        own_cuts = [self._chunks(own) if own is not None else () for *_, own in letters]
        for at, cut in enumerate(self.codec.chunks(0, len(self.base))):
            fast = self.fast[cut.start : cut.stop]
            own_here, other = mine[: len(fast)], theirs[: len(fast)]
            before, whole = fast.clone(), self.weight
            for index, (body, weight, own) in enumerate(letters):
                body.decode_chunk(cuts[index][at], other)
                if own is None or self.shares:
                    own_here.copy_(before)
                else:
                    own.decode_chunk(own_cuts[index][at], own_here)
                if index == 0:
                    difference = other - own_here
                    square += torch.dot(difference, difference).item()
                if self.shares:
                    whole = mixing.take_share(fast, whole, other, weight)
                else:
                    fast.add_(other.sub_(own_here), alpha=HALF * min(1.0, weight))
        if self.shares:
            self.weight = whole
        return math.sqrt(square / len(self.base))

    @torch.no_grad()
    def step(
        self, rule: optimizers.Rule, vectors: dict[str, Tensor], rates: optimizers.Rates
    ) -> None:
        """The outer step of a rule and its ``vectors``, from φ towards what exchanges made of θ."""
        for start in range(0, len(self.base), CHUNK):
            here = slice(start, start + CHUNK)
            slow, fast = self.base[here], self.fast[here]
            part = {name: vectors[name][here] for name in rule.vectors}
            rule.step(part, slow - fast, slow, rates)

    def _encode_chunk(self, letter: Encoded, chunk: Chunk) -> None:
        values = self.fast[chunk.start : chunk.stop]
        data = letter.data[chunk.span]
        try:
            letter.codec.encode_chunk(chunk, values, data)
        except ValueError:  # mixing led beyond the codec's range, or to inf - inf
            bound = largest(letter.codec)
            letter.codec.encode_chunk(chunk, values.nan_to_num_(0.0).clamp_(-bound, bound), data)

    def _loss_of(self, letter: Encoded) -> float:
        """The mean square of what coding lost of an element, by some of its chunks."""
        cuts = self._chunks(letter)
        square, count = 0.0, 0
        for chunk in cuts[:: -(-len(cuts) // SAMPLED)]:
            fast = self.fast[chunk.start : chunk.stop]
            lost = torch.empty_like(fast)
            letter.decode_chunk(chunk, lost)
            lost.sub_(fast)
            square += torch.dot(lost, lost).item()
            count += len(fast)
        return square / count

    def _chunks(self, body: Encoded) -> tuple[Chunk, ...]:
        return body.codec.chunks(0, len(self.base))
