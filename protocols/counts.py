"""How much of each contributor is in a part, as few bytes.

Most parts hold all of everybody, so runs travel: neighbours in the plan's order that have the same
number of elements in the part. A run is ``first contributor (2) | how many of them (2) |
elements (8)``, big endian; runs ascend, and none could be joined with the one before, so equal
counts are equal bytes. In a round of 256 members that is 12 bytes a part instead of two thousand.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from protocols.bounds import MAX_PEERS
from protocols.errors import Malformed

_RUN = struct.Struct(">HHQ")
RUN_BYTES = _RUN.size
MAX_BYTES = RUN_BYTES * MAX_PEERS


class Included(NamedTuple):
    """How much of a contributor's slice reached the merged part."""

    contributor: int  # index into the contributors that PartResult.basis names
    elements: int  # counted from the start of the part, at least one


class CountRun(NamedTuple):
    """Contributors ``first`` to ``stop`` − 1 have ``elements`` each in the part."""

    first: int
    stop: int
    elements: int


def pack_counts(elements: Sequence[int]) -> bytes:
    """The bytes for ``elements`` of contributors 0, 1, …; 0: nothing of it is in the part."""
    runs: list[CountRun] = []
    for index, count in enumerate(elements):
        if not count:
            continue
        if runs and runs[-1].stop == index and runs[-1].elements == count:
            runs[-1] = runs[-1]._replace(stop=index + 1)
        else:
            runs.append(CountRun(index, index + 1, count))
    return b"".join(_RUN.pack(run.first, run.stop - run.first, run.elements) for run in runs)


@lru_cache(maxsize=512)
def runs_of(counts: bytes) -> tuple[CountRun, ...]:
    """The runs; raises :class:`Malformed` for bytes that no counts have."""
    if len(counts) % _RUN.size:
        raise Malformed("counts that end in the middle")
    runs: list[CountRun] = []
    for first, many, elements in _RUN.iter_unpack(counts):
        before = runs[-1] if runs else CountRun(0, 0, 0)
        joined = first == before.stop and elements == before.elements
        if not many or not elements or first < before.stop or joined:
            raise Malformed("counts that are not in canonical form")
        runs.append(CountRun(first, first + many, elements))
    if runs and runs[-1].stop > MAX_PEERS:
        raise Malformed("counts of more contributors than a round has")
    return tuple(runs)


@lru_cache(maxsize=512)
def included_in(counts: bytes) -> tuple[Included, ...]:
    """Who is in the part; raises :class:`Malformed` as :func:`runs_of`."""
    return tuple(
        Included(index, run.elements)
        for run in runs_of(counts)
        for index in range(run.first, run.stop)
    )
