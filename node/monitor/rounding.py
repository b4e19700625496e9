"""Numbers as they are sent and written: with few digits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

DIGITS = 5  # significant


def column(values: npt.NDArray[Any], *, exact: bool = False) -> list[float | None]:
    """As :func:`number` for each, all at once."""
    wide = values.astype(np.float64)
    digits = np.full(len(wide), 3.0)
    if not exact:
        sizes = np.abs(wide, where=np.isfinite(wide), out=np.ones_like(wide))
        digits = DIGITS - 1 - np.floor(np.log10(np.maximum(sizes, 1e-30)))
    scale = 10.0 ** np.clip(digits, 0, 30)  # what is large stays whole
    rounded: list[float] = (np.round(wide * scale) / scale).tolist()
    return [value if math.isfinite(value) else None for value in rounded]


def number(value: float, *, exact: bool = False) -> float | int | None:
    """Five digits, or ``exact`` to a thousandth; None for what is no number."""
    if not math.isfinite(value):
        return None
    value = round(float(value), 3) if exact else float(f"{value:.{DIGITS}g}")
    return int(value) if value.is_integer() else value


def written(value: float | None) -> float | int | None:
    """As it is written: whole numbers and times exactly, others with few digits."""
    if value is None or not math.isfinite(value):
        return None
    if float(value).is_integer() or abs(value) >= 10**DIGITS:
        return number(value, exact=True)
    return number(value)
