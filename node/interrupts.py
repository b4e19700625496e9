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
from collections.abc import Callable
from types import FrameType
from typing import Any

EXIT_INTERRUPTED = 130  # 128 + SIGINT
Handler = Callable[[int, FrameType | None], Any] | int | None
SCRIPT_GONE = "the training script is gone"  # why a script's node leaves; its SIGHUP says so


def end_at_once() -> None:
    """From here on Ctrl-C ends this process with 130."""
    signal.signal(signal.SIGINT, _end)


def clean_up_first() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: there is something to clean up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def clean_up_at_any_end() -> None:
    """So do SIGTERM, and SIGHUP of a terminal that is closed, for who would leave much behind."""
    clean_up_first()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)


class held_back:  # noqa: N801 - read as a function
    """Ctrl-C waits until the block is through; a second one does not.

    What the process does at Ctrl-C is left as it was. Without effect where that is none of
    Python's business, and in other threads than the main one, where no signal arrives.
    """

    # no generator: broken off by a second one, it would come to its end somewhere else

    def __init__(self) -> None:
        self._before: Handler = None
        self._came = False

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
        if self._before is not None:
            signal.signal(signal.SIGINT, self._hold)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._before is None:
            return
        signal.signal(signal.SIGINT, self._before)
        if self._came and kind is not KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came = True
        signal.signal(signal.SIGINT, self._before)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(EXIT_INTERRUPTED)
