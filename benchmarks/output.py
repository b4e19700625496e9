"""Where a benchmark writes its figures, and what it says of the machine that it ran on."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


def write(result: object, where: str | Path) -> None:
    """Write ``result`` as JSON into a file; ``-``: to standard output."""
    text = json.dumps(result, indent=1) + "\n"
    if where == "-":
        sys.stdout.write(text)
    else:
        Path(where).write_text(text, encoding="utf-8")


def kept(where: Path) -> dict[str, Any]:
    """What an earlier run has left in a file; empty where there is none."""
    found: dict[str, Any] = {}
    if where.exists():
        found = json.loads(where.read_text(encoding="utf-8"))
    return found


def apart(where: Path, rows: dict[str, dict[str, Any]], *, quick: bool) -> None:
    """End the program where ``rows``, from this file, are quick ones and the others not.

    Or the other way round: side by side nobody could tell them from each other.
    """
    if any(row.get("quick", False) != quick for row in rows.values()):
        sys.exit(f"{where} has results {'without' if quick else 'with'} --quick: give another file")


def machine() -> dict[str, Any]:
    """What a benchmark ran on, when, and with which versions; None: not installed."""
    found: dict[str, Any] = {
        "cores": os.cpu_count(),
        "processor": _processor(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in ("torch", "hivemind", "torchft", "numpy", "aiohttp"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
