"""Files that are written whole or not at all, whenever their writer is killed.

What is being written is locked by its writer, so that drafts of one that was killed are known, and
removed by the next that writes in the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

DRAFT = ".draft-"
PRIVATE, READABLE = 0o600, 0o666  # modes of files; the umask takes from the latter


@contextlib.contextmanager
def replacing(path: Path, *, mode: int = PRIVATE, durable: bool = True) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well, and vanishes otherwise.

    ``durable``: so that not even a power loss leaves the name and not the bytes.
    """
    sweep(path.parent)
    handle, name = new_draft(path.parent, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
            os.replace(name, path)  # while it is locked: or a sweep could remove it
    except BaseException:  # also Ctrl-C: leave no half-written file behind
        with contextlib.suppress(OSError):  # the folder has gone: what went wrong is the other one
            os.unlink(name)
        raise


def new_draft(folder: Path, mode: int = PRIVATE) -> tuple[int, str]:
    """A new empty file, locked as long as it is open: handle and name."""
    while True:
        name = str(folder / f"{DRAFT}{secrets.token_hex(8)}")
        handle = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
        with contextlib.suppress(OSError):  # without locks nothing is swept either
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.path.exists(name):
            return handle, name
        os.close(handle)  # swept away before it was locked


def sweep(folder: Path) -> None:
    """Remove the drafts that nobody writes any more: those of processes that were killed."""
    for draft in folder.glob(f"{DRAFT}*"):
        with contextlib.suppress(OSError), draft.open("r+b") as file:  # still written, or gone
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            draft.unlink()


def user_home() -> Path:
    """This user's home directory. Raises OSError where there is none.

    In a container, say, with a user that the system does not know.
    """
    try:
        return Path.home()
    except RuntimeError as error:
        raise FileNotFoundError(str(error)) from error


def sync(path: Path) -> None:
    """Have the bytes of a file, or the names in a folder, on the disk on return. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
