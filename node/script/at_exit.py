"""The islands of this process, which leave in order when Python ends and the script has not left.

Also where a thread of its own trains: Python calls what is to be called at its end once the main
thread has nothing more to do, and waits for other threads only then.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from weakref import WeakKeyDictionary, finalize

from node.errors import operator_error
from node.script.session import Joined, Parts

LOOK_S = 1.0  # until it is looked anew who trains
# on rank 0 with their state directories; some of them are over
islands: WeakKeyDictionary[Joined, Path | None] = WeakKeyDictionary()
if hasattr(os, "register_at_fork"):  # those that a child has by fork are its parent's
    os.register_at_fork(after_in_child=islands.clear)
_joining: list[threading.Thread] = []  # those that are within a join
_dropped: list[tuple[int, Parts]] = []  # of islands that nobody has any more; of which process


def hold(parts: Parts, directory: Path | None) -> Joined:
    """An island of these parts, which can leave in order also where the script lets go of it.

    As by the end of the function that has joined. ``directory``: see :data:`islands`.
    """
    joined = Joined(*parts)
    islands[joined] = directory
    # called wherever in the script that is: no place to leave a swarm at
    dropped = finalize(joined, _dropped.append, (os.getpid(), parts))
    dropped.atexit = False
    parts[0].on_end = dropped.detach  # nothing of one that is over is kept
    return joined


def leave_dropped() -> None:
    """Have the islands leave in order that nobody has any more."""
    while _dropped:
        pid, parts = _dropped.pop()
        if pid == os.getpid():
            _leave(Joined(*parts))


def _leave(joined: Joined) -> None:
    joined.__exit__(SystemExit, SystemExit(), None)


@contextmanager
def waited_for_at_exit() -> Iterator[None]:
    """Around a join: Python's end waits for it, if it is in another thread than the main one.

    Raises OperatorError E204 where Python is at its end already.
    """
    try:
        _leave_at_exit(os.getpid())
    except RuntimeError as error:
        raise operator_error(
            "E204",
            "the main thread has ended before node.join was called in another one",
            why="from then on Python gives no threads to what writes checkpoints",
            fix="let the main thread wait for the one that trains: thread.join()",
        ) from error
    thread = threading.current_thread()
    _joining.append(thread)
    try:
        yield
    finally:
        _joining.remove(thread)


@cache
def _leave_at_exit(pid: int) -> None:
    """Have the islands of this process leave in order when Python ends and the script has not.

    As where Ctrl-C ends it: else what it has learnt since the last merge, and its optimizer's
    moments, would be in no checkpoint.
    """

    def leave() -> None:
        if os.getpid() != pid:
            return  # a data loader's worker, which has all of this by fork
        while thread := _at_work():
            thread.join(LOOK_S)
        for joined in list(islands):
            if not joined.over:
                _leave(joined)
        leave_dropped()

    # before Python refuses new threads, which writing a checkpoint needs: `atexit` is too late
    register = getattr(threading, "_register_atexit", atexit.register)
    register(leave)


def _at_work() -> threading.Thread | None:
    """Another thread that joins or trains, of those that Python will wait for.

    Before an island's first step nobody can say which that is.
    """
    threads = _joining.copy()
    for joined in list(islands):
        if not joined.over:
            threads += threading.enumerate() if joined.thread is None else [joined.thread]
    here = threading.current_thread()
    return next((t for t in threads if t is not here and _waited_for(t)), None)


def _waited_for(thread: threading.Thread) -> bool:
    """Whether Python waits for its end: an executor's idles until Python tells it, after this."""
    executors = (("thread", "_threads_queues"), ("process", "_threads_wakeups"))
    for kind, name in executors:
        if thread in getattr(sys.modules.get(f"concurrent.futures.{kind}"), name, ()):
            return False
    return thread.is_alive() and not thread.daemon
