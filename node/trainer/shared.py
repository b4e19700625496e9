"""Two flat fp32 vectors that daemon and rank 0 both see: ``base`` and ``sent``.

``base`` is the outer state G, written by the daemon. ``sent`` is θ as it was at the last
snapshot, written by the trainer; the daemon corrects the ranges of it that were not merged.

The memory is an anonymous file whose descriptor rank 0 inherits. It has no name, so nothing is
left behind after ``kill -9`` on either side, and it outlives a trainer that is restarted.

Who may write is settled by a record lock on that file. The trainer holds it while it writes a
snapshot; the daemon claims it before it touches either vector and keeps it until the trainer has
applied. So a snapshot never lands on vectors that the daemon is at work on. The kernel gives the
lock back when its holder dies.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protocols.errors import OperatorError

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 4096  # one page: the round of the unanswered snapshot plus one, or zero
FLOAT_BYTES = 4
SHM = Path("/dev/shm")


class SharedVectors:
    """``base`` and ``sent``, fp32 [size] each, in one shared mapping."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map an open file of :func:`file_bytes` bytes; the descriptor belongs to this object."""
        if os.fstat(descriptor).st_size != file_bytes(size):
            raise ValueError(f"shared memory has another length than {size} parameters need")
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, file_bytes(size))
        self._snapshot = np.frombuffer(self._map, np.int64, 1)

    @classmethod
    def create(cls, size: int) -> SharedVectors:
        """New vectors of zeros; raises E401 when the memory for them is not there.

        The pages are reserved at once: without that a full memory file system would show as a
        bus error at some later write.
        """
        if size < 1:
            raise ValueError("size must be at least 1")
        descriptor = _anonymous_file()
        try:
            os.ftruncate(descriptor, file_bytes(size))
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, file_bytes(size))
            return cls(descriptor, size)
        except OSError as error:
            os.close(descriptor)
            raise OperatorError(
                "E401",
                f"no shared memory for {size:,} parameters",
                f"{file_bytes(size) / 2**20:.0f} MiB are needed: {error.strerror}",
                "free memory on this host, or raise the container's memory and shm limits",
            ) from error

    @property
    def base(self) -> npt.NDArray[np.float32]:
        """The outer state, fp32 [size]; a view."""
        return np.frombuffer(self._map, np.float32, self.size, HEADER_BYTES)

    @property
    def sent(self) -> npt.NDArray[np.float32]:
        """The last snapshot as far as it was merged, fp32 [size]; a view."""
        offset = HEADER_BYTES + FLOAT_BYTES * self.size
        return np.frombuffer(self._map, np.float32, self.size, offset)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``base`` and ``sent`` as CPU tensors over the same memory."""
        import torch

        return torch.from_numpy(self.base), torch.from_numpy(self.sent)

    @property
    def snapshot(self) -> int | None:
        """The round for which ``sent`` holds a snapshot that no Apply has answered yet."""
        return int(self._snapshot[0]) - 1 if self._snapshot[0] else None

    @snapshot.setter
    def snapshot(self, round: int | None) -> None:
        self._snapshot[0] = 0 if round is None else round + 1

    def try_claim(self) -> bool:
        """Take the right to write, if the other process does not hold it. Never waits."""
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES
            return False
        return True

    def release(self) -> None:
        """Give the right to write back."""
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptor; the mapping goes when the last view of it does."""
        os.close(self.descriptor)
        self.descriptor = -1


def file_bytes(size: int) -> int:
    """Length of the shared file for ``size`` parameters."""
    return HEADER_BYTES + 2 * FLOAT_BYTES * size


def _anonymous_file() -> int:
    """An unnamed file in memory: memfd on Linux, else an unlinked file of mode 0600."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("atoll-vectors", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile(dir=SHM if SHM.is_dir() else None) as file:
        return os.dup(file.fileno())
