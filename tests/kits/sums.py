"""How Pythons add up floats: ``sum`` rounds each addition up to 3.11, and makes up for it later."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

Sum = Callable[..., Any]
exact = builtins.sum  # of whole numbers


def rounded(values: Iterable[Any], /, start: Any = 0) -> Any:
    """As up to 3.11."""
    total = start
    for value in values:
        total = total + value
    return total


def compensated(values: Iterable[Any], /, start: Any = 0) -> Any:
    """As from 3.12 on: Neumaier's, for floats."""
    values = list(values)
    if not any(isinstance(value, float) for value in values):
        return exact(values, start)
    total, lost = float(start), 0.0
    for value in values:
        after = total + value
        large, small = (total, value) if abs(total) >= abs(value) else (value, total)
        lost += (large - after) + small
        total = after
    return total + lost


@contextmanager
def added_up(how: Sum) -> Iterator[None]:
    """All of this process adds up like this."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builtins, "sum", how)
        yield
