"""Where the stretches of a stream begin, as far as was read on this machine: a file of marks.

A line of JSON each. All processes that read the stream add to the file, under a lock of theirs, and
each of them reads a line once. The older marks are, the fewer of them stay: one that is missing
costs reading, from the last one before it.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from node.data.streamed import Mark
from protocols.files import replacing

THIN_EVERY = 128  # rounds
SHARE = 64  # what is read again for want of a mark is at most this part of what came since


class Marks:
    """Marks by round. Callers hold the lock that all users of the file share."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, Mark] = {}
        self._inode = self._offset = 0  # how far which file was read

    def nearest(self, round: int) -> tuple[int, Mark]:
        """The last mark at or before a round's stretch; the beginning of all where there is none.

        Raises OSError.
        """
        self._read()
        best = max((known for known in self._known if known <= round), default=0)
        return best, self._known.get(best, Mark())

    def note(self, round: int, mark: Mark) -> None:
        """Note where the stretch of a round begins. Raises OSError."""
        self._read()
        if round in self._known:
            return
        self._known[round] = mark
        if round % THIN_EVERY == 0:
            self._write_thinned()
            return
        with self._path.open("ab") as file:
            file.write(b"\n" + _line(round, mark))  # apart from a line that was cut off
            file.flush()
            self._stand(file.fileno(), file.tell())

    def _read(self) -> None:
        """Read what other processes have added."""
        try:
            with self._path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._inode or found.st_size < self._offset:  # thinned out
                    self._known, self._offset = {}, 0
                file.seek(self._offset)
                for line in file:
                    with contextlib.suppress(ValueError, KeyError, TypeError):  # cut off by a kill
                        said = json.loads(line)
                        self._known[int(said["round"])] = Mark.model_validate(said["mark"])
                self._stand(file.fileno(), file.tell())
        except FileNotFoundError:
            self._known, self._inode, self._offset = {}, 0, 0

    def _write_thinned(self) -> None:
        newest = max(self._known)
        self._known = {n: mark for n, mark in self._known.items() if n % _apart(newest - n) == 0}
        with replacing(self._path) as file:
            file.writelines(_line(number, mark) for number, mark in sorted(self._known.items()))
            file.flush()
            self._stand(file.fileno(), file.tell())

    def _stand(self, handle: int, offset: int) -> None:
        self._inode, self._offset = os.fstat(handle).st_ino, offset


def _apart(age: int) -> int:
    """Rounds between the marks kept from ``age`` rounds ago: a power of two, fewer with age."""
    return 1 << max(0, (age // SHARE).bit_length() - 1)


def _line(round: int, mark: Mark) -> bytes:
    return json.dumps({"round": round, "mark": mark.model_dump()}).encode() + b"\n"
