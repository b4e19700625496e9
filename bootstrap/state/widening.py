"""How many sources a download asks: each makes a copy of its whole state for it."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_SOURCES = 2
WINDOW_S = 5.0  # over which arriving bytes are measured
WORTH_S = 20.0  # a download that will end sooner asks no further source
QUIET_S = 5.0  # a source without an answer for this long gets another one beside it
GAIN = 0.5  # least, of what a further source as fast as the others would bring


@dataclass
class Widening:
    """Says when to ask one source more: two at first, and further ones as long as that helps.

    Where the newcomer's own link is full two bring as much as eight, and six members less have to
    find memory for a copy.
    """

    most: int
    now: float  # when the window began
    asked: int = FIRST_SOURCES
    _came: int = 0  # bytes, when the window began
    _quiet: int = 0  # sources without an answer that others were asked beside
    _before: float = 0.0  # bytes a second with one source fewer

    def due(self, now: float, came: int, left: int, *, bringing: int, quiet: int) -> bool:
        """Whether to ask one more now, where ``came`` bytes have arrived and ``left`` are lacking.

        ``bringing``: sources from which a byte has come. ``quiet``: those that have answered
        nothing for :data:`QUIET_S`, neither their offer nor a byte of their first chunk.
        """
        if self.asked >= self.most:
            return False
        if quiet > self._quiet:
            self._quiet += 1
            return self._more()
        seconds = now - self.now
        if bringing < self.asked - self._quiet:  # one makes its copy: what comes tells nothing
            self.now, self._came = now, came
            return False
        if seconds < WINDOW_S:
            return False
        rate = (came - self._came) / seconds
        self.now, self._came = now, came
        helped = rate >= self._before * (1 + GAIN / max(1, bringing - 1))
        if not helped or left <= rate * WORTH_S:
            return False
        self._before = rate
        return self._more()

    def _more(self) -> bool:
        self.asked += 1
        return True
