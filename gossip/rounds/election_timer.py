"""When a member of a round stands for leader: each a turn later than the one before. Sans-IO.

This is an election timeout as in Raft, but by a known order instead of by chance. A turn lasts one
patience (seconds): long enough for a candidate to ask and be answered. Whoever has promised waits
for its own turn from then on, and no longer by being asked again. So two candidates at once are the
exception, and cost nothing but time.
"""

from __future__ import annotations

from dataclasses import dataclass

AGAIN = 2  # patiences until a member that did not get to lead stands again


@dataclass
class ElectionTimer:
    """Since when a leader, or a majority, is missing as one member sees it; when it stood last."""

    _due_since: float | None = None  # since when a leader ought to have acted
    _lost_since: float | None = None  # since when most are gone
    _stood_at: float | None = None

    def due(self, now: float) -> None:
        """A leader ought to act."""
        if self._due_since is None:
            self._due_since = now

    def not_due(self) -> None:
        """Nothing is to be done, or somebody does it."""
        self._due_since = None

    def put_off(self, now: float) -> None:
        """Somebody else stands: all others wait for their turn from now."""
        self._due_since = now

    def lost_for(self, now: float) -> float:
        """Most are gone: for how many seconds by now."""
        if self._lost_since is None:
            self._lost_since = now
        return now - self._lost_since

    def not_lost(self) -> None:
        """A majority is there, or I am not to go on without one."""
        self._lost_since = None

    def leading(self) -> None:
        """I propose a plan: should it fail as well, I stand at once."""
        self._due_since = self._lost_since = self._stood_at = None

    def my_turn(self, turn: int, now: float, patience: float) -> bool:
        """Whether I stand, as the ``turn``-th (from 0) who can, since a leader is due."""
        return self._stand(self._due_since, turn, now, patience)

    def my_turn_to_reform(self, turn: int, now: float, patience: float) -> bool:
        """Whether I stand, as the ``turn``-th (from 0) of those left, since most are gone."""
        return self._stand(self._lost_since, 1 + turn, now, patience)

    def _stand(self, since: float | None, turns: int, now: float, patience: float) -> bool:
        if since is None or now < since + turns * patience:
            return False
        if self._stood_at is not None and now < self._stood_at + AGAIN * patience:
            return False
        self._stood_at = now
        return True
