"""An island of the demonstration: ``python -m node.demo.island PID start ...``.

It is ``node start``, and leaves in order when the demonstration, process PID, has died: else it
would train on for all of its rounds.
"""

from __future__ import annotations

import signal
import sys

from node import __main__ as node
from node.trainer.rank import die_with
from node.trainer.settings import EXIT_ORPHANED


def main() -> None:
    """Run the command line behind the first argument."""
    if not die_with(int(sys.argv.pop(1)), signal.SIGTERM):
        sys.exit(EXIT_ORPHANED)
    node.main()


if __name__ == "__main__":
    main()
