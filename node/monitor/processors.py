"""How many cores this process may use: of the machine, and of the control groups it is in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

from node.monitor.memory import CGROUPS, PROC


def usable_cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Those it may run on, or fewer where a control group gives it less time than they have.

    In a container or a batch job that is less than the machine has: with a thread for each of its
    cores they would wait for one another.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, min([cores, *_granted(proc, cgroups)]))


def _granted(proc: Path, cgroups: Path) -> Iterator[int]:
    """What each control group gives, in whole cores; nothing of those without a limit."""
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if not controllers:  # version 2
            root, files = cgroups, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            root, files = cgroups / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        place = root / name.lstrip("/")
        for group in (place, *place.parents):  # in a container its own group is the root
            with suppress(OSError, ValueError):  # no limit ("max"), or none is told
                told = " ".join((group / file).read_text() for file in files)
                quota, period = map(int, told.split())
                if quota > 0 and period > 0:  # version 1 says -1 for none
                    yield ceil(quota / period)
            if group == root:
                break
