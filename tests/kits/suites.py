"""Which suite a parameter of a test belongs to (docs/contributing.md)."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*rows: Any) -> list[Any]:
    """More of what a fast test claims, for ``make test-slow``: a value each, or a tuple of them."""
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
        for row in rows
    ]
