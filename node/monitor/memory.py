"""What memory this process may still take: of the machine, and of the control groups it is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
RECLAIMED = ("inactive_file", "active_file")  # of a group's use: the kernel drops it when needed


def meminfo(proc: Path = PROC) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines if line.endswith(" kB")]
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}


def available(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes left, the least that machine or control groups (version 2) leave; None: not known.

    A container's limit is its group's: the machine around it may have much more.
    """
    left = list(_left_of_groups(proc, cgroups))
    machine = meminfo(proc).get("MemAvailable")
    return min([*left, *([machine] if machine is not None else [])], default=None)


def _left_of_groups(proc: Path, cgroups: Path) -> Iterator[int]:
    try:
        lines = (proc / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return
    name = next((line[3:] for line in lines if line.startswith("0::")), "/").lstrip("/")
    place = cgroups / name
    for group in (place, *place.parents):
        with suppress(OSError, ValueError):  # no limit ("max"), or none is told
            limit = int((group / "memory.max").read_text())
            used = int((group / "memory.current").read_text())
            told = (line.split() for line in (group / "memory.stat").read_text().splitlines())
            used -= sum(int(value) for field, value in told if field in RECLAIMED)
            yield max(0, limit - used)
        if group == cgroups:
            return
