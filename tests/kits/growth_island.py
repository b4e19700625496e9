"""A node that writes down every now and then what it holds: for tests of many rounds."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gossip.chain.chain import Chain
from node.monitor import event_log

EVERY = 20  # rounds
EVENTS = 256  # kept in memory: as many as come before the first look, or they would be what grows


def measured(chain: Chain) -> dict[str, int]:
    """What may grow, of this process and of a chain of rounds."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "round": chain.replica.place.round,
        "rss": pages * os.sysconf("SC_PAGE_SIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        "tasks": len(asyncio.all_tasks()),
        "objects": len(gc.get_objects()),
        "ledger": len(chain.ledger._rounds),
        "ledger_bytes": chain.ledger._bytes(),
    }


def watch(path: Path) -> None:
    """Append a line to ``path`` every :data:`EVERY` rounds of every chain."""
    advance: Callable[..., Any] = Chain._advance

    async def watched(self: Chain, *arguments: Any) -> None:
        await advance(self, *arguments)
        if self.replica.place.round % EVERY == 0:
            with path.open("a") as file:
                file.write(json.dumps(measured(self)) + "\n")

    Chain._advance = watched  # type: ignore[method-assign]


if __name__ == "__main__":
    from node.__main__ import main

    event_log.KEPT_IN_MEMORY = EVENTS
    watch(Path(sys.argv[sys.argv.index("--dir") + 1]) / "growth.jsonl")
    main()
