"""Bodies packed for a slow link: an entropy code around what the codecs leave.

Quantized values are far from uniform: small ones are frequent, and of a float the sign and the
exponent take few of their values. Huffman's code alone, without a search for repetitions that are
not there, makes int4 of Gaussian values a thirteenth shorter, bf16 a third. Nothing is lost, so
nothing but the lane knows of it: lengths, digests, and what is sent again are as without. It costs
a core 8 ms for each megabyte sent and 4 for each received, so the faster the link and the fewer the
cores, the more has to be gained: with two cores most codecs gain enough at 20 Mbit/s, and bf16 at
100; with eight int4 does at 100, and bf16 up to 450.

A packed body is a sequence of pieces, each ``kind u8 | length u24 | bytes``: kind 0 as they are,
else deflated (RFC 1951) after the bytes were sorted by their place in a number of ``kind`` bytes,
so that exponents get a code of their own. A piece holds 1 to 64 KiB of the body, but for the last,
and at most eight times its own length, which is as far as Huffman's code goes: neither many nor
few bytes cost their receiver much more than others do. What has come of a piece tells nothing of
the body's progress, so on a slow lane pieces are small.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

from protocols.errors import Malformed
from protocols.transport import Drain

PIECE, SMALLEST = 1 << 16, 1 << 10  # bytes of a body that are packed together
SMALL = 1 << 12  # the same, where a lane is slow:
PIECE_S = 0.1  # a piece is to take no longer
PLAIN = 0
STRIDES = (1, 2, 4)  # bytes of a number: the kinds of packed pieces
# link time that packing a byte has to save: with one core four times what it takes
PRICE_S = 48e-9
MANY = 8  # cores; more make it no cheaper, for one thread packs
LEAST, MOST = 0.03, 0.35  # of a body: what has to be gained, and what can be

_HEAD = struct.Struct(">I")
_LENGTH = (1 << 24) - 1
_AGAIN = 15  # pieces that are as the one before, by assumption
_DENSEST = 8  # bytes out of one: Huffman's shortest code has one bit
_MEMORY = 8  # of zlib: a code for each 16 KiB, and for each place in a number its own


def packer(rate: float, to_peer: float, hosts: int, cores: int) -> Packer | None:
    """For a peer, if it may pay: the node can send at ``rate``, and ``to_peer`` lately to this one.

    Bytes a second, infinite where it is not known. ``hosts`` are sent to at the same time; of the
    node's ``cores`` its trainer uses what is left.
    """
    speed = min(rate, hosts * to_peer)
    if (gain := max(LEAST, PRICE_S / min(cores, MANY) * speed)) >= MOST:
        return None
    return Packer(gain, int(min(PIECE, max(SMALL, PIECE_S * speed / hosts))))


class Packer:
    """Packs one body, ``size`` bytes at a time, if ``gain`` of them is saved at least."""

    def __init__(self, gain: float = LEAST, size: int = PIECE) -> None:
        self.gain, self.size = gain, size
        self._kinds: tuple[int, ...] = STRIDES  # that are tried
        self._again = 0  # pieces until all are

    def pack(self, piece: bytes) -> bytes:
        """A piece as it goes over the lane; all but the last have :data:`SMALLEST` or more."""
        if not self._again:
            self._kinds = STRIDES
        self._again = max(0, self._again - 1)
        found = [(_deflated(piece, kind), kind) for kind in self._kinds]
        packed, kind = min(found, key=_length, default=(piece, PLAIN))
        if len(packed) > (1 - self.gain) * len(piece):
            self._keep()
            return _framed(PLAIN, piece)
        if len(packed) > len(piece) / 4:  # else these are zeros, and tell nothing of the others
            self._keep(kind)
        return _framed(kind, packed)

    def _keep(self, *kinds: int) -> None:
        if self._kinds != kinds:
            self._kinds, self._again = kinds, _AGAIN


class Unpacker:
    """A drain for a packed body of ``size`` bytes, which go on into ``drain``.

    That may be exchanged for another when nothing is under way.
    """

    def __init__(self, drain: Drain, size: int) -> None:
        self.drain = drain
        self.left = size  # bytes that no drain has got yet
        self.spoiled = False  # by what came: where the body ends nobody knows any more
        self._kind: int | None = None  # of the piece that comes; None: its head does
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
            self._kind, length = _head(self._coming)
            self._expect(length)
        else:
            most = min(self.left, PIECE)
            found = _unpacked(self._kind, self._coming, most)
            if len(found) < min(self.left, SMALLEST):
                raise Malformed(f"{len(found)} bytes of a body in a piece of their own")
            self._held = memoryview(found)
            self._kind = None
            self._expect(_HEAD.size if self.left > len(self._held) else 0)
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


def _length(found: tuple[bytes, int]) -> int:
    return len(found[0])


def _framed(kind: int, data: bytes) -> bytes:
    return b"".join((_HEAD.pack(kind << 24 | len(data)), data))


def _head(data: bytearray) -> tuple[int, int]:
    """Kind and length of a piece. Raises :class:`Malformed`."""
    (word,) = _HEAD.unpack(data)
    kind, length = word >> 24, word & _LENGTH
    if (kind != PLAIN and kind not in STRIDES) or not 0 < length <= PIECE:
        raise Malformed(f"a packed body with a piece of kind {kind} and {length} bytes")
    return kind, length


def _deflated(piece: bytes, stride: int) -> bytes:
    coder = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS, _MEMORY, zlib.Z_HUFFMAN_ONLY)
    packed = []
    for place in range(stride):
        packed += [coder.compress(piece[place::stride]), coder.flush(zlib.Z_BLOCK)]
    return b"".join((*packed, coder.flush()))


def _unpacked(kind: int, data: bytearray, most: int) -> bytes | bytearray:
    """A piece as it was, ``most`` bytes at most. Raises :class:`Malformed`."""
    if kind == PLAIN:
        found: bytes | bytearray = data
    else:
        decoder = zlib.decompressobj(-zlib.MAX_WBITS)
        most = min(most, _DENSEST * len(data))
        try:
            found = decoder.decompress(data, most + 1)
        except zlib.error as error:
            raise Malformed(f"a piece that does not unpack: {error}") from error
        if not decoder.eof or decoder.unused_data:
            raise Malformed("a piece that does not end with its code")
    if not 0 < len(found) <= most:
        raise Malformed(f"a piece of {len(found)} bytes where 1 to {most} may come")
    return found if kind <= 1 else _in_order(found, kind)


def _in_order(planes: bytes | bytearray, stride: int) -> bytearray:
    """The reverse of sorting bytes by their place in a number of ``stride`` bytes."""
    numbers = bytearray(len(planes))
    at = 0
    for place in range(stride):
        count = len(range(place, len(planes), stride))
        numbers[place::stride] = planes[at : at + count]
        at += count
    return numbers
