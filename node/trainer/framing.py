"""Messages between processes of one island as frames: a length of four bytes (big endian), then it.

Trainer and daemon (:mod:`node.trainer.channel`) and the hosts of an island (:mod:`node.hosts.wire`)
speak so.
"""

from __future__ import annotations

import struct

from protocols.errors import Malformed
from protocols.wire import Message

MAX_FRAME = 64 * 1024
READ_BYTES = 64 * 1024
_LENGTH = struct.Struct(">I")


def frame(message: Message) -> bytes:
    """A message with its length in front."""
    data = message.encode()
    return _LENGTH.pack(len(data)) + data


class Unframer:
    """Cuts a stream into frames, without any IO; holds at most one incomplete frame.

    :attr:`limit` is the longest frame that is taken.
    """

    def __init__(self) -> None:
        self.limit = MAX_FRAME
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Frames completed by ``data``; raises :class:`Malformed` for a length out of bounds."""
        self._buffer += data
        frames = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if not 0 < length <= self.limit:
                raise Malformed(f"frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[_LENGTH.size : end]))
            del self._buffer[:end]
        return frames
