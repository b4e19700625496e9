"""The columns of :mod:`node.monitor.history`, and how rows of several rounds become one."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

OUTCOMES = ("committed", "degraded")
PHASES = ("compute", "ready", "match", "exchange", "certify", "apply")
# of a round: see RoundDone; "failed" counts the attempts before it that came to nothing
COLUMNS: Final = (
    "round",
    "time",
    "outcome",  # place in OUTCOMES; of several rounds the worst
    "failed",
    "members",
    "live",
    "agreeing",
    "loss",
    "validation_loss",
    "consensus",
    "consensus_after",
    "tokens",
    "sent_bytes",
    "received_bytes",
    "raw_bytes",
    "utilisation",
    "wait_s",
    "sync_s",
    "lr",
    "grad_norm",
    "tokens_per_second",
    *PHASES,
)
ROUND, TIME = 0, 1
VALIDATION, TOKENS = COLUMNS.index("validation_loss"), COLUMNS.index("tokens")
WORST = (COLUMNS.index("outcome"), COLUMNS.index("failed"))
NEWEST = (ROUND, TIME)

Array = npt.NDArray[np.float64]


def starts_of(groups: Array) -> npt.NDArray[np.int64]:
    """Where a new group begins in a sorted column."""
    return np.flatnonzero(np.diff(groups, prepend=np.nan))


def merged(rows: Array, starts: npt.NDArray[np.int64]) -> Array:
    """[R, C] to [len(starts), C]: one row for those from a start to the next."""
    found: Array = means(rows, starts)
    if len(starts) < len(rows):
        ends = np.append(starts[1:], len(rows)) - 1
        found[:, NEWEST] = rows[ends][:, NEWEST]
        for column in WORST:
            found[:, column] = np.maximum.reduceat(rows[:, column], starts)
    return found


def means(rows: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Means over what is known in the rows from a start to the next."""
    if len(starts) == len(rows):
        return rows.copy()
    known = ~np.isnan(rows)
    counts = np.add.reduceat(known, starts, dtype=np.int64)
    sums = np.add.reduceat(np.where(known, rows, 0), starts)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
