"""Memory for parts that is used again round after round.

Fresh memory from the system costs a page fault every four kilobytes, which takes longer than
receiving into it. A block returns to the pool by itself when the last tensor or view of it is gone,
so nobody has to know who still streams a part.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import weakref
from collections import deque

import torch

from protocols.codecs import RangeCodec

SMALL = 1024 * 1024  # bytes; less is left to the usual allocator, which keeps it
WASTE = 1.25  # a block may be this many times as large as what it is taken for, plus SMALL


class Buffers:
    """A pool of blocks. Never has more memory than was in use at once at some time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []  # longest unused first
        self._returned: deque[mmap.mmap] = deque()  # by finalizers, which may run anywhere
        self._mapped = 0  # bytes taken from the system, in use or free
        self._most = 0  # bytes that were in use at once

    def take(self, size: int) -> torch.Tensor:
        """A uint8 tensor [size] with anything in it."""
        if size < SMALL:
            return torch.empty(size, dtype=torch.uint8)
        block = self._block(size)
        view = (ctypes.c_uint8 * size).from_buffer(block)
        weakref.finalize(view, self._returned.append, block).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8)

    def _block(self, size: int) -> mmap.mmap:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            most = SMALL + WASTE * size
            fitting = [block for block in self._free if size <= len(block) <= most]
            if fitting:
                block = min(fitting, key=len)
                self._free.remove(block)
                return block
            capacity = -(-size // SMALL) * SMALL
            in_use = self._mapped - sum(map(len, self._free))
            self._most = max(self._most, in_use + capacity)
            while self._free and self._mapped + capacity > self._most:
                self._mapped -= len(self._free.pop(0))
            self._mapped += capacity
            return mmap.mmap(-1, capacity, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


buffers = Buffers()  # of this process


class Whole:
    """Memory for the encoded parts of one vector of ``size`` elements.

    With codec fp32 they lie in one block, each where it belongs, so that in the end whoever wants
    the vector as a whole has it without a copy (:mod:`node.bench.noise`). A range that overlaps one
    taken before, as another owner's after a takeover does, gets memory of its own, and so does
    every other codec's. The block stays for as long as a part of it.
    """

    def __init__(self, size: int) -> None:
        self._size = 4 * size
        self._block: torch.Tensor | None = None
        self._taken: list[tuple[int, int]] = []

    def take(self, codec: RangeCodec, start: int, stop: int) -> torch.Tensor:
        """A uint8 tensor for the elements [start, stop) encoded, with anything in it."""
        taken = any(start < end and begin < stop for begin, end in self._taken)
        if codec.name != "fp32" or taken:
            return buffers.take(codec.encoded_size(start, stop))
        block = buffers.take(self._size) if self._block is None else self._block
        self._taken.append((start, stop))
        complete = 4 * sum(end - begin for begin, end in self._taken) == self._size
        self._block = None if complete else block  # from then on the parts alone keep it
        return block[4 * start : 4 * stop]
