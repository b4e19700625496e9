"""The run so far, one row a round, in bounded memory: what the dashboard's charts are drawn from.

A :class:`History` subscribes to the event log. Rows are kept in numpy columns; when there are
:data:`MAX_ROWS` of them all but the newest quarter are put together by two, four, eight … rounds,
so that a long run is remembered whole and evenly, and its recent past exactly. The same rows lie in
``history.jsonl``, since the event log, which also holds every inner step, is rotated long before a
run ends; a restarted node reads them back.

The file::

    {"run": "8c41…", "schema": 1, "totals": {"12D3KooW…": 81920}}     once, and after a thinning
    [[round, time, …], …]                     for each round, see :mod:`node.monitor.history_rows`

The totals are without the tokens that rows have, which are taken back where a restarted node goes
through their rounds again.
It is read in a thread where there is a loop to hold up (:meth:`History.load`). A thinning, once in
4,096 rounds or more, writes it anew and takes the loop up to a second.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from node.monitor import rounding
from node.monitor.curves import MAX_ISLANDS, Curves
from node.monitor.events import Record, RoundDone, RoundFailed, Step
from node.monitor.history_columns import (
    COLUMNS,
    NEWEST,
    OUTCOMES,
    PHASES,
    ROUND,
    TOKENS,
    VALIDATION,
    Array,
    means,
    merged,
    starts_of,
)
from node.monitor.history_rows import Numbers
from node.monitor.lines import append_line, replace_lines
from node.monitor.whole_rounds import WholeRounds
from protocols.tasks import Offload

SCHEMA = 1
MAX_ROWS = 16_384
MAX_TOTALS = 1024  # islands whose merged tokens are added up
MAX_POINTS = 2000  # of one answer
MAX_UNDONE = 256  # newest rounds whose tokens are taken back where they are gone through again
_START_ROWS = 256
# what reading a damaged file may raise
_NOT_OURS = (ValueError, TypeError, AttributeError, OverflowError, RecursionError)


class History:
    """Rounds of one run. ``path`` None: in memory only.

    ``me``: the island that has a loss curve in any case. ``failed`` is told of the first row that
    cannot be written.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        me: str = "",
        max_rows: int = MAX_ROWS,
        failed: Callable[[OSError], None] | None = None,
    ) -> None:
        self.path = path
        self._me, self._tell = me, failed
        self.run = ""
        self._curves = Curves(me)
        self.totals: dict[str, int] = {}  # merged tokens by island, as far as this node knows
        self._counted: deque[tuple[float, dict[str, int]]] = deque(maxlen=MAX_UNDONE)
        self.added = 0  # rows since the start of this process: a cursor for readers
        self.lost = 0  # rows that could not be written
        self._begun = False  # the file has this run's head
        self._length = 0  # bytes of the file as it was written last
        self._numbers = Numbers()  # of islands, in the file
        self._held: list[Record] | None = None  # what happens while the file is read
        self._max_rows = max_rows - max_rows % 4
        self._size = 0
        self._rows: Array = np.full((_START_ROWS, len(COLUMNS)), np.nan)
        self._losses: npt.NDArray[np.float32] = np.full(
            (_START_ROWS, MAX_ISLANDS), np.nan, dtype=np.float32
        )
        self._failed = 0
        self._wholes = WholeRounds()
        self._step: Step | None = None

    def __len__(self) -> int:
        return self._size

    # --- in --------------------------------------------------------------------------------------

    def begin(self, run: str) -> None:
        """The run is known: read back what an earlier process wrote of it, forget any other."""
        if run == self.run:
            return
        self.__init__(  # type: ignore[misc]  # all anew
            self.path, me=self._me, max_rows=self._max_rows, failed=self._tell
        )
        self.run = run
        self._begun = self._restore()
        if not self._begun:
            self._rewrite()

    async def load(self, run: str, offload: Offload) -> None:
        """As :meth:`begin`, with the file read in another thread; rounds come after it."""
        if run == self.run:
            return
        failures: list[OSError] = []
        loaded = History(self.path, me=self._me, max_rows=self._max_rows, failed=failures.append)
        self._held = []
        await offload(lambda: loaded.begin(run))
        held, tell = self._held, self._tell
        self.__dict__ |= vars(loaded)
        self._tell = tell
        for error in failures:
            self._say(error)
        for record in held:
            self(record)

    def __call__(self, record: Record) -> None:
        """Take one event in."""
        if self._held is not None:
            if isinstance(record.event, Step | RoundFailed | RoundDone):
                self._held.append(record)
            return
        match record.event:
            case Step() as step:
                self._step = step
            case RoundFailed():
                self._failed += 1
            case RoundDone() as done:
                if (whole := self._wholes.take(done)) is not None:
                    self._on_round(record.time, whole)
            case _:
                pass

    def _on_round(self, when: float, done: RoundDone) -> None:
        step = self._step
        values = [
            done.round,
            when,
            OUTCOMES.index(done.outcome),
            self._failed,
            *(getattr(done, name) for name in COLUMNS[4:18]),
            *((step.lr, step.grad_norm, step.tokens_per_second) if step else (None,) * 3),
            *(done.phases.get(name) for name in PHASES),
        ]
        items = done.islands.items()
        losses = {peer: item["loss"] for peer, item in items if "loss" in item}
        tokens = {peer: int(item.get("tokens", 0)) for peer, item in items}
        self._failed = 0
        kept, counted = self._add(values, losses, tokens)
        self._append([rounding.written(value) for value in values], kept, counted)

    def _add(
        self,
        values: Iterable[float | None],
        losses: Mapping[str, float | None],
        tokens: Mapping[str, int],
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Take a row in; the losses and merged tokens that count."""
        row = np.array([np.nan if value is None else float(value) for value in values])
        while self._size and self._rows[self._size - 1, ROUND] >= row[ROUND]:
            self._size -= 1  # the node went back in the chain: those rounds are no more
        while self._counted and self._counted[-1][0] >= row[ROUND]:
            for peer, count in self._counted.pop()[1].items():
                self.totals[peer] -= count
        if self._size == self._max_rows:
            self._thin()
        if self._size == len(self._rows):
            self._rows = np.concatenate([self._rows, np.full_like(self._rows, np.nan)])
            self._losses = np.concatenate([self._losses, np.full_like(self._losses, np.nan)])
        self._rows[self._size] = row
        counted: dict[str, int] = {}
        for peer, count in tokens.items():
            if peer in self.totals or len(self.totals) < MAX_TOTALS:
                counted[peer] = count
                self.totals[peer] = self.totals.get(peer, 0) + count
        self._counted.append((float(row[ROUND]), counted))
        kept = self._curves.put(losses, self._losses, self._size)
        self._size += 1
        self.added += 1
        return kept, counted

    def _thin(self) -> None:
        """Put older rows together by equal numbers of rounds, until they fill half of the room."""
        old = self._size - self._max_rows // 4
        every = 2
        while len(starts := starts_of(self._rows[:old, ROUND] // every)) > self._max_rows // 2:
            every *= 2
        size = len(starts) + self._size - old
        for kept, older in (
            (self._rows, merged(self._rows[:old], starts)),
            (self._losses, means(self._losses[:old], starts)),
        ):
            kept[len(starts) : size] = kept[old : self._size].copy()
            kept[: len(starts)] = older
        self._size = size
        self._rewrite()

    @property
    def islands(self) -> list[str]:
        """Whose losses are kept, in the order of their columns."""
        return self._curves.islands

    @property
    def first(self) -> int | None:
        """The oldest round that is known; None where there is none yet."""
        return int(self._rows[0, ROUND]) if self._size else None

    def lowest(self) -> tuple[int, float] | None:
        """The lowest validation loss of the rounds that this node was there for, and its round.

        What was only told by others (:meth:`prepend`) has no tokens, and may be anything.
        """
        rows = self._rows[: self._size]
        own = rows[~np.isnan(rows[:, [VALIDATION, TOKENS]]).any(1)]
        if not len(own):
            return None
        best = own[np.argmin(own[:, VALIDATION])]
        return int(best[ROUND]), float(best[VALIDATION])

    def prepend(self, rows: Sequence[Mapping[str, float | None]], totals: Mapping[str, int]) -> int:
        """Put rounds of the time before this node in front, oldest first, by names of columns.

        Rows that are out of order, not older than what is known, or without room are left out.
        Returns the number that were taken. ``totals`` are merged tokens by island until now.
        """
        limit, taken = self.first, list[Array]()
        for values in rows:
            row = np.array([np.nan if (v := values.get(n)) is None else v for n in COLUMNS])
            newest = taken[-1][ROUND] if taken else -1.0
            if newest < row[ROUND] and (limit is None or row[ROUND] < limit):
                taken.append(row)
        room = max(0, self._max_rows // 2 - self._size)
        taken = taken[max(0, len(taken) - room) :]
        if not taken:
            return 0
        losses = np.full((len(taken), MAX_ISLANDS), np.nan, dtype=np.float32)
        self._losses = np.concatenate([losses, self._losses[: self._size]])
        self._rows = np.concatenate([np.stack(taken), self._rows[: self._size]])
        self._size += len(taken)
        self.added += MAX_POINTS + 1  # readers start anew
        for peer, tokens in totals.items():
            if peer in self.totals or len(self.totals) < MAX_TOTALS:
                self.totals[peer] = max(self.totals.get(peer, 0), tokens)
        self._rewrite()
        return len(taken)

    # --- out -------------------------------------------------------------------------------------

    def columns(
        self, points: int = 600, *, last: int = 0, before: int | None = None
    ) -> dict[str, Any]:
        """At most ``points`` (or half as many) rows, equal numbers of rounds put into one.

        ``last``: only this many of the newest rounds; ``before``: only older rounds. Columns are
        means, except for the newest round and time and the worst outcome. Numbers have five digits;
        None: not known.
        """
        points = max(2, min(points, MAX_POINTS))
        start = 0
        if last and self._size:
            edge = self._rows[self._size - 1, ROUND] - last
            start = int(np.searchsorted(self._rows[: self._size, ROUND], edge, side="right"))
        stop = self._size
        if before is not None:
            stop = int(np.searchsorted(self._rows[:stop, ROUND], before, side="left"))
        rows, losses = self._rows[start:stop], self._losses[start:stop]
        every = max(1, math.ceil(len(rows) / points))
        starts = np.arange(0, len(rows), every)
        rows, losses = merged(rows, starts), means(losses, starts)
        return {
            "every": every,
            "rounds": self._size,
            "columns": {
                name: rounding.column(rows[:, index], exact=index in NEWEST)
                for index, name in enumerate(COLUMNS)
            },
            "islands": {
                peer: rounding.column(losses[:, index]) for index, peer in enumerate(self.islands)
            },
        }

    def since(self, added: int) -> list[dict[str, Any]] | None:
        """The rows after a reader's cursor (see ``added``), None where it must start anew."""
        missing = self.added - added
        if missing < 0 or missing > self._size or missing > MAX_POINTS:
            return None
        return [self._plain(index) for index in range(self._size - missing, self._size)]

    def _plain(self, index: int) -> dict[str, Any]:
        row, losses = self._rows[index], self._losses[index]
        values = {n: rounding.number(row[i], exact=i in NEWEST) for i, n in enumerate(COLUMNS)}
        known = np.flatnonzero(~np.isnan(losses))
        return values | {"islands": {self.islands[i]: rounding.number(losses[i]) for i in known}}

    # --- the file --------------------------------------------------------------------------------

    def _restore(self) -> bool:
        """Read the file; False where it is of another run, not there, or damaged at its start."""
        if self.path is None:
            return False
        path, self.path = self.path, None  # nothing is written while it is read
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                head = json.loads(file.readline())
                if head["run"] != self.run or head["schema"] != SCHEMA:
                    return False
                self.totals = {str(k): int(v) for k, v in head["totals"].items()}
                self._numbers = Numbers(self.totals)
                for line in file:
                    self._restore_row(line)
                self._length = os.fstat(file.fileno()).st_size
        except (OSError, KeyError, *_NOT_OURS):
            return False
        finally:
            self.path = path
        return True

    def _restore_row(self, line: str) -> None:
        try:
            values, losses, tokens = self._numbers.read(line)
            if len(values) == len(COLUMNS) and math.isfinite(values[ROUND]):
                self._add(values, losses, tokens)
        except _NOT_OURS:
            return  # cut short by a full disk or a kill

    def _append(
        self, values: list[float | None], losses: Mapping[str, float], tokens: Mapping[str, int]
    ) -> None:
        if self.path is None or not self.run:
            return
        try:
            if not self._begun or _size(self.path) < self._length:  # somebody has cut it
                self._rewrite()  # a row without the head of its run would be read by nobody
                return
            written = {peer: rounding.written(loss) for peer, loss in losses.items()}
            append_line(self.path, self._numbers.line(values, written, tokens))
            self._length = _size(self.path)
        except OSError as error:
            self._numbers.not_written()
            self._lose(error)

    def _rewrite(self) -> None:
        """Write the file anew with the rows as they are now."""
        if self.path is None:
            return
        numbers = Numbers(self.totals)
        try:
            replace_lines(self.path, self._lines(numbers))
            self._length = _size(self.path)
        except OSError as error:
            self._lose(error)
            return
        self._begun, self._numbers = True, numbers

    def _lines(self, numbers: Numbers) -> Iterator[str]:
        undone, totals = dict(self._counted), dict(self.totals)
        for number in self._rows[: self._size, ROUND].tolist():
            for peer, count in undone.get(number, {}).items():
                totals[peer] -= count
        yield json.dumps({"run": self.run, "schema": SCHEMA, "totals": totals})
        columns = [rounding.column(one) for one in self._losses[: self._size].T]
        curves = columns[: len(self.islands)]
        for index, row in enumerate(self._rows[: self._size].tolist()):
            known = ((peer, curve[index]) for peer, curve in zip(self.islands, curves, strict=True))
            losses = {peer: loss for peer, loss in known if loss is not None}
            values = [rounding.written(value) for value in row]
            yield numbers.line(values, losses, undone.get(row[ROUND], {}))

    def _lose(self, error: OSError) -> None:
        """A full disk must not end training."""
        self.lost += 1
        if self.lost == 1:
            self._say(error)

    def _say(self, error: OSError) -> None:
        if self._tell is not None:
            self._tell(error)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
