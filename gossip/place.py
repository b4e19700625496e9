"""Where in a chain a round stands: what plans, announcements and votes are about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Where in the chain a round stands."""

    run: bytes
    fragment: int
    round: int
    previous: bytes
    state: bytes
    work: int

    @property
    def at(self) -> tuple[int, bytes]:
        """The round, and the certificate that it builds on, which tells a fork's sides apart."""
        return (self.round, self.previous)
