"""Bodies packed for a slow link: an entropy code around what the codecs leave.

Quantized values are far from uniform: small ones are frequent, and of a float the sign and the
exponent take few of their values. Huffman's code makes int4 of Gaussian values a thirteenth
shorter, bf16 a third; zstd's is the fastest, and what stands there again, as the zeros of what has
no gradient, it leaves out. Nothing is lost, so nothing but the lane knows of it: lengths, digests,
and what is sent again are as without. It costs a core 1 to 2 ms for each megabyte, and as much
again where it is received, so the faster the link and the fewer the cores, the more has to be
gained: with two cores int4 gains enough at 250 Mbit/s, fp32 at 500 and bf16 at 1000; with four at
twice that.

A packed body is a sequence of pieces, each ``kind u8 | size - 1 u16 | length - 1 u16 | bytes``, of
which ``size`` bytes of the body are made. Kind 0: as they are. Else its low three bits are the
width of a number, 1, 2 or 4 bytes, the next four bits tell which planes of these numbers
(:mod:`protocols.lanes.planes`) are packed: a frame of zstd (RFC 8878) has them one behind the
other, from the lowest on. Behind it are zeros, where a piece would be shorter than a sixteenth of
``size``, the planes that are not packed, and what is no whole number. So what comes tells something
of what it takes to unpack it. A piece has 4 to 64 KiB of the body, but for the last: short ones
would cost their receiver much more than others do. What has come of a piece tells nothing of the
body's progress, so on a slow lane pieces are small.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence

from protocols.errors import Malformed
from protocols.transport import Drain

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PIECE, SMALLEST = 1 << 16, 1 << 12  # bytes of a body that are packed together
PIECE_S = 0.1  # a piece is to take no longer, where a lane is slow
PLAIN = 0
WIDTHS = (1, 2, 4)  # bytes of a number
# link time that packing a byte has to save: with one core twice what it takes
PRICE_S = 4.5e-9
MANY = 4  # cores; more make it no cheaper, for one thread packs
LEAST, MOST = 0.03, 0.35  # of a body: what has to be gained, and what can be
DENSEST = 16  # bytes out of one, at most: what comes is to tell something of what it takes

_HEAD = struct.Struct(">BHH")
_WIDTH = 3  # bits of a kind
_AGAIN = 15  # pieces that are as the one before, by assumption
_OPTION = zstd.CompressionParameter
_WINDOW = PIECE.bit_length() - 1
_OPTIONS: dict[int, int] = {  # the least search for repetitions that there is
    _OPTION.compression_level: 1,
    _OPTION.window_log: _WINDOW,
    _OPTION.hash_log: 6,
    _OPTION.min_match: 7,
}
_LIMITS: dict[int, int] = {zstd.DecompressionParameter.window_log_max: _WINDOW}


def packer(rate: float, to_peer: float, hosts: int, cores: int) -> Packer | None:
    """For a peer, if it may pay: the node can send at ``rate``, and ``to_peer`` lately to this one.

    Bytes a second, infinite where it is not known. ``hosts`` are sent to at the same time; of the
    node's ``cores`` its trainer uses what is left.
    """
    speed = min(rate, hosts * to_peer)
    if (gain := max(LEAST, PRICE_S / min(cores, MANY) * speed)) >= MOST:
        return None
    return Packer(gain, int(min(PIECE, max(SMALLEST, PIECE_S * speed / hosts))))


class Packer:
    """Packs one body, ``size`` bytes at a time, if ``gain`` of them is saved at least."""

    def __init__(self, gain: float = LEAST, size: int = PIECE) -> None:
        self.gain, self.size = gain, size
        self._kind: int | None = None  # of the pieces that come; None: all are tried
        self._again = 0  # pieces until they are
        self._coder = zstd.ZstdCompressor(options=_OPTIONS)

    def pack(self, piece: bytes) -> bytes:
        """A piece as it goes over the lane; all but the last have :data:`SMALLEST` or more."""
        if not self._again:
            self._kind = None
        self._again = max(0, self._again - 1)
        kind = self._kind if self._kind is not None else self._best(piece)
        packed = self._packed(piece, kind) if kind != PLAIN else piece
        if len(packed) > (1 - self.gain) * len(piece):
            kind, packed = PLAIN, piece
        # where most is left out these are zeros, and tell nothing of the others
        if kind != self._kind and (kind == PLAIN or len(packed) > len(piece) / 4):
            self._kind, self._again = kind, _AGAIN
        return _HEAD.pack(kind, len(piece) - 1, len(packed) - 1) + packed

    def _best(self, piece: bytes) -> int:
        """The kind of the shortest piece."""
        shortest, best = len(piece), PLAIN
        for width in WIDTHS:
            mask, length = 0, len(piece)
            for place, plane in enumerate(_planes(piece, width)):
                saved = len(plane) - len(self._coder.compress(plane, self._coder.FLUSH_FRAME))
                if saved > LEAST * len(plane):
                    mask, length = mask | 1 << place, length - saved
            if length < shortest:
                shortest, best = length, mask << _WIDTH | width
        return best

    def _packed(self, piece: bytes, kind: int) -> bytes:
        width, mask = _width_and_mask(kind)
        coder, planes = self._coder, _planes(piece, width)
        chosen = [plane for place, plane in enumerate(planes) if mask >> place & 1]
        rest = [plane for place, plane in enumerate(planes) if not mask >> place & 1]
        blocks = [coder.compress(plane, coder.FLUSH_BLOCK) for plane in chosen[:-1]]
        blocks.append(coder.compress(chosen[-1], coder.FLUSH_FRAME))
        frame, behind = b"".join(blocks), (*rest, piece[len(piece) - len(piece) % width :])
        least = len(piece) // DENSEST - sum(map(len, behind))
        return b"".join((frame.ljust(least, b"\0"), *behind))


class Unpacker:
    """A drain for a packed body of ``size`` bytes, which go on into ``drain``.

    That may be exchanged for another when nothing is under way.
    """

    def __init__(self, drain: Drain, size: int) -> None:
        self.drain = drain
        self.left = size  # bytes that no drain has got yet
        self.spoiled = False  # by what came: where the body ends nobody knows any more
        self._kind: int | None = None  # of the piece that comes; None: its head does
        self._size = 0  # bytes that it makes
        self._coming = bytearray()
        self._at = 0
        self._held = memoryview(b"")  # unpacked, and there was no room
        self._expect(_HEAD.size if size else 0)

    @property
    def to_come(self) -> int:
        """Bytes that come over the lane for certain; none when the body is over."""
        coming = len(self._coming) - self._at
        return coming or len(self._held) or self.spoiled  # it is not over before that is handed on

    def attach(self, wake: Callable[[], None]) -> None:
        self.drain.attach(wake)

    def room(self) -> memoryview | None:
        if not self._hand_on():
            return None
        return memoryview(self._coming)[self._at :]

    def took(self, count: int) -> None:
        self._at += count
        if self._at < len(self._coming):
            return
        self.spoiled = True
        if self._kind is None:
            self._kind, self._size, length = _head(self._coming, self.left)
            self._expect(length)
        else:
            self._held = memoryview(_unpacked(self._kind, self._coming, self._size))
            self._kind = None
            self._expect(_HEAD.size if self.left > self._size else 0)
        self.spoiled = False
        self._hand_on()

    def _expect(self, count: int) -> None:
        self._coming, self._at = bytearray(count), 0

    def _hand_on(self) -> bool:
        """Give what is held to the drain, as far as it has room; returns whether it has it all."""
        while self._held:
            room = self.drain.room()
            if room is None:
                return False
            count = min(len(room), len(self._held))
            room[:count] = self._held[:count]
            self._held = self._held[count:]
            self.left -= count
            self.drain.took(count)
        return True


def _width_and_mask(kind: int) -> tuple[int, int]:
    return kind & (1 << _WIDTH) - 1, kind >> _WIDTH


def _planes(piece: bytes, width: int) -> Sequence[bytes | memoryview]:
    if width == 1:
        return (piece,)
    from protocols.lanes.planes import planes_of  # numpy, which a seed may do without

    return [plane.data for plane in planes_of(piece, width)]


def _head(data: bytearray, left: int) -> tuple[int, int, int]:
    """Kind, size and length of a piece, of a body that lacks so much. Raises Malformed."""
    kind, size, length = _HEAD.unpack(data)
    size, length = size + 1, length + 1
    if not min(left, SMALLEST) <= size <= left:
        raise Malformed(f"a piece of {size} bytes, of a body that lacks {left}")
    width, mask = _width_and_mask(kind)
    plain = kind == PLAIN and length == size
    packed = width in WIDTHS and 0 < mask < 1 << width and size // DENSEST <= length <= size
    if not (plain or packed):
        raise Malformed(f"a packed body with a piece of kind {kind}, {length} bytes for {size}")
    return kind, size, length


def _unpacked(kind: int, data: bytearray, size: int) -> bytes | bytearray:
    """A piece as it was, of ``size`` bytes. Raises :class:`Malformed`."""
    if kind == PLAIN:
        return data
    width, mask = _width_and_mask(kind)
    count, packed = size // width, mask.bit_count()
    end = max(0, len(data) - (width - packed) * count - size % width)  # of the frame
    whole = memoryview(data)
    frame = _inflated(whole[:end], packed * count)
    if width == 1:
        return frame
    from protocols.lanes.planes import joined

    left = [memoryview(frame), whole[end:]]
    planes = []
    for place in range(width):
        source = 0 if mask >> place & 1 else 1
        planes.append(left[source][:count])
        left[source] = left[source][count:]
    return joined(planes) + left[1]


def _inflated(frame: memoryview, size: int) -> bytes:
    decoder = zstd.ZstdDecompressor(options=_LIMITS)
    try:
        found = decoder.decompress(frame, size + 1)
    except zstd.ZstdError as error:
        raise Malformed(f"a piece that does not unpack: {error}") from error
    if len(found) != size or not decoder.eof or decoder.unused_data.strip(b"\0"):
        raise Malformed(f"a piece that does not end with its {size} bytes")
    return found
