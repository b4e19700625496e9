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
import time
from collections import deque
from collections.abc import Callable
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

EXIT_INTERRUPTED = 130  # 128 + SIGINT
Handler = Callable[[int, FrameType | None], Any] | int | None
ECHO_S = 0.25
SCRIPT_GONE = "the training script is gone"  # why a script's node leaves; its SIGHUP says so


def end_at_once() -> None:
    """From here on Ctrl-C ends this process with 130."""
    signal.signal(signal.SIGINT, _end)


def clean_up_first() -> None:
    """From here on Ctrl-C raises KeyboardInterrupt: there is something to clean up."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def clean_up_at_any_end() -> None:
    """Also SIGTERM and a closed terminal's SIGHUP raise it, where much would be left behind."""
    clean_up_first()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as it is under nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)


class held_back:  # noqa: N801 - read as a function
    """Ctrl-C waits until the block is through; a second one does not.

    So do SIGTERM and SIGHUP where this process has a handler of Python's for them: what that
    raises would come at any line, too. What the process does at each is left as it was. Without
    effect where that is none of Python's business, and in other threads than the main one, where
    no signal arrives.
    """

    # no generator: broken off by a second one, it would come to its end somewhere else

    def __init__(self) -> None:
        self._before: dict[int, Handler] = {}  # of those that are held
        self._came: tuple[int, FrameType | None, Handler] | None = None

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                handler = signal.getsignal(number)
                if callable(handler) or (number == signal.SIGINT and handler is not None):
                    self._before[number] = handler
                    signal.signal(number, self._hold)
        except BaseException:  # by one that is not held yet: the block's end does not come
            self._let_go()
            raise

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._let_go()
        came, self._came = self._came, None
        if came is None or kind is KeyboardInterrupt:
            return
        number, frame, handler = came
        if callable(handler):  # raised anew, an event loop would hear of it by its descriptor again
            handler(number, frame)
        else:
            signal.raise_signal(number)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        self._came = number, frame, self._before.get(number)
        self._let_go()

    def _let_go(self) -> None:
        try:
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._before = {}
        finally:
            if self._before:  # by one that was let go first: the others are not to stay held
                self._let_go()


class Echoes:
    """Tells a signal from its echo, the same once more within ECHO_S, which counts for nothing.

    ``timeout``, ``uv run`` and others send on to their child what its whole process group gets too.
    """

    def __init__(self) -> None:
        self._heard: dict[str, float] = {}  # the last of each name that was none

    def echo(self, name: str, now: float) -> bool:
        """Whether the signal ``name`` at ``now`` (seconds, monotonic) is one."""
        if now - self._heard.get(name, -inf) < ECHO_S:
            return True
        self._heard[name] = now
        return False


def catch(loop: AbstractEventLoop, hear: Callable[[str], None]) -> None:
    """Until ``loop`` is closed, ``hear`` gets the name of each SIGINT, SIGTERM and SIGHUP.

    But for echoes, and SIGHUP where it is ignored, as under nohup. The loop may stand still: what
    counts is when they come, and not when it gets to them.
    """
    echoes = Echoes()
    came: deque[tuple[str, float]] = deque()

    def note(number: int, frame: FrameType | None) -> None:
        came.append((signal.Signals(number).name, time.monotonic()))

    def tell() -> None:
        while came:
            name, at = came.popleft()
            if not echoes.echo(name, at):
                hear(name)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
            continue
        loop.add_signal_handler(number, tell)  # wakes the loop up, and goes with it
        signal.signal(number, note)  # in place of the loop's own, which does nothing
        signal.siginterrupt(number, False)  # as the loop had it


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\ninterrupted\n")
    os._exit(EXIT_INTERRUPTED)
