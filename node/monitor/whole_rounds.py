"""Rounds of a model that is merged in fragments, as rounds of the whole model."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from node.monitor.events import RoundDone

MAX_PARTS = 64  # rounds of other fragments that count to one of fragment 0
_SUMMED = ("sent_bytes", "received_bytes", "raw_bytes")


class WholeRounds:
    """Puts rounds of fragments together: fragment 0's tells of all, what was sent is added up."""

    def __init__(self) -> None:
        self._parts: deque[RoundDone] = deque(maxlen=MAX_PARTS)  # since fragment 0's last round

    def take(self, done: RoundDone) -> RoundDone | None:
        """Fragment 0's round with the bytes of the others' before it; None for one of these."""
        if done.fragment:
            self._parts.append(done)
            return None
        parts = [done, *self._parts]
        self._parts.clear()
        sums = {name: sum(getattr(part, name) for part in parts) for name in _SUMMED}
        return replace(done, **sums)
