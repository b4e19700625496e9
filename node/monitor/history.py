"""The run so far, one row a round, in bounded memory: what the dashboard's charts are drawn from.

A :class:`History` subscribes to the event log. Rows are kept in numpy columns; when there are
:data:`MAX_ROWS` of them all but the newest quarter are put together by two, four, eight … rounds,
so that a long run is remembered whole and evenly, and its recent past exactly. The same rows lie in
``history.jsonl``, since the event log, which also holds every inner step, is rotated long before a
run ends; a restarted node reads them back.

The file::

    {"run": "8c41…", "schema": 1, "totals": {"12D3KooW…": 81920}, "rows": 812, "gaps": [[9, 15]]}
    [[round, time, …], …]                     for each round, see :mod:`node.monitor.history_rows`

The totals are without the tokens that rows have, which are taken back where a restarted node goes
through their rounds again. The gaps are those among so many rows, which were written with it; any
row after these is of one round, so what lacks before it is a gap, too.
It is read in a thread where there is a loop to hold up (:meth:`History.load`), and written anew
beside the loop where others have told of gaps (:meth:`History.save`). A thinning, once in some
4,000 rounds, writes it anew as well and takes the loop up to a second.
"""

from __future__ import annotations

import json
import math
import os
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
from node.monitor.history_file import HistoryFile
from node.monitor.history_gaps import Gaps, rows_in, stand_for
from node.monitor.history_rows import Numbers
from node.monitor.merged_tokens import MergedTokens
from node.monitor.whole_rounds import WholeRounds
from protocols.tasks import Offload

SCHEMA = 1
MAX_ROWS = 16_384
MAX_POINTS = 2000  # of one answer
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
        self._file = HistoryFile(path, failed)
        self._me = me
        self.run = ""
        self._curves = Curves(me)
        self.merged = MergedTokens()
        self.gaps = Gaps()
        self.added = 0  # rows since the start of this process: a cursor for readers
        self._held: list[Record] | None = None  # what happens while another thread is at the file
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
            self._file.path, me=self._me, max_rows=self._max_rows, failed=self._file.tell
        )
        self.run = run
        self._file.begun = self._restore()
        if not self._file.begun:
            self._rewrite()

    async def load(self, run: str, offload: Offload) -> None:
        """As :meth:`begin`, with the file read in another thread; rounds come after it."""
        if run == self.run:
            return
        path, tell, failures = self._file.path, self._file.tell, list[OSError]()
        loaded = History(path, me=self._me, max_rows=self._max_rows, failed=failures.append)
        held = self._held = []
        await offload(lambda: loaded.begin(run))
        self.__dict__ |= vars(loaded)
        self._file.tell = tell
        for error in failures:
            if tell is not None:
                tell(error)
        for record in held:
            self(record)

    async def save(self, offload: Offload) -> None:
        """Write the file anew in another thread; rounds come after it.

        Where this is cancelled the node is leaving, and the thread may still be at it: whatever
        comes then is left out.
        """
        held = self._held = []
        await self._file.write_beside(offload, Numbers(self.totals), self._lines)
        self._held = None
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
        written = [rounding.written(value) for value in values]
        if self.run and not self._file.append(written, kept, counted):
            self._rewrite()

    def _add(
        self,
        values: Iterable[float | None],
        losses: Mapping[str, float | None],
        tokens: Mapping[str, int],
        *,
        exact: bool = True,
    ) -> tuple[dict[str, float], dict[str, int]]:
        """Take a row in; the losses and merged tokens that count. ``exact``: it is of one round."""
        row = np.array([np.nan if value is None else float(value) for value in values])
        while self._size and self._rows[self._size - 1, ROUND] >= row[ROUND]:
            self._size -= 1  # the node went back in the chain: those rounds are no more
        if exact:
            self.gaps.note(self.newest, int(row[ROUND]))
        if self._size == self._max_rows:
            self._thin()
            self._rewrite()
        if self._size == len(self._rows):
            self._rows = np.concatenate([self._rows, np.full_like(self._rows, np.nan)])
            self._losses = np.concatenate([self._losses, np.full_like(self._losses, np.nan)])
        self._rows[self._size] = row
        counted = self.merged.add(float(row[ROUND]), tokens)
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
        rows, losses = merged(self._rows[:old], starts), means(self._losses[:old], starts)
        told = np.isnan(self._rows[:old, TOKENS])  # see :meth:`lowest`
        rows[np.logical_or.reduceat(told, starts), TOKENS] = np.nan
        for kept, older in ((self._rows, rows), (self._losses, losses)):
            kept[len(starts) : size] = kept[old : self._size].copy()
            kept[: len(starts)] = older
        self._size = size

    @property
    def totals(self) -> dict[str, int]:
        """Merged tokens by island, as far as this node knows."""
        return self.merged.totals

    @property
    def lost(self) -> int:
        """Rows that could not be written."""
        return self._file.lost

    @property
    def islands(self) -> list[str]:
        """Whose losses are kept, in the order of their columns."""
        return self._curves.islands

    @property
    def first(self) -> int | None:
        """The oldest round that is known; None where there is none yet."""
        return int(self._rows[0, ROUND]) if self._size else None

    @property
    def newest(self) -> int:
        """The newest round that is known, -1: none."""
        return int(self._rows[self._size - 1, ROUND]) if self._size else -1

    def lowest(self) -> tuple[int, float] | None:
        """The lowest validation loss of the rounds that this node was there for, and its round.

        What was only told by others (:meth:`learn`) has no tokens, and may be anything.
        """
        rows = self._rows[: self._size]
        own = rows[~np.isnan(rows[:, [VALIDATION, TOKENS]]).any(1)]
        if not len(own):
            return None
        best = own[np.argmin(own[:, VALIDATION])]
        return int(best[ROUND]), float(best[VALIDATION])

    def expect(self, before: int) -> None:
        """This node goes on at that round: those after the newest one that it knows are a gap."""
        if before > self.newest:
            self.gaps.note(self.newest, before)

    def learn(
        self, rows: Sequence[Mapping[str, float | None]], totals: Mapping[str, int], before: int
    ) -> int:
        """Others have told of gaps up to the one that ends at ``before``: these are none any more.

        ``rows``, oldest first by names of columns, are left out where they are out of order, of
        rounds that are not missing, or without room. ``totals`` are merged tokens by island in all
        rounds before. Returns how many rows were taken; the file has them by :meth:`save`.
        """
        gaps = self.gaps.until(before)
        taken = rows_in(gaps, rows)[-(self._max_rows // 2) :]
        if not len(taken):
            return 0
        if self._size + len(taken) > self._max_rows:
            self._thin()
        taken = taken[-(self._max_rows - self._size) :]
        at = np.searchsorted(self._rows[: self._size, ROUND], taken[:, ROUND])
        self._rows = np.insert(self._rows[: self._size], at, taken, axis=0)
        self._losses = np.insert(self._losses[: self._size], at, np.float32(np.nan), axis=0)
        self._size += len(taken)
        self.added += MAX_POINTS + 1  # readers start anew
        self.merged.learn(totals, before, stand_for(gaps, taken[:, ROUND].tolist()))
        self.gaps.close(before)
        return len(taken)

    # --- out -------------------------------------------------------------------------------------

    def columns(
        self, points: int = 600, *, last: int = 0, since: int = 0, before: int | None = None
    ) -> dict[str, Any]:
        """At most ``points`` (or half as many) rows, ``every`` of them put into one.

        The newest one stands alone: it is told of as it is. ``last``: only this many of the newest
        rounds; ``since``: only from this round on; ``before``: only older rounds, of which none
        stands alone. Columns are means, except for the newest round and time and the worst
        outcome. Numbers have five digits; None: not known.
        """
        points = max(2, min(points, MAX_POINTS))
        rounds = self._rows[: self._size, ROUND]
        since = max(since, self.newest - last + 1) if last else since
        start = int(np.searchsorted(rounds, since))
        stop = self._size if before is None else int(np.searchsorted(rounds, before))
        rows, losses = self._rows[start:stop], self._losses[start:stop]
        alone = int(before is None and len(rows) > 0)
        every = max(1, math.ceil((len(rows) - alone) / (points - alone)))
        starts = np.arange(0, len(rows) - alone, every)
        starts = np.append(starts, len(rows) - 1) if alone else starts
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
        """Read the file; False where it is to be written anew.

        So it is where it is of another run, not there, damaged at its start or of an earlier
        version, which has not noted gaps.
        """
        file, path = self._file, self._file.path
        if path is None:
            return False
        self._file = HistoryFile()  # nothing is written while it is read
        try:
            with path.open(encoding="utf-8", errors="replace") as lines:
                head = json.loads(lines.readline())
                if head["run"] != self.run or head["schema"] != SCHEMA:
                    return False
                known, gaps = float(head.get("rows", math.inf)), Gaps(head.get("gaps", ()))
                self.merged = MergedTokens({str(k): int(v) for k, v in head["totals"].items()})
                file.numbers, self.gaps = Numbers(self.totals), gaps
                for number, line in enumerate(lines):
                    self._restore_row(line, file.numbers, exact=number >= known)
                file.length = os.fstat(lines.fileno()).st_size
        except (OSError, KeyError, *_NOT_OURS):
            return False
        finally:
            self._file = file
        if known == math.inf and self.first is not None:
            self.gaps.note(-1, self.first)
        return known < math.inf

    def _restore_row(self, line: str, numbers: Numbers, *, exact: bool) -> None:
        try:
            values, losses, tokens = numbers.read(line)
            if len(values) == len(COLUMNS) and math.isfinite(values[ROUND]):
                self._add(values, losses, tokens, exact=exact)
        except _NOT_OURS:
            return  # cut short by a full disk or a kill

    def _rewrite(self) -> None:
        """Write the file anew with the rows as they are now."""
        self._file.write(Numbers(self.totals), self._lines)

    def _lines(self, numbers: Numbers) -> Iterator[str]:
        undone, totals = self.merged.by_round(), dict(self.totals)
        for number in self._rows[: self._size, ROUND].tolist():
            for peer, count in undone.get(number, {}).items():
                totals[peer] -= count
        head = {"run": self.run, "schema": SCHEMA, "totals": totals}
        yield json.dumps(head | {"rows": self._size, "gaps": self.gaps.open})
        columns = [rounding.column(one) for one in self._losses[: self._size].T]
        curves = columns[: len(self.islands)]
        for index, row in enumerate(self._rows[: self._size].tolist()):
            known = ((peer, curve[index]) for peer, curve in zip(self.islands, curves, strict=True))
            losses = {peer: loss for peer, loss in known if loss is not None}
            values = [rounding.written(value) for value in row]
            yield numbers.line(values, losses, undone.get(row[ROUND], {}))
