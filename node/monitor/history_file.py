"""Where :mod:`node.monitor.history` is written: a full disk costs rows, and never the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from node.monitor import rounding
from node.monitor.history_rows import Numbers
from node.monitor.lines import append_line, replace_lines
from protocols.tasks import Offload

Lines = Callable[[Numbers], Iterator[str]]
"""Makes all lines of a file, in which islands have these numbers."""


class HistoryFile:
    """The file at ``path``, None: there is none. ``tell`` hears of the first row that is lost."""

    def __init__(
        self, path: Path | None = None, tell: Callable[[OSError], None] | None = None
    ) -> None:
        self.path, self.tell = path, tell
        self.begun = False  # it has this run's head
        self.length = 0  # its bytes as it was written last
        self.numbers = Numbers()  # of islands in it
        self.lost = 0  # rows that could not be written

    def append(
        self,
        values: list[float | None],
        losses: Mapping[str, float],
        tokens: Mapping[str, int],
    ) -> bool:
        """Write a round's row; False where the whole file is to be written instead."""
        if self.path is None:
            return True
        try:
            if not self.begun or _size(self.path) < self.length:  # somebody has cut it
                return False  # a row without the head of its run would be read by nobody
            written = {peer: rounding.written(loss) for peer, loss in losses.items()}
            append_line(self.path, self.numbers.line(values, written, tokens))
            self.length = _size(self.path)
        except OSError as error:
            self.numbers.not_written()
            self._lose(error)
        return True

    def write(self, numbers: Numbers, lines: Lines) -> None:
        """Write it anew."""
        if self.path is None:
            return
        try:
            replace_lines(self.path, lines(numbers))
            self._is_written(self.path, numbers)
        except OSError as error:
            self._lose(error)

    async def write_beside(self, offload: Offload, numbers: Numbers, lines: Lines) -> None:
        """As :meth:`write`, beside the event loop; nothing is appended until it has ended."""
        if (path := self.path) is None:
            return
        try:
            await offload(lambda: replace_lines(path, lines(numbers)))
            self._is_written(path, numbers)
        except OSError as error:
            self._lose(error)

    def _is_written(self, path: Path, numbers: Numbers) -> None:
        self.length = _size(path)
        self.begun, self.numbers = True, numbers

    def _lose(self, error: OSError) -> None:
        self.lost += 1
        if self.lost == 1 and self.tell is not None:
            self.tell(error)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
