"""What memory this process may still take: of the machine, and of the control groups it is in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
RECLAIMED = ("inactive_file", "active_file")  # of a group's use: the kernel drops it when needed


class Room(NamedTuple):
    """Memory of the machine or of a control group, in bytes."""

    left: int
    total: int


def meminfo(proc: Path) -> dict[str, int]:
    """``/proc/meminfo`` in bytes; empty where there is none."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = [line.split() for line in lines if line.endswith(" kB")]
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields}


def available(proc: Path = PROC, cgroups: Path = CGROUPS) -> int | None:
    """Bytes left, as :func:`least_room` says; None: not known."""
    room = least_room(proc, cgroups)
    return None if room is None else room.left


def least_room(proc: Path = PROC, cgroups: Path = CGROUPS) -> Room | None:
    """Of the machine or that control group (version 2) which leaves least; None: not known.

    A container's limit is its group's: the machine around it may have much more.
    """
    rooms = list(_of_groups(proc, cgroups))
    machine = meminfo(proc)
    if "MemAvailable" in machine and "MemTotal" in machine:
        rooms.append(Room(machine["MemAvailable"], machine["MemTotal"]))
    return min(rooms, default=None)


def _of_groups(proc: Path, cgroups: Path) -> Iterator[Room]:
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
            yield Room(max(0, limit - used), limit)
        if group == cgroups:
            return
