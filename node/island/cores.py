"""CPU threads of this host's trainer ranks, and a hint where others compute on the same cores."""

from __future__ import annotations

import os
from pathlib import Path

from node.directories import noted
from node.headway import counted
from node.monitor.processors import usable_cores
from node.statedir import StateDir

CORES = usable_cores()
MACHINE = os.cpu_count() or 1  # cores that the load is of


def threads_of(given: int, ranks: int) -> int:
    """Threads a rank: ``given`` (--threads), else OMP_NUM_THREADS, else its part of the cores.

    Of those alone that this process may use: its affinity and its control groups count.
    """
    return given or openmp_threads() or max(1, CORES // max(1, ranks))


def openmp_threads() -> int:
    """OMP_NUM_THREADS as the operator, or who launched this, has set it; 0 where nobody has."""
    outermost = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # of nested levels
    return int(outermost) if outermost.isascii() and outermost.isdigit() else 0


def contention(given: int, home: Path) -> str:
    """Who else computes on the cores that this node is about to take, as a hint; empty: nobody.

    ``given``: --threads. ``home`` is this node's own directory.
    """
    if given or openmp_threads():
        return ""
    holders = [StateDir(place).held_by() for place in noted() if place != home]
    others = sum(holder is not None and holder.here for holder in holders)
    load = _load()
    if others:
        why = f"{counted(others, 'other node')} of yours on this machine"
    elif load > MACHINE:
        why = f"this machine is busy (load {load:.1f})"
    else:
        return ""
    return (
        f"{why}, and this one takes all {CORES} cores: threads then wait for each other; share the "
        "cores out with --threads"
    )


def _load() -> float:
    """Processes that want a core, in the mean of the last minute; 0 where nobody tells."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0
