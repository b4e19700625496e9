"""The ``node`` command of an island whose machine stands still at will, as its hypervisor may have.

It has stood still for as many seconds as the file ``paused`` in its directory says.
"""

from __future__ import annotations

import sys
from pathlib import Path

from node import clock
from node.__main__ import main

if __name__ == "__main__":
    paused = Path(sys.argv[sys.argv.index("--dir") + 1]) / "paused"

    def since() -> float:
        seconds = paused.read_text() if paused.exists() else ""
        return clock.since_boot() - float(seconds or 0.0)

    clock.wall = clock.SteadyClock(since=since)
    main()
