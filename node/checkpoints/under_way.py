"""What of a checkpoint is under way: how far it is written or copied, and the room beside it."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from node.checkpoints.index import bytes_in
from node.checkpoints.names import ASIDE_PREFIX, DRAFT_PREFIX, OLD_PREFIX


@dataclass(frozen=True)
class UnderWay:
    """How far a checkpoint is that is being written, or copied to a second place."""

    size: int  # bytes of its files so far
    moved: float  # when the newest of its folders was changed, or said to be (:func:`touch`)


def under_way(directory: Path) -> UnderWay | None:
    """What is being written or copied there; None where nothing is."""
    found = list(directory.glob(f"{DRAFT_PREFIX}*"))
    size, moved = 0, 0.0
    for draft in found:
        with suppress(OSError):  # renamed or gone meanwhile
            moved = max(moved, draft.stat().st_mtime)
            size += bytes_in(draft)
    return UnderWay(size, moved) if found else None


def room_beside(directory: Path, checkpoint_bytes: int) -> int:
    """Bytes of the disk that are left beside a checkpoint that is to be written, or just is."""
    written = 0
    for draft in directory.glob(f"{DRAFT_PREFIX}*"):
        if not draft.name.startswith((OLD_PREFIX, ASIDE_PREFIX)):  # names of what was there before
            with suppress(OSError):  # renamed or gone meanwhile
                written += bytes_in(draft)
    try:
        free = shutil.disk_usage(directory).free
    except OSError:
        return 0
    return free - max(0, checkpoint_bytes - written)


def forget_drafts(directory: Path) -> None:
    """Remove what this process was writing: it ends at once. Nothing is raised."""
    for draft in directory.glob(f"{DRAFT_PREFIX}{os.getpid()}-*"):
        shutil.rmtree(draft, ignore_errors=True)


def touch(aside: Path) -> None:
    """Say of what :meth:`CheckpointStore.aside` has made that its copy has come further."""
    if aside.parent.name.startswith(ASIDE_PREFIX):
        with suppress(OSError):
            os.utime(aside.parent)
