"""Files of lines on a disk that may be full: what is cut short there costs no other line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from pathlib import Path

from protocols.files import READABLE, replacing


def append_line(path: Path, line: str) -> None:
    """Append a line, behind the end of one that a full disk or a kill has cut short before.

    Raises OSError where it is not written, or not all of it.
    """
    with path.open("a+b", buffering=0) as file:
        torn = False
        if file.tell():
            file.seek(-1, os.SEEK_END)
            torn = file.read(1) != b"\n"
        data = (b"\n" if torn else b"") + line.encode() + b"\n"
        if file.write(data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def replace_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a file anew, whole or not at all. Raises OSError."""
    with replacing(path, mode=READABLE, durable=False) as file:
        file.writelines(f"{line}\n".encode() for line in lines)
