"""The newest checkpoint of before a start that takes nothing of it, kept in case it was a slip.

Who starts a node again without ``--resume`` joins anew: its own steps, moments and unmerged work
are in that checkpoint alone, and newer ones would soon have taken its place. One that is the best
as well is there twice, by hard links: as that it stays for longer.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from node.checkpoints.index import made, said_by
from node.checkpoints.names import remove

PREFIX = "before-"  # in front of a checkpoint's name
KEPT_S = 86_400.0  # time to see the warning; peers have merged past its work by then


def spare(path: Path, links: Path | None = None) -> None:
    """Keep the checkpoint at ``path``, or the ``links`` to it, unless one is kept already that is
    not old.

    The first is of a longer time than those of a node that is started again and again.
    """
    forget(path.parent, needed=0)
    target = path.with_name(PREFIX + path.name)
    with suppress(OSError):  # it is gone, or goes as others do
        if path.is_dir() and not spared(path.parent):
            (links or path).rename(target)
            os.utime(target)


def spared(directory: Path) -> list[Path]:
    """What is kept there: one, or none."""
    return list(directory.glob(f"{PREFIX}*"))


def take_back(directory: Path, others: Iterable[Path]) -> None:
    """Give what is kept its name again where no newer one of the ``others`` has come of it."""
    newest = max(map(made, others), default=-math.inf)
    for kept in spared(directory):
        target = kept.with_name(kept.name.removeprefix(PREFIX))
        if not target.exists() and made(kept) > newest:
            kept.rename(target)
        said = said_by(kept)
        if said is not None and said.created == newest and said == said_by(target):  # there twice
            remove(kept)


def forget(directory: Path, needed: int | None = None) -> None:
    """Remove what is kept; with ``needed`` only what is old, or where so many bytes lack space."""
    for path in spared(directory):
        with suppress(OSError):
            # far ahead where the clock has been put back since: then nobody knows how old it is
            fresh = abs(time.time() - path.stat().st_mtime) < KEPT_S
            if needed is None or not fresh or shutil.disk_usage(directory).free < needed:
                remove(path)
