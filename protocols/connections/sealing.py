"""Frames of AES-256-GCM: what keeps the bytes of a lane secret and whole, at the speed of memory.

TLS proves who is at the other end, and carries one key each way (:mod:`protocols.connections.tls`);
whatever follows is sealed under it. TLS's own records hold 16 KB, each of which costs two calls to
read and a copy; frames are sixteen times as long, and are opened straight into the buffer they are
for. The
cipher is that of TLS 1.3 and comes from the same library. A frame::

    length u32, big endian, of what is inside | what is inside, encrypted | tag, 16 bytes

The length is authenticated as well. The nonce is the number of the frame, which nobody sends
(RFC 5116, section 3.2; RFC 8446, section 5.3): a frame that was changed, left out, doubled or
moved does not open. A key is for one direction of one connection. After 2^20 frames, at most
2^34 blocks, the next key is derived from it (RFC 8446, sections 5.5 and 7.2).
"""

from __future__ import annotations

import struct

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

KEY_BYTES = 32
MAX_FRAME_BYTES = 1 << 18  # inside one
FRAMES_A_KEY = 1 << 20
_FIRST_BYTES = 1 << 14  # of a buffer, until more of a frame has come
_LENGTH = struct.Struct(">I")
_TAG_BYTES = 16
OVERHEAD = _LENGTH.size + _TAG_BYTES
_NEXT = b"atoll: the next key of a lane"


class Broken(ConnectionAbortedError):
    """What came is not what the other end sealed: as good as a reset."""


class _Numbered:
    """The cipher of one direction, and the number of the next frame."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._number = 0
        self.cipher = AESGCM(key)

    def nonce(self) -> bytes:
        """The nonce of the next frame; call it once per frame, before ``cipher`` is used."""
        if self._number == FRAMES_A_KEY:
            self._key = HKDFExpand(SHA256(), KEY_BYTES, _NEXT).derive(self._key)
            self._number, self.cipher = 0, AESGCM(self._key)
        self._number += 1
        return (self._number - 1).to_bytes(12, "big")


class Sealer:
    """Makes frames."""

    def __init__(self, key: bytes) -> None:
        self._numbered = _Numbered(key)
        self._buffer = memoryview(bytearray())

    def seal(self, inside: memoryview) -> memoryview:
        """A frame of 1 to :data:`MAX_FRAME_BYTES` bytes; the next call overwrites it."""
        size = len(inside) + OVERHEAD
        if len(self._buffer) < size:
            self._buffer = memoryview(bytearray(size))
        head, rest = self._buffer[: _LENGTH.size], self._buffer[_LENGTH.size : size]
        _LENGTH.pack_into(head, 0, len(inside))
        nonce = self._numbered.nonce()
        self._numbered.cipher.encrypt_into(nonce, inside, head, rest)
        return self._buffer[:size]


class Opener:
    """Opens frames that come in pieces.

    Memory: one buffer of 16 KB, which grows as a longer frame comes: at most to twice of what has
    come, since anybody can announce a length.
    """

    def __init__(self, key: bytes) -> None:
        self._numbered = _Numbered(key)
        self._buffer = memoryview(bytearray(_FIRST_BYTES))
        self._at = self._end = 0  # what came and is not opened yet lies between
        self._left = memoryview(b"")  # opened, and not taken yet
        self._broken = False

    def room(self) -> memoryview:
        """Where the next bytes belong; never empty once :meth:`open` has said that it needs more.

        Raises :class:`Broken` for a frame of a length that is not allowed.
        """
        size = self._frame()
        if self._at == self._end:
            self._at = self._end = 0
        if self._at and self._at + size > len(self._buffer):
            waiting = bytes(self._buffer[self._at : self._end])
            self._at, self._end = 0, len(waiting)
            self._buffer[: self._end] = waiting
        if size > len(self._buffer) == self._end:
            longer = memoryview(bytearray(min(size, 2 * self._end)))
            longer[: self._end] = self._buffer
            self._buffer = longer
        return self._buffer[self._end :]

    def took(self, count: int) -> None:
        """``count`` bytes were written into :meth:`room`."""
        self._end += count

    def open(self, into: memoryview) -> int:
        """Put what is inside the next frame into ``into``, as far as there is room.

        Returns the number of bytes; 0: the frame is not whole yet. Raises :class:`Broken`, now
        and at every later call; then nothing in ``into`` may be used.
        """
        if self._broken:
            raise Broken("a frame before did not open")
        if self._left:
            return self._hand_over(into)
        size = self._frame()
        if self._end - self._at < size:
            return 0
        frame = self._buffer[self._at : self._at + size]
        inside = size - OVERHEAD
        direct = inside <= len(into)
        target = into[:inside] if direct else memoryview(bytearray(inside))
        nonce = self._numbered.nonce()
        head, rest = frame[: _LENGTH.size], frame[_LENGTH.size :]
        try:
            self._numbered.cipher.decrypt_into(nonce, rest, head, target)
        except InvalidTag as error:
            self._broken = True  # the next number may be that of a later frame
            raise Broken("a frame that the other end did not seal") from error
        self._at += size
        if direct:
            return inside
        self._left = target
        return self._hand_over(into)

    def _hand_over(self, into: memoryview) -> int:
        count = min(len(self._left), len(into))
        into[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def _frame(self) -> int:
        """Bytes of the next frame, or of its length field while that has not come."""
        if self._end - self._at < _LENGTH.size:
            return _LENGTH.size
        inside: int = _LENGTH.unpack_from(self._buffer, self._at)[0]
        if not 0 < inside <= MAX_FRAME_BYTES:
            raise Broken(f"a frame of {inside} bytes")
        return inside + OVERHEAD
