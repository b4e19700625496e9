"""What is done every so many rounds, where the count of rounds may leap over a multiple."""

from __future__ import annotations


class Multiples:
    """Of ``every`` rounds (0: never), counted from round ``start`` on."""

    def __init__(self, every: int, start: int) -> None:
        self._every = every
        self.pass_over(start)

    def pass_over(self, round_: int) -> None:
        """Count all multiples up to ``round_`` as done."""
        self._past = round_ // self._every if self._every else 0

    def due(self, round_: int) -> bool:
        """Whether a multiple has come since this was asked last."""
        before = self._past
        self.pass_over(round_)
        return self._past > before
