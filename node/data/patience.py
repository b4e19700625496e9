"""How long to retry what a server, the way to it, or a full disk refuses for the moment."""

from __future__ import annotations

import logging
import math
import time
from typing import TypeGuard

from protocols.errors import OperatorError, is_full

logger = logging.getLogger(__name__)

# less than half of the time that the other ranks wait for this one, since a fetch ahead may have
# retried for as long just before
PATIENCE_S = 240.0
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0
NOW_OR_NEVER = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
GONE = (404, 410)  # a web server's word for: there is no such file
# of connections and of bodies; what they raise is of no common kind with other errors
OF_SERVERS = ("aiohttp", "httpx", "httpx2", "httpcore", "httpcore2", "urllib3", "http")


class Patience:
    """Patience with one read, from its first failure on: what went well may have taken long."""

    def __init__(self, *, full_passes: bool = False) -> None:
        """``full_passes``: a full disk is worth a try as well.

        As that of a node: what fills it may be a checkpoint, of which nothing stays where it does
        not fit.
        """
        self._full_passes = full_passes
        self._pause, self._end = FIRST_PAUSE_S, math.inf
        self._furthest: tuple[int, ...] = ()

    def got_to(self, place: tuple[int, ...]) -> None:
        """Begin anew if that is further than reading ever came: the same once more is not."""
        if place > self._furthest:
            self._furthest = place
            self._pause, self._end = FIRST_PAUSE_S, math.inf

    def pause(self, error: OperatorError) -> float | None:
        """Seconds until the next try; None where retrying is in vain, or has lasted long enough.

        Whether it may pass is told by the error's ``__cause__``.
        """
        now, pause, cause = time.monotonic(), self._pause, error.__cause__
        self._end = min(self._end, now + PATIENCE_S)
        may_pass = passes(cause) or (self._full_passes and is_full(cause))
        if not may_pass or now + pause > self._end:
            return None
        logger.warning("%s: %s; again in %.0f s", error.what, error.why, pause)
        self._pause = min(2 * pause, LAST_PAUSE_S)
        return pause

    def wait(self, error: OperatorError) -> bool:
        """Wait a while to try again; False, at once, where :meth:`pause` has none."""
        pause = self.pause(error)
        if pause is None:
            return False
        time.sleep(pause)
        return True


def passes(error: BaseException | None) -> bool:
    """Whether a read that failed with this may succeed in a moment."""
    if not isinstance(error, Exception):
        return False
    error = met(error)
    if (status := status_of(error)) is not None:
        return status >= 500 or status in (408, 429)
    if isinstance(error, NOW_OR_NEVER) or is_full(error):
        return False
    return isinstance(error, OSError) or of_a_server(error)


def met(error: Exception) -> Exception:
    """The real error: fsspec turns every error of a web server into a missing file."""
    if isinstance(error, FileNotFoundError) and of_a_server(cause := error.__cause__):
        return error if status_of(cause) in GONE else cause
    return error


def of_a_server(error: BaseException | None) -> TypeGuard[Exception]:
    """Whether a library that talks to web servers has raised it."""
    return isinstance(error, Exception) and type(error).__module__.partition(".")[0] in OF_SERVERS


def status_of(error: BaseException | None) -> int | None:
    """Of a web server's answer: aiohttp's errors have it, others have the answer."""
    for holder in (error, getattr(error, "response", None)):
        for name in ("status", "status_code"):
            if isinstance(status := getattr(holder, name, None), int):
                return status
    return None
