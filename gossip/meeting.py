"""A meeting of two: both send what they have, both take what comes, nobody waits for long.

Sending and receiving run side by side. Whoever hears nothing within its patience goes on alone:
a partner that vanished, that is slow, or that knows other members costs one exchange. No agreement
is needed afterwards: the rules of :mod:`diloco.mixing` (the caller's business) hold for each side
by itself, and a one-sided exchange only lets the mean drift by what one of two took.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from gossip.mailbox import Mailbox
from gossip.pairing import neighbours, partner
from protocols.identity import PeerId


@dataclass
class Meetings:
    """One island's exchanges with partners that follow from the round."""

    box: Mailbox
    me: PeerId
    seed: bytes
    patience_s: float = 5.0
    missed: int = 0  # exchanges that came to nothing
    last: dict[PeerId, int] = field(default_factory=dict)  # the round of the newest exchange

    async def meet(
        self, members: Sequence[PeerId], round_: int, body: Tensor, meeting: int = 0
    ) -> Tensor | None:
        """The partner's bytes; None where there is no partner, or none that answers."""
        other = partner(members, self.me, round_, self.seed, meeting)
        if other is None:
            return None
        subject = f"pair {round_} {meeting}"
        async with asyncio.TaskGroup() as group:
            sending = group.create_task(
                self.box.send(other, subject, body, timeout=self.patience_s)
            )
            coming = group.create_task(self.box.receive(subject, other, timeout=self.patience_s))
        theirs = coming.result()
        if theirs is None or not sending.result():
            self.missed += 1
        else:
            self.last[other] = round_
        return theirs

    async def spread(
        self, members: Sequence[PeerId], round_: int, body: Tensor, count: int
    ) -> list[PeerId]:
        """Send to ``count`` neighbours without waiting for anything; who could not be reached."""
        others = neighbours(members, self.me, round_, self.seed, count)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(self.box.send(other, "share", body, timeout=self.patience_s))
                for other in others
            ]
        return [other for other, task in zip(others, tasks, strict=True) if not task.result()]
