"""The outer state as bytes: its chunks, their hashes, and the digest over them.

The bytes are ``base`` followed by the vectors of the outer optimizer, in the order in which it
names them, little-endian float32. A chunk may span the end of one and the beginning of another.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from blake3 import blake3

from protocols.errors import LocalProtocolError

if TYPE_CHECKING:
    import torch

HASH_BYTES = 32
MIN_CHUNK = 64 * 1024
MAX_CHUNK = 4 * 1024 * 1024  # unless there would be more of them than
MOST_CHUNKS = 65_536  # an offer has room for the hashes of (protocols.messages.StateOffer)
_WANTED_CHUNKS = 64  # enough for several sources to share even a small state
_DOMAIN = b"atoll state\x00"


def chunk_size(length: int) -> int:
    """Bytes of a chunk of a state of ``length`` bytes: a power of two, 64 KiB to 4 MiB.

    Beyond 256 GiB more, since an offer has room for so many hashes.
    """
    size = MIN_CHUNK
    while size * (_WANTED_CHUNKS if size < MAX_CHUNK else MOST_CHUNKS) < length:
        size *= 2
    return size


def count_chunks(length: int, chunk: int) -> int:
    """Chunks of a state, the shorter last one included."""
    return -(-length // chunk)


def root(length: int, chunk: int, hashes: bytes) -> bytes:
    """The digest of a state whose chunks have these hashes."""
    shape = length.to_bytes(8, "big") + chunk.to_bytes(8, "big")
    return blake3(_DOMAIN + shape + hashes).digest()


class StateBytes:
    """Float32 vectors seen as one row of bytes, without a copy."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        if not vectors:
            raise LocalProtocolError("the outer state has no vectors")
        self._views = [_view(vector) for vector in vectors]
        self._starts = [0, *accumulate(len(view) for view in self._views)]
        self.length = self._starts[-1]

    def pieces(self, start: int, stop: int) -> list[memoryview]:
        """The bytes [start, stop) as writable views, one of each vector that they touch."""
        return [
            view[max(start - at, 0) : stop - at]
            for at, view in zip(self._starts, self._views, strict=False)
            if max(start, at) < min(stop, at + len(view))
        ]

    def write(self, start: int, data: memoryview) -> None:
        """Put ``data`` at byte ``start``."""
        at = 0
        for view in self.pieces(start, start + len(data)):
            view[:] = data[at : at + len(view)]
            at += len(view)


def state_digest(vectors: Sequence[torch.Tensor], chunk: int | None = None) -> tuple[bytes, bytes]:
    """The digest of a state (32 bytes) and the hashes of its chunks (32 bytes each).

    ``vectors``, base first, are contiguous float32 on the CPU; ``chunk`` is in bytes, by default
    :func:`chunk_size`. One thread, several GB/s, without the GIL.
    """
    state = StateBytes(vectors)
    size = chunk or chunk_size(state.length)
    hashes = bytearray()
    for start in range(0, state.length, size):
        hasher = blake3()
        for view in state.pieces(start, min(start + size, state.length)):
            hasher.update(view)
        hashes += hasher.digest()
    return root(state.length, size, bytes(hashes)), bytes(hashes)


def _view(vector: torch.Tensor) -> memoryview:
    if str(vector.dtype) != "torch.float32" or vector.dim() != 1 or not vector.is_contiguous():
        raise LocalProtocolError("the outer state must be contiguous float32 vectors")
    if not len(vector):
        raise LocalProtocolError("the outer state is empty")
    return vector.numpy().data.cast("B")
