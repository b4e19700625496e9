"""How a round of :mod:`node.monitor.history` is written: a line in which islands are numbers.

There may be hundreds of them with names of fifty letters, and twenty thousand rounds::

    [[round, time, …], [number, loss, …], [tokens, times, …], {"12D3KooW…": number, …}]

The second has the losses that are kept; the third the merged tokens of the islands by number, equal
ones in a row together; the last names the islands that have no number yet.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

MAX_NUMBER = 2**16  # a damaged file's may be any

Row = tuple[Sequence[Any], Mapping[str, float], Mapping[str, int]]


class Numbers:
    """The numbers of islands in one file, whose first line has ``names`` in their order."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._numbers = {name: number for number, name in enumerate(names)}
        self._names = dict(enumerate(self._numbers))
        self._next = len(self._names)
        self._new: list[str] = []

    def line(
        self,
        values: Sequence[float | None],
        losses: Mapping[str, float | None],
        tokens: Mapping[str, int],
    ) -> str:
        """A round's line. Islands whose losses alone are known stand there by name."""
        self._new = [name for name in tokens if name not in self._numbers]
        for name in self._new:
            self._give(name, self._next)
        merged = [0] * (1 + max((self._numbers[name] for name in tokens), default=-1))
        for name, count in tokens.items():
            merged[self._numbers[name]] = count
        row = [
            values,
            [x for name, loss in losses.items() for x in (self._numbers.get(name, name), loss)],
            [x for count, group in groupby(merged) for x in (count, sum(1 for _ in group))],
            {name: self._numbers[name] for name in self._new},
        ]
        return json.dumps(row, separators=(",", ":"))

    def not_written(self) -> None:
        """The last line was not: the islands that it named have no number."""
        for name in self._new:
            del self._names[self._numbers.pop(name)]
        self._new = []

    def read(self, line: str) -> Row:
        """Values, losses and tokens of a line; raises all sorts of errors for a damaged one."""
        row = json.loads(line)
        if len(row) == 2:  # of earlier versions: {name: [loss, tokens]}
            values, islands = row
            told = {name: (loss, int(tokens)) for name, (loss, tokens) in islands.items()}
            losses = {name: loss for name, (loss, _) in told.items() if loss is not None}
            return values, losses, {name: tokens for name, (_, tokens) in told.items()}
        values, flat, runs, named = row
        for name, number in named.items():
            if not 0 <= number < MAX_NUMBER:
                raise ValueError(f"{name} has number {number}")
            self._give(name, number)
        tokens, number = dict.fromkeys(named, 0), 0
        for count, times in zip(runs[::2], runs[1::2], strict=True):
            if not 0 < times <= MAX_NUMBER - number:
                raise ValueError(f"{times} islands in a row")
            if count:
                names = map(self._names.get, range(number, number + times))
                tokens |= dict.fromkeys((name for name in names if name is not None), int(count))
            number += times
        return values, self._losses(flat), tokens

    def _losses(self, flat: Sequence[Any]) -> dict[str, float]:
        pairs = zip(flat[::2], flat[1::2], strict=True)
        named = ((x if isinstance(x, str) else self._names.get(x), loss) for x, loss in pairs)
        return {name: loss for name, loss in named if name is not None}

    def _give(self, name: str, number: int) -> None:
        self._numbers[name] = number
        self._names[number] = name
        self._next = max(self._next, number + 1)
