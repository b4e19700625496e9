"""What this machine has left: memory, disk, load, GPUs; read from the system, without torch."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from node.monitor.memory import CGROUPS, PROC, least_room
from node.monitor.views import GpuView, MachineView

KEPT_S = 5.0  # figures are read anew no more often than this


class Machine:
    """Reads the machine's figures; ``directory`` is where this node writes."""

    def __init__(
        self,
        directory: Path,
        gpus: Callable[[], tuple[GpuView, ...]] = tuple,
        *,
        clock: Callable[[], float] = time.monotonic,
        proc: Path = PROC,
        cgroups: Path = CGROUPS,
    ) -> None:
        self._directory, self._gpus, self._clock = directory, gpus, clock
        self._proc, self._cgroups = proc, cgroups
        self._view = MachineView()
        self._read_at = float("-inf")

    def __call__(self) -> MachineView:
        """The figures, at most :data:`KEPT_S` seconds old."""
        if (now := self._clock()) - self._read_at >= KEPT_S:
            self._read_at, self._view = now, self._read()
        return self._view

    def _read(self) -> MachineView:
        room = least_room(self._proc, self._cgroups)
        try:
            disk = shutil.disk_usage(self._directory)
        except OSError:
            disk = None
        return MachineView(
            cores=os.cpu_count() or 0,
            load=os.getloadavg()[0],
            memory_total=room.total if room else None,
            memory_available=room.left if room else None,
            memory_used=self._resident(),
            disk_total=disk.total if disk else None,
            disk_free=disk.free if disk else None,
            gpus=self._gpus(),
        )

    def _resident(self) -> int | None:
        """Resident bytes of this process and its children (the trainer ranks).

        Pages that may be shared count once, as many as one of them has: the vectors are in rank 0
        as well, and libraries in all. The kernel would tell each one's share, but walks over all
        its pages for that.
        """
        me = os.getpid()
        own, shared = 0, 0
        for process in (me, *self._children(me)):
            try:
                words = (self._proc / str(process) / "statm").read_text().split()
            except OSError:  # it has ended meanwhile
                continue
            if len(words) > 2:
                own += int(words[1]) - int(words[2])
                shared = max(shared, int(words[2]))
        return (own + shared) * os.sysconf("SC_PAGE_SIZE") or None

    def _children(self, parent: int) -> list[int]:
        try:
            text = (self._proc / str(parent) / "task" / str(parent) / "children").read_text()
        except OSError:
            return []
        return [int(word) for word in text.split()]
