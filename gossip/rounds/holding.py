"""How long those who are ready hold a round back for a member that cannot catch up alone. Sans-IO.

A node that needs longer to replay a round than the others need to make one never catches up,
however near it comes. So it says in how many seconds it would be there if the others waited
(``Announce.behind_s``), and they wait: for each request at most twice what it says, and for all of
them together no longer than a credit, which grows by a share of the time. The more are in office,
the shorter a single wait may be, since they drift apart meanwhile, and the smaller is that share
(:func:`share`): a lone member has nobody to drift from, and a second one is worth most to it. A
node that was waited for in vain is not waited for again for a while, four times as long each time.

So a hopeless link holds up nothing, any number of liars that share of the time, and one of them a
few rounds a day. Inner steps go on meanwhile, and none of them is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping
from dataclasses import dataclass, field

from gossip.membership.trips import LEAST_S
from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId

SHARE = 0.1  # of the time may go into waiting for others
ALONE = 0.5  # of it, where there is one member; n have 1/n of this, but no less than the above
FIRST_S = 60.0  # to begin with
MOST_S = 1800.0  # that can be saved up, and longest wait of a lone member; n wait 1/n of it
SLACK = 2.0  # times: a peer's estimate may be off by this,
MARGIN_S = 3 * LEAST_S  # and by this, for a message that is lost
ENOUGH = 1.5  # times its estimate: no wait begins for which there is less credit
QUIET_S = 10.0  # after it was waited for in vain once, four times as long after the next time
QUIETER = 4.0
MOST_VAIN = 8  # times that are counted
NO_MORE = -1.0  # asked for by a member that has come where it was waited for: all may move on


def share(members: int) -> float:
    """Of the time, what ``members`` in number may spend on waiting for others."""
    return max(SHARE, ALONE / members)


@dataclass
class Holding:
    """What one member has waited, in all rounds of a fragment; it lives as long as the chain."""

    credit: float = FIRST_S  # seconds
    _share: float = SHARE  # of the time, by how many they were last
    _looked: float | None = None
    _until: dict[PeerId, float] = field(default_factory=dict)  # who is waited for, and until when
    _vain: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # times, and until when

    @property
    def awaited(self) -> Collection[PeerId]:
        """Who is waited for now."""
        return self._until.keys()

    def holds(
        self, asks: Mapping[PeerId, float], here: Container[PeerId], members: int, now: float
    ) -> bool:
        """Whether ``members`` in number, who could begin, are to wait for those in ``asks``.

        ``asks``: the seconds each needs. ``here``: who has come meanwhile, and may ask for more, to
        get ready. To be called repeatedly while nothing else is waited for, and then :meth:`over`.
        """
        self._count(now)
        self._share = share(members)
        left = min(self.credit, MOST_S / members)
        modest = {peer: seconds for peer, seconds in asks.items() if 0 <= seconds <= left}
        for peer, until in list(self._until.items()):
            if peer in modest and now < until:
                continue
            del self._until[peer]
            if peer in here:
                self._vain.pop(peer, None)
            elif asks.get(peer) != NO_MORE:  # it may ask for more in a moment
                self._in_vain(peer, now)
        for peer, seconds in modest.items():
            known = peer in self._until or peer in here
            if not known and ENOUGH * seconds <= left and self._may(peer, now):
                self._until[peer] = now + min(left, SLACK * seconds + MARGIN_S)
        return bool(self._until)

    def spend_all(self) -> None:
        """Wait for whoever asks, as long as that may be: this member will not need a credit again.

        Also for peers that were waited for in vain: there is nobody else to wait for them.
        """
        self.credit = MOST_S
        self._vain.clear()

    def over(self, now: float) -> None:
        """The round has begun, or is over: nobody is waited for."""
        self._count(now)
        self._until.clear()

    def _count(self, now: float) -> None:
        passed = 0.0 if self._looked is None else max(0.0, now - self._looked)
        self._looked = now
        gained = -passed if self._until else self._share * passed
        self.credit = min(MOST_S, max(0.0, self.credit + gained))

    def _may(self, peer: PeerId, now: float) -> bool:
        return now >= self._vain.get(peer, (0, now))[1]

    def _in_vain(self, peer: PeerId, now: float) -> None:
        times, _ = self._vain.pop(peer, (0, 0.0))
        self._vain[peer] = (min(times + 1, MOST_VAIN), now + QUIET_S * QUIETER**times)
        if len(self._vain) > MAX_PEERS:
            del self._vain[next(iter(self._vain))]
