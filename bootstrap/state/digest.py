"""The outer state as bytes: its chunks, their hashes, and the digest over them.

The bytes are ``base`` followed by the vectors of the outer optimizer, in the order in which it
names them, little-endian float32. A chunk may span the end of one and the beginning of another.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, count
from typing import TYPE_CHECKING

from blake3 import blake3

from protocols.errors import LocalProtocolError

if TYPE_CHECKING:
    import torch

HASH_BYTES = 32
MIN_CHUNK = 64 * 1024
MAX_CHUNK = 4 * 1024 * 1024  # larger where there would be more chunks than
MOST_CHUNKS = 65_536  # this, whose hashes an offer has room for (protocols.messages.StateOffer)
THREADED_BYTES = 64 * 1024 * 1024  # a smaller state is hashed sooner than threads start
MAX_THREADS = 8  # more would take memory bandwidth from training
CORES = os.cpu_count() or 1
_WANTED_CHUNKS = 64  # enough for several sources to share even a small state
_DOMAIN = b"atoll state\x00"


def chunk_size(length: int) -> int:
    """Bytes of a chunk of a state of ``length`` bytes: a power of two, 64 KiB to 4 MiB.

    Beyond 256 GiB larger, since an offer has room for :data:`MOST_CHUNKS` hashes.
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


def state_digest(
    vectors: Sequence[torch.Tensor], chunk: int | None = None, threads: int | None = None
) -> tuple[bytes, bytes]:
    """The digest of a state (32 bytes) and the hashes of its chunks (32 bytes each).

    ``vectors``, base first, are contiguous float32 on the CPU; ``chunk`` is in bytes, by default
    :func:`chunk_size`. A large state is hashed by several threads (``threads``: how many), each at
    several GB/s and without the GIL.
    """
    state = StateBytes(vectors)
    return _hashed(state, chunk, threads, state.pieces)


def copied(
    vectors: Sequence[torch.Tensor], chunk: int | None = None, threads: int | None = None
) -> tuple[list[torch.Tensor], bytes, bytes]:
    """Copies of the vectors, and their :func:`state_digest`, in one pass over memory."""
    import numpy as np

    state, copies = StateBytes(vectors), [vector.new_empty(vector.shape) for vector in vectors]
    there = StateBytes(copies)

    def copy(start: int, stop: int) -> list[memoryview]:
        pieces = there.pieces(start, stop)
        for piece, original in zip(pieces, state.pieces(start, stop), strict=True):
            # without the GIL, unlike an assignment to a memoryview
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(original, np.uint8))
        return pieces

    return copies, *_hashed(state, chunk, threads, copy)


def _hashed(
    state: StateBytes,
    chunk: int | None,
    threads: int | None,
    read: Callable[[int, int], list[memoryview]],
) -> tuple[bytes, bytes]:
    """Digest and hashes of the bytes that ``read(start, stop)`` gives, called once a chunk.

    Each thread takes the next chunk when it is free: where others compute on the same cores, a
    thread that has to wait holds up its own chunk alone.
    """
    size = chunk or chunk_size(state.length)
    chunks = count_chunks(state.length, size)
    hashes, following = bytearray(HASH_BYTES * chunks), count()

    def work() -> None:
        while (index := next(following)) < chunks:
            hasher = blake3()
            for view in read(index * size, min((index + 1) * size, state.length)):
                hasher.update(view)
            hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)] = hasher.digest()

    if threads is None:
        threads = min(MAX_THREADS, CORES) if state.length >= THREADED_BYTES else 1
    if threads == 1:
        work()
    else:
        with ThreadPoolExecutor(threads, thread_name_prefix="atoll-hash") as pool:
            for task in [pool.submit(work) for _ in range(threads)]:
                task.result()
    return root(state.length, size, bytes(hashes)), bytes(hashes)


def _view(vector: torch.Tensor) -> memoryview:
    if str(vector.dtype) != "torch.float32" or vector.dim() != 1 or not vector.is_contiguous():
        raise LocalProtocolError("the outer state must be contiguous float32 vectors")
    if not len(vector):
        raise LocalProtocolError("the outer state is empty")
    return vector.numpy().data.cast("B")
