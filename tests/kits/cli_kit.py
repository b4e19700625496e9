"""The command in a process of its own, and what it has imported."""

import subprocess
import sys

HEAVY = ("torch", "hivemind", "aiohttp", "numpy")  # a tenth of a second or more each
_RUN = """
import atexit, sys
sys.argv[0] = "node"
atexit.register(lambda: print("heavy:", *[m for m in %r if m in sys.modules], file=sys.stderr))
from node.__main__ import main
main()
"""


def process(*arguments):
    """Run it; what it says, and which of the heavy modules it has imported."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN % (HEAVY,), *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    heavy = done.stderr.rsplit("heavy:", 1)[1].split()
    return done, heavy
