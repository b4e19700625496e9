"""The ``node`` command of an island whose ranks are those of the program in ``RANK_PROGRAM``."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from node.__main__ import main

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder) / "python"  # is called with: -P -m node.trainer.rank …
        rank = os.environ["RANK_PROGRAM"]
        python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {rank} "$@"\n')
        python.chmod(0o755)
        sys.executable = str(python)
        main()
