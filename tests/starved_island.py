"""The ``node`` command of an island whose ranks are those of ``starved_rank.py``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from node.__main__ import main

RANK = Path(__file__).with_name("starved_rank.py")

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"  # is called with: -P -m node.trainer.rank …
        python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {RANK} "$@"\n')
        python.chmod(0o755)
        sys.executable = str(python)
        main()
