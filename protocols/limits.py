"""The bounds of a transport."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one transport. Seconds, bytes, bytes a second, connections."""

    connect: float = 5.0  # for one address, TLS handshake included
    handshake: float = 10.0  # for a stranger's TLS handshake
    stall: float = 15.0  # without progress of a body
    min_rate: float = 1024.0
    longest: float = 6 * 3600.0  # that a plan may expect a round's bodies to take
    idle_server: float = 90.0  # an unused connection, and the time for a request's head
    idle_client: float = 30.0  # less than the server's, so that the server never closes first
    per_ip: int = 256
    total: int = 2048
    per_peer: int = 32  # connections to one peer for calls, and as many lanes: two rounds' streams
    bodies: int = 256 << 20  # of calls, and answers until they are taken, all together
    grace: float = 0.5  # for handlers at the end
    linger: float = 2.0  # so that a refusal reaches a peer that is still sending

    def within(self, files: int) -> Self:
        """The same for a process that may have ``files`` open: connections get half of them."""
        total = min(self.total, files // 2)
        return replace(self, total=total, per_ip=min(self.per_ip, total))

    def least(self, length: int, *, slow: bool) -> float:
        """Bytes a second that a body has to move at; ``slow``: whoever moves it judges its pace.

        All lanes of a node share its link, or its limit, so a lane of a large round may get next to
        nothing. Of such a body any byte is progress, if only it would end within ``longest``.
        """
        return min(self.min_rate, length / self.longest) if slow else self.min_rate
