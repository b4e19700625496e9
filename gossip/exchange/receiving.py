"""Receiving merged parts, and checking them while they arrive.

A part counts as held only when its bytes match the digest *and* decode: what a majority has voted
for must be applicable everywhere. Bytes go straight to where the part will be kept; each chunk is
hashed and tried as soon as it is whole, while it is in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable

from blake3 import blake3

from gossip.exchange.bodies import as_bytes
from gossip.exchange.buffers import Whole
from gossip.exchange.transfers import check_length
from gossip.wiring import Wiring
from protocols.codecs import RangeCodec
from protocols.errors import Malformed, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import PartRequest, PartResult


class Inflow:
    """What has arrived of a part; a broken transfer is taken up where it ended."""

    def __init__(self, codec: RangeCodec, start: int, stop: int, whole: Whole) -> None:
        self.codec, self.start = codec, start
        self.chunks = codec.chunks(start, stop)
        self.data = whole.take(codec, start, stop)
        self.checked = 0  # chunks that are here, whole and sound
        self.filled = 0  # bytes from the part's beginning that are here
        self.moved = 0  # the most that ``filled`` has been: a chunk that comes again is no progress
        self.newest: object = None  # of the transfers: only the newest may go on
        self.wanted = True  # False: whatever still comes is refused
        self.open = 0  # pushes of it that are going on
        self.givers: set[PeerId] = set()  # who has pushed some of it
        self._hasher = blake3()
        self._bytes = as_bytes(self.data)

    @property
    def elements(self) -> int:
        """How many of the part's first elements are here."""
        return self.chunks[self.checked - 1].stop - self.start if self.checked else 0

    @property
    def left(self) -> int:
        """How many bytes are not here yet."""
        return len(self._bytes) - self.filled

    def offset(self, chunk: int) -> int:
        """Where a chunk begins, in bytes; behind the last one, where the part ends."""
        return self.chunks[chunk].offset if chunk < len(self.chunks) else len(self._bytes)

    def check(self) -> None:
        """Another chunk is whole: hash it, try it. Raises NonFinite or Malformed."""
        chunk = self.chunks[self.checked]
        data = self.data[chunk.span]
        self._hasher.update(self._bytes[chunk.span])
        self.codec.check_chunk(chunk, data)
        self.checked += 1

    def check_digest(self, digest: bytes) -> None:
        """Raise Malformed unless the whole part is what ``digest`` says."""
        if self._hasher.digest() != digest:
            raise Malformed("the part does not match its digest")


class PartDrain:
    """One transfer of a part, from the ``first`` chunk on, and then of ``trailer`` bytes.

    Or, without ``first``, from the first byte on that is not here. ``finish`` gets the trailer
    when all is in, and raises if it is not right.
    """

    def __init__(
        self, inflow: Inflow, first: int | None, trailer: int, finish: Callable[[bytes], None]
    ) -> None:
        self._inflow, self._first, self._finish = inflow, first, finish
        self._view = as_bytes(inflow.data)
        self._trailer = memoryview(bytearray(trailer))
        self._at = inflow.filled if first is None else inflow.offset(first)
        self.length = len(self._view) - self._at + trailer
        self._left = self.length
        self._begun = False
        self._mark = object()  # not self: both would live until the garbage collector comes

    def attach(self, wake: Callable[[], None]) -> None:
        """There is always room."""

    def room(self) -> memoryview:
        """The rest of a chunk, or of the trailer.

        Raises RemoteRefused ``again`` where the part has grown since it was asked how much of it
        is here, and ``late`` once a newer transfer of it has begun, or nobody wants it any more.
        """
        if not self._inflow.wanted:
            raise RemoteRefused("late", "it is not wanted any more")
        if not self._begun:
            stands = self._inflow.filled if self._first is None else self._inflow.checked
            if stands != (self._at if self._first is None else self._first):
                raise RemoteRefused("again", "it stands elsewhere by now")
            self._begun, self._inflow.newest = True, self._mark
        elif self._inflow.newest is not self._mark:
            raise RemoteRefused("late", "another transfer of it has begun")
        if self._at < len(self._view):
            return self._view[self._at : self._chunk_end()]
        return self._trailer[len(self._trailer) - self._left :]

    def took(self, count: int) -> None:
        """Raises RemoteProtocolError for what cannot be held."""
        self._left -= count
        if self._at < len(self._view):
            self._at += count
            self._inflow.filled = self._at
            self._inflow.moved = max(self._inflow.moved, self._at)
            if self._at == self._chunk_end():
                self._inflow.check()
        if not self._left:
            self._finish(bytes(self._trailer))

    def _chunk_end(self) -> int:
        chunk = self._inflow.chunks[self._inflow.checked]
        return chunk.offset + chunk.size


class PartPull:
    """Pulls a merged part from one donor or several, each going on where the one before ended.

    ``inflow`` is what has come of it already; a push that still brings it is refused. Once bytes
    from several together have turned out wrong, each has to give all of it (``alone``).
    """

    def __init__(
        self, wiring: Wiring, result: PartResult, whole: Whole, inflow: Inflow | None = None
    ) -> None:
        self.result = result
        self._wiring, self._whole = wiring, whole
        self.alone = False
        self._givers: set[PeerId | None] = set() if inflow is None else {None}
        self.inflow = self._fresh() if inflow is None else inflow
        self.inflow.newest = None
        self._stood = self.inflow.filled  # where the pull under way began

    def before(self, donor: PeerId) -> Inflow:
        """What this donor goes on with: nothing of others, where each has to give all of it."""
        if self.alone and not self._givers <= {donor}:
            self._begin_anew()
        self._givers.add(donor)
        return self.inflow

    async def pull(self, donor: PeerId, timeout: float, *, judged: bool = False) -> None:
        """Pull what is not here yet, and check all of it. If it breaks off, what came stays.

        It may stand still for ``timeout`` seconds, and be slow where the caller judges its pace
        (``judged``). Raises TransportError, and RemoteProtocolError for wrong bytes: see
        :meth:`spoilt_by`.
        """
        inflow, result = self.before(donor), self.result
        self._stood = inflow.filled
        drain = PartDrain(inflow, None, 0, lambda _: None)
        at = (self._wiring.run, result.fragment, result.round, result.start, result.stop)
        header = PartRequest(*at, result.digest, len(inflow.data) - drain.length)
        if drain.length:
            async with self._wiring.transport.pull(
                donor, "part", header.encode(), max_length=drain.length, timeout=timeout
            ) as incoming:
                check_length(incoming, drain)
                await incoming.into(drain, slow=judged)
        inflow.check_digest(result.digest)

    def spoilt_by(self, donor: PeerId) -> bool:
        """The bytes are wrong: begin anew. Returns whether they all came from this donor.

        Where it has given none, as of a body that has another length, there is nothing wrong with
        those that are here.
        """
        if self.inflow.left and self.inflow.filled == self._stood:
            return True
        its_own = self._givers == {donor}
        self.alone |= not its_own
        self._begin_anew()
        return its_own

    def _begin_anew(self) -> None:
        self.inflow, self._givers = self._fresh(), set()

    def _fresh(self) -> Inflow:
        result = self.result
        codec = self._wiring.codec.named(result.codec)
        return Inflow(codec, result.start, result.stop, self._whole)
