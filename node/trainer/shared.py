"""Two flat fp32 vectors that daemon and rank 0 both see: ``base`` and ``sent``.

``base`` is the outer state G, written by the daemon. ``sent`` is θ as it was at the last
snapshot, written by the trainer; the daemon corrects the ranges of it that were not merged.

The memory is an anonymous file whose descriptor rank 0 inherits. It has no name, so nothing is
left behind after ``kill -9`` on either side, and it outlives a trainer that is restarted.

Who may write is settled by a flag in the file, changed under a record lock on it. The daemon claims
the vectors before it touches either, and has them until the trainer has applied what lies there;
meanwhile the trainer writes no snapshot. A claim in turn waits for a snapshot that is being
written. Nobody holds the lock for longer than that copy, and the kernel gives it back when its
holder dies.

Another flag keeps a snapshot that peers may still take after its trainer has begun anew: no new
one is written until the daemon claims the vectors again.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from protocols.bounds import MAX_FRAGMENTS
from protocols.errors import OperatorError

if TYPE_CHECKING:
    import torch

HEADER_BYTES = 4096  # one page: three int64 flags for each fragment, at its end the beats
# _SNAPSHOT: round of the unanswered snapshot + 1, or 0; _CLAIMED and _KEPT: 0 or 1
_SNAPSHOT, _CLAIMED, _KEPT = 0, 1, 2
FLOAT_BYTES = 4
BEAT_S = 1.0  # between two signs of life
SHM = Path("/dev/shm")


class SharedVectors:
    """``base`` and ``sent``, fp32 [size] each, in one shared mapping."""

    def __init__(self, descriptor: int, size: int) -> None:
        """Map an open file of :func:`file_bytes` bytes; the descriptor belongs to this object.

        It is closed with the object, if not before: in a script islands come and go.
        """
        if os.fstat(descriptor).st_size != file_bytes(size):
            raise ValueError(f"shared memory has another length than {size} parameters need")
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, file_bytes(size))
        self._unlock_pages: Callable[[], object] = bool  # nothing is locked
        self._header = np.frombuffer(self._map, np.int64, 3 * MAX_FRAGMENTS).reshape(-1, 3)
        self._beats = np.frombuffer(self._map, np.int64, 1, HEADER_BYTES - 8)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # at exit the kernel closes all descriptors

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
        """θ at the last snapshot, fp32 [size]; a view.

        At a merge the daemon sets what was not merged back to the old ``base``.
        """
        offset = HEADER_BYTES + FLOAT_BYTES * self.size
        return np.frombuffer(self._map, np.float32, self.size, offset)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """``base`` and ``sent`` as CPU tensors over the same memory."""
        import torch

        return torch.from_numpy(self.base), torch.from_numpy(self.sent)

    def lock_pages(self, device: torch.device) -> None:
        """Make copies from and to a CUDA device several times as fast; for another, nothing.

        A copy from memory that the kernel may move goes by way of a buffer of the driver's. Where
        the driver locks no pages (a limit, a kernel without support) copies stay slow.
        """
        if device.type != "cuda":
            return
        import torch

        address, cudart = self.base.__array_interface__["data"][0], torch.cuda.cudart()
        if int(cudart.cudaHostRegister(address, 2 * FLOAT_BYTES * self.size, 0)):
            with suppress(RuntimeError):  # CUDA tells of a refusal again, at the next kernel
                torch.zeros((), device="cuda")
            return
        # before the memory is given back, which may be as soon as this object has gone
        unlock = weakref.finalize(self, cudart.cudaHostUnregister, address)
        unlock.atexit = False  # CUDA may have gone first
        self._unlock_pages = unlock

    def snapshot(self, fragment: int = 0) -> int | None:
        """The round for which ``sent`` holds a snapshot that nothing has answered yet."""
        flag = int(self._header[fragment, _SNAPSHOT])
        return flag - 1 if flag else None

    # --- the daemon's side --------------------------------------------------------------------

    def try_claim(self, fragment: int = 0) -> bool:
        """Take a fragment of both vectors; false while the trainer writes a snapshot."""
        if not self._try_lock():
            return False
        self._header[fragment, _CLAIMED] = 1
        self._header[fragment, _KEPT] = 0
        self._unlock()
        return True

    def keep(self, fragment: int, *, on: bool) -> None:
        """Before Begin or Apply: set whether ``sent`` is still read, so takes no snapshot."""
        self._header[fragment, _KEPT] = on

    def clear(self, fragment: int | None = None) -> None:
        """End claim and snapshot alike: the trainer has read what it was given, or is no more.

        Without ``fragment``: of all.
        """
        self._header[slice(None) if fragment is None else fragment, :_KEPT] = 0

    def beat(self) -> None:
        """Show the other side that this process lives."""
        self._beats += 1

    async def keep_beating(self) -> None:
        """Show it as long as this process's event loop runs, until cancelled."""
        while True:
            self.beat()
            await asyncio.sleep(BEAT_S)

    # --- the trainer's side -------------------------------------------------------------------

    @property
    def beats(self) -> int:
        """How often the daemon has shown that it lives."""
        return int(self._beats[0])

    def try_snapshot(self, fragment: int = 0) -> bool:
        """Begin to write ``sent``; false when the daemon has the fragment, or is claiming one.

        False as well where an earlier snapshot is still to be sent.
        """
        return not self._header[fragment, _KEPT] and self.try_read(fragment)

    def try_read(self, fragment: int = 0) -> bool:
        """Begin to read ``base``; false when the daemon has the fragment, or is claiming one."""
        if not self._try_lock():
            return False
        if self._header[fragment, _CLAIMED]:
            self._unlock()
            return False
        return True

    def end_snapshot(self, round: int, fragment: int = 0) -> None:
        """The fragment of ``sent`` is complete."""
        self._header[fragment, _SNAPSHOT] = round + 1
        self._unlock()

    def end_reading(self) -> None:
        """After :meth:`try_read`."""
        self._unlock()

    def _try_lock(self) -> bool:
        try:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):  # POSIX allows EAGAIN and EACCES
            return False
        return True

    def _unlock(self) -> None:
        fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the descriptor; the mapping goes when the last view of it does."""
        self._unlock_pages()
        self._close()
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
