"""Opening a file of a web server or object store, from the byte on that was not fetched yet.

A web server is asked for the rest of the version that was begun (RFC 9110: ``Range`` with
``If-Range``). One that has no ranges, or another version by now, sends the file from its beginning.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO

from node.data.patience import met, status_of

WEB = ("http://", "https://")
SILENCE_S = 60.0  # of a web server, in the middle of a file
NOT_SATISFIABLE, PARTIAL_CONTENT = 416, 206
FRESH = timedelta(seconds=1)  # a file that has just changed may change again by the same date


@dataclass(frozen=True)
class Opened:
    """A file, to be read, maybe in smaller pieces than asked for."""

    file: BinaryIO
    start: int = 0  # the byte of it that comes first
    # what to ask with for the rest of the same version; empty: nothing tells versions apart, so the
    # rest may be of another one; None: the rest cannot be asked for
    version: str | None = None


@contextlib.contextmanager
def opened(where: str, start: int = 0, version: str = "") -> Iterator[Opened]:
    """A file at a URL from byte ``start`` of that version on if it can be had so, else from 0.

    Raises what fsspec and its libraries do.
    """
    import fsspec

    if where.startswith(WEB):
        with _of_web_server(where, start, version) as found:
            yield found
        return
    with fsspec.open(where, "rb") as file:
        try:
            if start:
                file.seek(start)
        except (ValueError, NotImplementedError):  # its file system reads from the beginning alone
            start = 0
        yield Opened(file, start, "")


@contextlib.contextmanager
def _of_web_server(where: str, start: int, version: str) -> Iterator[Opened]:
    file = _asked(where, start, version) if start else None
    if file is not None:
        with file:
            at = _begins(file.r, start, version)
            if at is not None:
                yield Opened(file, at, version if at else _version(file.r.headers))
                return
    with _asked(where) as file:
        yield Opened(file, 0, _version(file.r.headers))


def _asked(where: str, start: int = 0, version: str = "") -> Any:
    """fsspec's file over the answer, which is its ``r``; None where there is no such range.

    The file comes in one answer, however long that takes: not all serve parts.
    """
    import fsspec
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, connect=SILENCE_S, sock_read=SILENCE_S)
    files, path = fsspec.core.url_to_fs(where, block_size=0, timeout=timeout)
    # bytes of a compressed body would be counted otherwise
    headers = {**files.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
        if version:
            headers["If-Range"] = version
    try:
        # any size will do, and without one it is asked for first
        return files.open(path, "rb", headers=headers, size=1)
    except Exception as error:  # aiohttp's, or what fsspec makes of it
        if start and status_of(met(error)) == NOT_SATISFIABLE:
            return None
        raise


def _begins(answer: Any, start: int, version: str) -> int | None:
    """The byte that an answer begins with; None where it is not what was asked for.

    Some servers answer ranges and ignore ``If-Range``.
    """
    if answer.status != PARTIAL_CONTENT:
        return 0
    found = re.match(r"bytes (\d+)-", answer.headers.get("Content-Range", ""))
    name = "ETag" if version.startswith('"') else "Last-Modified"
    if version and answer.headers.get(name, version) != version:
        return None
    return start if found and int(found[1]) == start else None


def _version(headers: Mapping[str, str]) -> str | None:
    """See :class:`Opened`; what stands in ``If-Range`` has to be a strong validator."""
    if headers.get("Accept-Ranges") == "none":
        return None
    if headers.get("Content-Encoding", "identity") not in ("", "identity"):
        return None  # ranges count encoded bytes, and decoded ones are read
    tag = headers.get("ETag", "")
    if tag:
        return tag if tag.startswith('"') and tag.isascii() else ""
    changed = headers.get("Last-Modified", "")
    with contextlib.suppress(ValueError, TypeError):  # no dates, or one with and one without a zone
        age = parsedate_to_datetime(headers.get("Date", "")) - parsedate_to_datetime(changed)
        if age >= FRESH and changed.isascii():
            return changed
    return ""
