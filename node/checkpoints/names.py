"""What checkpoints and their folders are called, and how one that is not wanted any more goes."""

from __future__ import annotations

import re
import shutil
from contextlib import suppress
from pathlib import Path

INDEX = "checkpoint.json"
DRAFT_PREFIX = ".draft-"
OLD_PREFIX = f"{DRAFT_PREFIX}old-"  # in front of the name of one that a newer is to replace
ASIDE_PREFIX = f"{DRAFT_PREFIX}aside-"  # of one that is copied to a second place, or removed
FETCHED_PREFIX = ".fetched-"  # of what is fetched to begin with, over restarts
_NAME = re.compile(r"ckpt-(\d{8,})")


def name_of(round_: int) -> str:
    """The name of the checkpoint of a round."""
    return f"ckpt-{round_:08d}"


def beside(name: str) -> str:
    """A name for another one of the same round: with one more zero."""
    return f"ckpt-0{name.removeprefix('ckpt-')}"


def round_of(name: str) -> int | None:
    """The round of the checkpoint of that name; None: it is no checkpoint's."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def remove(path: Path) -> None:
    """Remove a folder with a checkpoint, and never leave a part of one under its name.

    What a kill has left of one would have no index, and count as made just then; under this name
    the next start removes it.
    """
    with suppress(OSError):
        path = path.rename(path.with_name(f"{ASIDE_PREFIX}{path.name}"))
    shutil.rmtree(path, ignore_errors=True)
