"""An owner's arithmetic on one part: add chunks as they arrive, pass each on once it is merged.

A part is merged chunk by chunk (:data:`protocols.codecs.CHUNK` elements). Every contributor's
chunks arrive in order, so what is merged of a contributor is a prefix of the part. A chunk is
complete when everybody who is still expected has brought it; then my own values are added, the
mean is encoded once, and whoever streams the part on is woken. A contributor that is given up on
stays in the chunks that it brought and is in no later one.

The sums are Σ share·scale·x in fp32, each share being of the whole planned weight, so that they
cannot overflow, whatever arrives; where a contributor is missing, the chunk is divided by the sum
of the shares that are in it. The scales are the merge rule's (:mod:`gossip.plans.mix`). Addends
follow the order of arrival, mine last: the last bits differ from run to run, which is why only the
owner's bytes count. With codec fp32 the sum is formed in the result itself.

Nothing here waits or locks: all of it runs where the transport handles data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from blake3 import blake3

from gossip.exchange.bodies import as_bytes
from gossip.exchange.buffers import Whole, buffers
from gossip.exchange.drains import MergeDrain
from gossip.exchange.slicing import (
    FINITE,
    DeltaSource,
    KeepsLost,
    add_up,
    encode_within,
    largest,
    squared_norm,
    within,
)
from protocols.codecs import CHUNK, RangeCodec
from protocols.errors import Malformed, NonFinite, RemoteRefused
from protocols.identity import PeerId

AT_A_TIME = 4  # chunks merged without letting others have their turn
AT_ONCE = 4  # sums, of a chunk each, whose memory is taken together


@dataclass(frozen=True)
class Contributions:
    """Whose slices may be in a part that I (``me``) merge, and for how much each counts."""

    me: PeerId
    shares: Mapping[PeerId, float]  # of all who may count, mine included
    expected: Iterable[PeerId]  # those to wait for
    scales: Mapping[PeerId, float] = field(default_factory=dict)  # of the shares, where not 1
    limits: Mapping[PeerId, float] = field(default_factory=dict)  # norms not to be exceeded

    @property
    def factors(self) -> dict[PeerId, float]:
        """Each share times its scale."""
        return {peer: share * self.scales.get(peer, 1.0) for peer, share in self.shares.items()}


class PartMerge:
    """One part being merged. ``whole`` has room for the result.

    ``post`` runs a callback later on the same thread; ``begun`` and ``finished`` are called once,
    when the first and the last chunks are merged.
    """

    def __init__(
        self,
        codec: RangeCodec,
        start: int,
        stop: int,
        contributions: Contributions,
        *,
        whole: Whole,
        post: Callable[[Callable[[], None]], None],
        begun: Callable[[], None],
        finished: Callable[[], None],
    ) -> None:
        self.codec, self.start, self.stop = codec, start, stop
        self.chunks = codec.chunks(start, stop)
        self.result = whole.take(codec, start, stop)
        self.merged = 0  # chunks
        self.arrived: dict[PeerId, int] = {}  # bytes of each so far, to see who makes progress
        self.trailer = b""  # what is sent behind the last chunk, once it is known
        self.wakes: list[Callable[[], None]] = []  # of the feeds that stream the part on
        self._me, self._shares = contributions.me, contributions.shares
        self._factors = contributions.factors
        limits = contributions.limits
        self._room = {peer: limit * limit for peer, limit in limits.items()}  # squared norm left
        self._post, self._begun, self._finished = post, begun, finished
        self._expected = set(contributions.expected) & self._shares.keys() - {self._me}
        self._reached = dict.fromkeys(self._expected, 0)  # chunks that each has brought
        number = len(self.chunks)
        self._missing = [len(self._expected)] * number  # those that each chunk waits for
        self._counts = [0] * number  # slices in its sum
        self._weights = [0.0] * number  # and their shares
        self._sums: dict[int, torch.Tensor] = {}
        self._spare: list[torch.Tensor] = []
        self._plain = self.result.view(torch.float32) if codec.name == "fp32" else None
        self._source: DeltaSource | None = None
        self._settled = False  # it is known whether I contribute
        self._sound = number  # chunks of mine before one that is not finite
        self._hasher = blake3()
        self._bytes = as_bytes(self.result)
        self._busy = self._closed = False

    # --- what may be asked from any thread -------------------------------------------------------

    @property
    def done(self) -> bool:
        """All chunks are merged."""
        return self.merged == len(self.chunks)

    @property
    def ready_bytes(self) -> int:
        """How many bytes of :attr:`result` are final."""
        return self.offset(self.merged)

    @property
    def empty(self) -> bool:
        """Nobody's values are in, and I have none to add."""
        return (self._source is None or not self._sound) and not self._counts[0]

    @property
    def copies(self) -> int:
        """How many encoded copies of the part take memory, at most."""
        return 1

    def awaited(self) -> set[PeerId]:
        """Contributors whose slices are not complete yet, whoever brings them."""
        number = len(self.chunks)
        return {peer for peer in tuple(self._expected) if self._reached[peer] < number}

    def waits_for(self) -> set[PeerId]:
        """Contributors that have yet to bring something."""
        return self.awaited()

    def open_to(self, peer: PeerId) -> bool:
        """Whether a contributor may bring something."""
        return peer in self.waits_for()

    @property
    def slices_in(self) -> int:
        """How many of the expected contributors have brought their whole slice."""
        number = len(self.chunks)
        return sum(self._reached[peer] == number for peer in tuple(self._expected))

    def reached(self, peer: PeerId) -> int:
        """How many chunks of a contributor are in."""
        if peer == self._me:
            return min(self.merged, self._sound) if self._source is not None else 0
        return self._reached.get(peer, 0)

    def elements(self, peer: PeerId) -> int:
        """How many elements of a contributor are in, counted from the part's beginning."""
        number = self.reached(peer)
        return self.chunks[number - 1].stop - self.start if number else 0

    def counted(self, peer: PeerId) -> int:
        """How many elements of a contributor count in what is merged."""
        return self.elements(peer)

    def offset(self, chunk: int) -> int:
        """Where a chunk begins, in bytes; behind the last one, where the part ends."""
        return self.chunks[chunk].offset if chunk < len(self.chunks) else len(self.result)

    def digest(self) -> bytes:
        """BLAKE3 of the merged part, once it is done."""
        return self._hasher.digest()

    # --- where data is handled -------------------------------------------------------------------

    def settle(self, source: DeltaSource | None) -> None:
        """My own contribution comes from ``source`` (None: I have none): merging may begin."""
        if not self._settled and not self._closed:
            self._settled = True
            self._source = source if self._me in self._shares else None
            self._advance()

    def drain(self, peer: PeerId, first: int) -> MergeDrain:
        """For a contributor's slice from the ``first`` chunk on."""

        def whole(index: int, data: torch.Tensor, _: bytes) -> None:
            self.add(peer, index, data)

        return MergeDrain(self.chunks, first, partial(self.moved, peer), whole)

    def add(self, peer: PeerId, index: int, data: torch.Tensor) -> None:
        """A contributor's chunk, encoded (uint8 [bytes]); one that is in already is ignored.

        Raises RemoteRefused ``late`` when it is not expected any more. A chunk that does not
        decode to finite numbers raises RemoteProtocolError, and its sender is given up on.
        """
        if peer not in self._expected:
            raise RemoteRefused("late", "merged without it")
        if index != self._reached[peer]:
            if index < self._reached[peer]:
                return
            raise Malformed("a chunk before its turn")
        try:
            self._take(peer, index, data)
        except (NonFinite, Malformed):
            self.give_up(peer)
            raise
        self._reached[peer] += 1
        self._missing[index] -= 1
        self._advance()

    def moved(self, peer: PeerId, count: int) -> None:
        """``count`` more bytes of a contributor have come.

        Raises RemoteRefused ``late`` when they are not expected any more: the rest of a chunk may
        be long in coming.
        """
        if peer not in self._expected:
            raise RemoteRefused("late", "merged without it")
        self.arrived[peer] = self.arrived.get(peer, 0) + count

    def give_up(self, peer: PeerId) -> None:
        """Wait no more for a contributor; what it has brought stays in."""
        if peer in self._expected:
            self._expected.discard(peer)
            for index in range(self._reached[peer], len(self.chunks)):
                self._missing[index] -= 1
            self._advance()

    def close(self) -> None:
        """Nobody wants the part any more: take nothing more, touch no source any more."""
        self._expected.clear()
        self._sums.clear()
        self._spare.clear()
        if not self.done:
            self._closed, self._source = True, None
            self._begun = self._finished = _nothing  # breaks the cycle with whoever holds this

    def seal(self, trailer: bytes) -> None:
        """The trailer is known: the last bytes may be sent."""
        self.trailer = trailer
        self._wake()
        self.wakes.clear()

    # --- inside ----------------------------------------------------------------------------------

    def _take(self, peer: PeerId, index: int, data: torch.Tensor) -> None:
        """Add a chunk of a contributor, or raise NonFinite or Malformed and add nothing."""
        total, factor = self._sum(index), self._factors[peer]
        first = not self._counts[index]
        if peer in self._room:
            scratch = self._scratch()
            add_up(total, self._decoded(peer, index, data, scratch), factor, first=first)
            self._spare.append(scratch)
        elif first:
            self.codec.decode_chunk(self.chunks[index], data, total, factor)
        else:
            self.codec.decode_add_chunk(self.chunks[index], data, factor, total)
        self._counts[index] += 1
        self._weights[index] += self._shares[peer]

    def _decoded(
        self, peer: PeerId, index: int, data: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """A contributor's values of a chunk, if they are fit to be merged."""
        values = self._finite(index, data, out)
        if peer in self._room:
            square = squared_norm(values)
            if square > self._room[peer]:
                raise Malformed("a slice that is longer than all of it is said to be")
            self._room[peer] -= square
        return values

    def _finite(self, index: int, data: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What a chunk decodes to, in ``out`` or where it is. Raises NonFinite or Malformed."""
        if self._plain is not None:  # straight from where it was received
            values = data.view(torch.float32)
            if not within(values, FINITE):
                raise NonFinite("fp32: a value is not finite")
            return values
        chunk = self.chunks[index]
        values = out[: chunk.stop - chunk.start]
        self.codec.decode_chunk(chunk, data, values)
        return values

    def _scratch(self) -> torch.Tensor:
        """Fp32 [CHUNK] from the pool: sums are freed in any order, which leaves malloc gaps."""
        if not self._spare:
            count = min(len(self.chunks) + 1, AT_ONCE)
            sums = buffers.take(4 * CHUNK * count).view(torch.float32)
            self._spare += sums.view(count, CHUNK).unbind()
        return self._spare.pop()

    def _sum(self, index: int) -> torch.Tensor:
        chunk = self.chunks[index]
        if self._plain is not None:
            return self._plain[chunk.start - self.start : chunk.stop - self.start]
        if index not in self._sums:
            self._sums[index] = self._scratch()
        return self._sums[index][: chunk.stop - chunk.start]

    def _advance(self) -> None:
        """Merge what is complete, a few chunks at a time."""
        if self._busy:
            return
        before = self.merged
        while self._next_is_complete():
            if self.merged - before == AT_A_TIME:
                self._busy = True
                self._post(self._go_on)
                break
            self._merge(self.merged)
            self.merged += 1
        if self.merged > before:
            if not before:
                self._begun()
            if self.done:
                self._spare.clear()  # a slow receiver keeps the rest of this object for long
                self._finished()
                self._begun = self._finished = _nothing  # breaks the cycle with whoever holds this
            self._wake()

    def _go_on(self) -> None:
        self._busy = False
        self._advance()

    def _next_is_complete(self) -> bool:
        open_ = self._settled and not self._closed and not self.done
        return open_ and not self._missing[self.merged]

    def _sum_of_all(self, index: int) -> torch.Tensor:
        """All contributions to a chunk combined, mine too, fp32, in the buffer of :meth:`_sum`."""
        chunk, total = self.chunks[index], self._sum(index)
        count, weight = self._counts[index], self._weights[index]
        if self._source is not None and index < self._sound:
            factor = self._factors[self._me]
            scratch = self._scratch()
            mine = self._source.delta(chunk.start, chunk.stop, scratch[: len(total)])
            if within(mine, FINITE):
                add_up(total, mine, factor, first=not count)
                count, weight = count + 1, weight + self._shares[self._me]
            else:  # memory has changed since it was looked at: what else came is merged without it
                self._sound = index
            self._spare.append(scratch)
        if not count:
            total.zero_()
        else:
            self._balance(total, count, weight)
        return total

    def _balance(self, total: torch.Tensor, count: int, weight: float) -> None:
        """Make the sum of ``count`` contributions, whose shares add up to ``weight``, a mean."""
        if count < len(self._shares):
            total.mul_(1.0 / weight)

    def _merge(self, index: int) -> None:
        chunk, total = self.chunks[index], self._sum_of_all(index)
        target = self.result[chunk.span]
        if self._plain is None:
            encode_within(self.codec, chunk, total, target)
            self._note_lost(index, total, target)
            self._spare.append(self._sums.pop(index))
        else:
            try:
                self.codec.check_chunk(chunk, target)
            except NonFinite:
                total.clamp_(-largest(self.codec), largest(self.codec))
        self._hasher.update(self._bytes[chunk.span])

    def _note_lost(self, index: int, mean: torch.Tensor, data: torch.Tensor) -> None:
        """Tell my source what this encoding has lost, if it can make up for it."""
        source: object = self._source
        if isinstance(source, KeepsLost) and index < self._sound:
            # without my scale: what is clipped would become longer by it, and be clipped more
            share = self._shares[self._me] / (self._weights[index] + self._shares[self._me])
            source.note_lost(self.codec, self.chunks[index], mean, data, share)

    def _wake(self) -> None:
        for wake in self.wakes:
            wake()


def _nothing() -> None:
    """In place of a callback that has been called, or is wanted no more."""
