"""Entry point of ``node``, ``atoll`` and ``python -m node``: ends with the command's status.

Almost everything is imported inside, after Ctrl-C has been taken care of.
"""

from __future__ import annotations

import io
import os
import sys

from node.interrupts import EXIT_INTERRUPTED, end_at_once


def main() -> None:
    """Run the command line and exit: 2 for wrong usage, 70 for a defect, 130 for Ctrl-C."""
    end_at_once()
    open_streams()
    from node.outermost import run

    status = run(sys.argv[1:])
    end_at_once()  # an event loop takes its handler away with it
    if status == EXIT_INTERRUPTED:
        # not through the interpreter: where it has noted the signal it would end by that
        sys.stdout.flush()
        sys.stderr.write("\ninterrupted\n")
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def open_streams() -> None:
    """See to it that writing to the standard streams does not fail, whatever is written.

    Closed ones, as of a node that was detached, become the null device: Python has None for them,
    and their numbers would go to the next files that are opened, so that what a library prints
    would be written into one of those. Signs that the locale's encoding lacks become "?".
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, "w" if number else "r", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # "surrogateescape" is that of the locale C: it takes what a file's name had, and no more
        if isinstance(stream, io.TextIOWrapper) and stream.errors in ("strict", "surrogateescape"):
            stream.reconfigure(errors="replace")


if __name__ == "__main__":
    main()
