"""How a node that is behind catches up: by replaying rounds or by a download, and how soon. Pure.

Fed with what was measured. A replay costs the bytes of a round, a download those of the state; what
has not been measured yet follows from the other by the sizes. A download may have been measured
long ago, over a link that carried more: it is never quicker than the link allows now.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId

GAINS = 0.8  # of the others' pace: who needs more for a replay hardly comes nearer, or not at all
WORTH = 1.5  # a download has to be quicker by so much
WEIGHT = 0.3  # of the newest replay
STALE = 0.1  # of it, in what a download is taken for that was slower once
KEPT_OUT = 3  # times it was where the others are, and still not in office: always a bit too late
LITTLE = 1 / 8  # of a download: says little about how long it takes, and may be left at any time


@dataclass
class Approach:
    """Of one fragment. ``round_bytes``: of its merged parts; no ``state_bytes``: no downloads."""

    round_bytes: int
    state_bytes: int
    link: Callable[[], float] = lambda: 0.0  # bytes a second that come in now, 0: not known
    downloading: bool = False
    asking: bool = False  # for the others to wait
    _arrivals: int = 0  # since this node was last in office
    _replay_s: float = 0.0  # 0: not measured
    _replaying_since: float | None = None
    _download_s: float = 0.0
    _began: float = 0.0
    _done: float = 0.0  # of the download that is under way,
    _missed: int = 0  # and rounds that were missing when it began
    _heard: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # where, and when
    _pace: deque[float] = field(default_factory=lambda: deque(maxlen=15))  # seconds a round

    # --- what was measured -----------------------------------------------------------------------

    def heard(self, peer: PeerId, round_: int, now: float) -> None:
        """A peer says that it stands there."""
        before, at = self._heard.get(peer, (round_, now))
        if round_ > before:
            self._pace.append((now - at) / (round_ - before))
        if round_ != before or peer not in self._heard:
            self._heard.pop(peer, None)
            self._heard[peer] = (round_, now)
            if len(self._heard) > MAX_PEERS:
                del self._heard[next(iter(self._heard))]

    def replays(self, since: float | None) -> None:
        """A round is being replayed since then, None: none is."""
        self._replaying_since = since

    def replayed(self, seconds: float) -> None:
        """One round was replayed.

        A download was measured before, maybe while hardly anybody could be reached: it is tried
        again after some replays, for who only replays would never measure another one.
        """
        self._replay_s += (WEIGHT if self._replay_s else 1.0) * (seconds - self._replay_s)
        if self._download_s and self.round_bytes:
            by_size = seconds * self.state_bytes / self.round_bytes
            self._download_s += STALE * min(0.0, by_size - self._download_s)

    def in_office(self) -> None:
        """This node is one of those who decide."""
        self._arrivals = 0

    def arrived(self) -> None:
        """It has caught up, for the moment."""
        self._arrivals += 1

    def downloaded(self, seconds: float) -> None:
        """The state was downloaded.

        A replay was measured before, maybe while this machine was busy with starting: it is tried
        again after some downloads, for who only downloads would never measure another one.
        """
        self._download_s = seconds
        if self._replay_s and self.state_bytes:
            by_size = seconds * self.round_bytes / self.state_bytes
            self._replay_s += WEIGHT * min(0.0, by_size - self._replay_s)

    def begins(self, missing: int, now: float) -> None:
        """A download is begun, at a time when so many rounds are missing here."""
        self.downloading, self._began, self._missed, self._done = True, now, missing, 0.0

    def progress(self, done: int, total: int, sources: int) -> None:
        """So many of its bytes are here, from so many peers."""
        del sources
        self._done = done / total if total else 0.0

    def ends(self, now: float, *, arrived: bool) -> None:
        """It has ended; who got nothing by it takes downloads for slower than it thought."""
        self.downloading, taken = False, now - self._began
        if not arrived:
            self._replay_s, taken = self.replay_s, 2 * max(taken, self.download_s)
        self.downloaded(taken)

    # --- what follows ----------------------------------------------------------------------------

    @property
    def replay_s(self) -> float:
        """Seconds for one round, 0: not known."""
        if self._replay_s or not self.state_bytes:
            return self._replay_s
        return self._download_s * self.round_bytes / self.state_bytes

    @property
    def download_s(self) -> float:
        """Seconds for the state, 0: not known."""
        found, link = self._download_s, self.link()
        if not found and self.round_bytes:
            found = self._replay_s * self.state_bytes / self.round_bytes
        return max(found, self.state_bytes / link) if found and link > 0 else found

    def is_far(self, missing: int) -> bool:
        """Whether a download brings it nearer than replaying ``missing`` rounds.

        Whether the others go on meanwhile makes no difference: they go as far in either time.
        """
        return missing * self.replay_s > WORTH * self.download_s > 0

    def asks(self, missing: int, now: float) -> float:
        """Seconds in which it would stand where the others do, if they waited; 0: they need not.

        It asks only if it does not come nearer otherwise, or is there each time just after the
        others have planned without it; and then until it is there.
        """
        if missing <= 0 and not self.downloading:
            self.asking = False
        elif not self.asking and self._pace:
            slow = self.replay_s > GAINS * median(self._pace)
            self.asking = slow or self._arrivals >= KEPT_OUT
        return self._needs(max(0, missing), now) if self.asking else 0.0

    def _needs(self, missing: int, now: float) -> float:
        if not self.downloading:
            return self._then(missing, self._replayed_s(now))
        taken = now - self._began
        whole = taken / self._done if self._done > LITTLE else max(taken, self.download_s)
        return max(whole - taken, LITTLE * whole) + self._then(missing - self._missed)

    def _replayed_s(self, now: float) -> float:
        """Seconds less than usual that the round takes which is being replayed."""
        taken = 0.0 if self._replaying_since is None else now - self._replaying_since
        return min(taken, (1 - LITTLE) * self.replay_s)

    def _then(self, missing: int, replayed_s: float = 0.0) -> float:
        """Seconds for so many rounds, by the quicker way."""
        if self.is_far(missing):
            return self.download_s
        return max(0.0, missing * self.replay_s - replayed_s)
