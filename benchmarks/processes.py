"""What Linux tells of a running node: its ranks, what a process has used, what it weighs.

And an end for processes that are not to outlive what started them.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def ended(processes: Sequence[subprocess.Popen[Any]]) -> Iterator[None]:
    """Kill those of ``processes`` that still run after the block, with all that they started.

    Each is in a session of its own. Some may come to the sequence inside the block.
    """
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def ranks(daemon: int) -> list[int]:
    """The process ids of a daemon's trainer."""
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    named = [(int(c), Path(f"/proc/{c}/cmdline").read_bytes()) for c in children]
    return [child for child, line in named if b"node.trainer.rank" in line]


def cpu(process: int) -> float:
    """Processor seconds that a process has used, without its children."""
    words = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def pin(process: int, core: int) -> None:
    """Keep all threads of a process, and those that they start, on one core."""
    for thread in os.listdir(f"/proc/{process}/task"):
        os.sched_setaffinity(int(thread), {core})


def weight(process: int) -> dict[str, float]:
    """Private memory in MiB, open files and threads; empty where it is gone."""
    place = Path(f"/proc/{process}")
    try:
        lines = (place / "smaps_rollup").read_text().splitlines()
        private = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
        files, threads = len(os.listdir(place / "fd")), len(os.listdir(place / "task"))
    except OSError:
        return {}
    return {"mib": round(private / 1024, 2), "files": files, "threads": threads}
