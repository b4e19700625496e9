"""This island's own contribution: checked once, then encoded chunk by chunk while it is sent.

A pseudo-gradient that has diverged helps nobody, so all of it is checked before any of it is sent
(:class:`OwnContribution`). Then slices are encoded on demand (:class:`SliceFeed`), so a slice is
never in memory as a whole.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from gossip.exchange.bodies import as_bytes
from gossip.plans.commitments import SEAL_SIZE, TreeNode, leaf
from gossip.plans.validity import Shape
from gossip.wiring import Wiring
from protocols.codecs import CHUNK, Chunk, RangeCodec
from protocols.errors import NonFinite
from protocols.identity import PeerId
from protocols.messages import Contributor
from protocols.transport import Buffer

NEGLIGIBLE = 2.0**-64  # of the whole weight: in float32 nothing would be left of such a share
FINITE = torch.finfo(torch.float32).max
BOUNDS = (2.0**126, 65504.0)  # magnitudes that block codecs and bf16 can carry, and fp16


class DeltaSource(Protocol):
    """Where this member's own contribution comes from."""

    def delta(self, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
        """The pseudo-gradient of elements ``[start, stop)``, fp32 [stop − start].

        Either written to ``out``, which has that shape, or a view of where it lies. Called from
        several threads, on ranges of at most ``CHUNK`` elements; what it reads must not change
        while the round is on.
        """
        ...


@runtime_checkable
class KeepsLost(Protocol):
    """A source that sends later what the encoding of a merged result has lost."""

    def note_lost(
        self, codec: RangeCodec, chunk: Chunk, mean: torch.Tensor, data: torch.Tensor, share: float
    ) -> None:
        """I have merged a chunk: ``mean`` was encoded as ``data``, and ``share`` is mine.

        Of the weight that is in it, whatever the merge rule has scaled off.
        ``mean`` is fp32 of the chunk's elements, ``data`` uint8 of its encoded size.
        Called where data is handled, before the round is decided; ``mean`` is overwritten later.
        """
        ...


def shares(contributors: Iterable[Contributor]) -> dict[PeerId, float]:
    """The share of the planned weight of each contributor, leaving out negligible ones."""
    contributors = tuple(c for c in contributors if c.scale)
    total = math.fsum(c.weight for c in contributors)  # the same by every version of Python
    return {
        c.peer: c.weight / total for c in contributors if c.weight and c.weight / total > NEGLIGIBLE
    }


def largest(codec: RangeCodec) -> float:
    """A magnitude up to which every mean of values can be encoded."""
    for bound in BOUNDS:
        try:
            codec.encode(0, torch.tensor([bound]), bytearray(codec.encoded_size(0, 1)))
        except ValueError:
            continue
        return bound
    raise ValueError(f"{codec.name} carries less than {BOUNDS[-1]}")


def encode_within(codec: RangeCodec, chunk: Chunk, values: torch.Tensor, out: torch.Tensor) -> None:
    """Encode sums, fp32 [n]; values beyond what the codec carries are clamped to its bound."""
    try:
        codec.encode_chunk(chunk, values, out)
    except ValueError:  # a decoder accepts slightly larger values than an encoder does
        bound = largest(codec)
        codec.encode_chunk(chunk, values.clamp_(-bound, bound), out)


def add_up(total: torch.Tensor, values: torch.Tensor, factor: float, *, first: bool) -> None:
    """Add ``values`` times ``factor`` to ``total``; the ``first`` ones overwrite it."""
    if first:
        torch.mul(values, factor, out=total)
    else:
        total.add_(values, alpha=factor)


def squared_norm(values: torch.Tensor) -> float:
    """The sum of squares of finite fp32 [n], whatever their magnitude."""
    square = torch.dot(values, values).item()
    if math.isfinite(square):
        return square
    wide = values.double()
    return torch.dot(wide, wide).item()


def within(values: torch.Tensor, bound: float) -> bool:
    """Whether all values are finite and of a magnitude up to ``bound``.

    A small sum of squares proves it in one pass at the speed of memory.
    """
    square = torch.dot(values, values).item()
    if square <= min(bound * bound, 1e38):
        return True
    return not math.isnan(square) and bool(values.abs().amax() <= bound)


def narrowest(codec: RangeCodec, names: Iterable[str]) -> tuple[float, str]:
    """The largest magnitude that all of these codecs carry, and which of them sets it."""
    return min((largest(codec.named(name)), name) for name in names)


def flaw(pieces: Iterable[torch.Tensor], bound: float, name: str) -> str:
    """Why these cannot be encoded by codec ``name``, which has this bound; empty: they can."""
    for values in pieces:
        if not within(values, bound):
            return f"beyond what {name} can carry" if values.isfinite().all() else "not finite"
    return ""


@dataclass
class OwnContribution:
    """What this island has for one round; ``refused`` is told once why it cannot be sent."""

    wiring: Wiring
    shape: Shape
    source: DeltaSource
    refused: Callable[[NonFinite], None]
    withheld: bool = False  # not ready: ``source`` still has what belongs to another place
    _judging: asyncio.Lock = field(default_factory=asyncio.Lock)
    _sound: bool | None = None

    def known(self, norm: float) -> None:
        """Take in the L2 norm of my contribution as ``source`` has it now; 0: not known.

        No value is larger than the norm, so a small norm proves all values sound and saves a pass
        over the vector. A factor of two allows for the rounding of the norm.
        """
        if 0 < 2 * norm <= self._bound()[0]:
            self._sound = True

    async def is_sound(self) -> bool:
        """Whether all of my pseudo-gradient can be merged: parts of a diverged one help nobody."""
        if self.withheld:
            return False
        async with self._judging:
            if self._sound is None:
                why: str = await self.wiring.offload(self._flaw)
                self._sound = not why
                if why:
                    self.refused(NonFinite(f"own pseudo-gradient is {why}"))
        return self._sound

    def _bound(self) -> tuple[float, str]:
        """The largest magnitude that all codecs carry: that of the round is not known yet."""
        return narrowest(self.wiring.codec, self.shape.codecs)

    async def stop(self) -> None:
        """Check it no more; returns when no check is reading the source."""
        async with self._judging:
            if self._sound is None:
                self._sound = False

    def _flaw(self) -> str:
        size = self.shape.size
        scratch = torch.empty(min(CHUNK, size))
        ends = ((at, min(at + CHUNK, size)) for at in range(0, size, CHUNK))
        pieces = (self.source.delta(at, stop, scratch[: stop - at]) for at, stop in ends)
        return flaw(pieces, *self._bound())


class SliceFeed:
    """My slice of a part on its way to the owner, from the ``first`` chunk of the part on.

    Without ``first`` it is empty, which says that nothing (more) will come. Memory: one chunk in
    fp32 and one encoded; with codec fp32 only the former.
    """

    def __init__(
        self, codec: RangeCodec, source: DeltaSource, start: int, stop: int, first: int | None
    ) -> None:
        self._codec = codec
        self._source = source
        chunks = codec.chunks(start, stop) if first is not None else ()
        self._left = list(chunks[first:])[::-1]
        self.length = sum(chunk.size for chunk in self._left)
        self.given = 0  # bytes handed out
        self._values = torch.empty(0)
        self._encoded = torch.empty(0, dtype=torch.uint8)

    def attach(self, wake: Callable[[], None]) -> None:
        """There is always something to send."""

    def next(self) -> Buffer:
        """The next chunk; raises :class:`ValueError` where it cannot be encoded."""
        chunk = self._left.pop()
        count = chunk.stop - chunk.start
        if len(self._values) < count:
            self._values = torch.empty(count)
        values = self._source.delta(chunk.start, chunk.stop, self._values[:count])
        self.given += chunk.size
        if self._codec.name == "fp32":
            return as_bytes(values.view(torch.uint8))
        if len(self._encoded) < chunk.size:
            self._encoded = torch.empty(chunk.size, dtype=torch.uint8)
        encoded = self._encoded[: chunk.size]
        self._codec.encode_chunk(chunk, values, encoded)
        return as_bytes(encoded)


class SealedFeed(SliceFeed):
    """A slice, and behind it a seal over all its chunks, which ``seal`` makes of the leaves.

    See :mod:`gossip.plans.commitments`. Chunks before the ``first`` are encoded once more for it.
    """

    def __init__(
        self,
        codec: RangeCodec,
        source: DeltaSource,
        start: int,
        stop: int,
        first: int | None,
        seal: Callable[[Sequence[TreeNode]], bytes],
    ) -> None:
        super().__init__(codec, source, start, stop, first)
        self._seal = seal
        self._sent = SliceFeed(codec, source, start, stop, 0) if first else None
        self._before = first or 0
        self._leaves: list[TreeNode] = []
        self.length += 0 if first is None else SEAL_SIZE

    def next(self) -> Buffer:
        """The next chunk, or the seal; raises as :meth:`SliceFeed.next` does."""
        if self._left:
            data = super().next()
            self._leaves.append(leaf(data))
            return data
        before = [leaf(self._sent.next()) for _ in range(self._before)] if self._sent else []
        self.given += SEAL_SIZE
        return self._seal(before + self._leaves)
