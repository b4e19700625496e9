"""What Ctrl-C does: where a command has nothing to clean up it ends at once, with one line.

Python's own way, an exception at any line, does not do for the second in which modules are
imported: raised inside ``exec`` (which dataclasses use) it makes the interpreter die by the signal
even where it is caught, and raised inside a callback of the garbage collector or of the import
lock it is printed and lost.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

EXIT_INTERRUPTED = 130  # 128 + SIGINT
SCRIPT_GONE = "the training script is gone"  # why a script's node leaves; its SIGHUP says so


def end_at_once() -> None:
    """From here on Ctrl-C ends this process with 130."""
    signal.signal(signal.SIGINT, _end)


def clean_up_first() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: there is something to clean up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def held_back() -> Iterator[None]:
    """Ctrl-C waits until the block is through; a second one does not.

    What the process does at Ctrl-C is left as it was. Without effect where that is none of
    Python's business, and in other threads than the main one, where no signal arrives.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(EXIT_INTERRUPTED)
