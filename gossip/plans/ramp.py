"""What the work of an island that has just come into a run counts for. Pure."""

from __future__ import annotations

RAMP = (0.25, 0.5, 0.75, 1.0)  # in its first rounds


def ramp(merged: int) -> float:
    """What a newcomer's work counts for, in pairs and in rounds, after ``merged`` merges."""
    return RAMP[min(merged, len(RAMP) - 1)]
