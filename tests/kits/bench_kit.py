"""Processes of ``node bench`` that average with each other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def benched(
    members: Sequence[Sequence[str]], folder: Path, *, within: float
) -> list[list[dict[str, Any]]]:
    """The rounds of each member, by its options; they have ``within`` seconds each to end."""
    found, running, peers = [], list[subprocess.Popen[str]](), ""
    try:
        for words in members:
            process = subprocess.Popen(
                [
                    sys.executable, "-m", "node", "bench", *words,
                    "--members", str(len(members)), "--json", "--listen", "127.0.0.1:0",
                    *(("--peers", peers) if peers else ()),
                ],
                stdout=subprocess.PIPE, text=True, cwd=folder,
            )  # fmt: skip
            running.append(process)
            if not peers:
                assert process.stdout is not None
                opened = json.loads(process.stdout.readline())
                peers = f"{opened['address']}/{opened['peer']}"
        for process in running:
            out, _ = process.communicate(timeout=within)
            lines = [json.loads(line) for line in out.splitlines()]
            found.append([line for line in lines if line["event"] == "round"])
    finally:
        for process in running:
            process.kill()
    return found
