"""How much memory this process has, and the most that it had since some moment."""

from __future__ import annotations

import platform
import resource
from pathlib import Path

LINUX, MACOS = (platform.system() == name for name in ("Linux", "Darwin"))


def resident_bytes() -> int:
    """What this process has in memory now."""
    return _status("VmRSS") if LINUX else peak_bytes()


def forget_peak() -> None:
    """Let :func:`peak_bytes` count from now; without effect where that cannot be done."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_bytes() -> int:
    """The most this process had in memory since :func:`forget_peak`."""
    if LINUX:
        return _status("VmHWM")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if MACOS else most * 1024  # the unit differs


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return 0
