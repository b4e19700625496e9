"""How a node that is behind catches up: by replay or by download, and how soon. Sans-IO.

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

GAINS = 0.8  # of the others' seconds a round: with slower replays a node hardly comes nearer
WORTH = 1.5  # times: a download has to be this much quicker than replaying
WEIGHT = 0.3  # of the newest replay
STALE = 0.1  # of the newest replay, in the time of a download that was measured as slower
IN_VAIN = 3  # downloads without coming into office
KEPT_OUT = 3  # arrivals at the others' place without coming into office: always a bit too late
LITTLE = 1 / 8  # of a download: so little done says nothing; and this much may always be left


@dataclass
class Approach:
    """One fragment's. ``round_bytes``: a round's merged parts; ``state_bytes`` 0: no downloads."""

    round_bytes: int
    state_bytes: int
    link: Callable[[], float] = lambda: 0.0  # bytes a second that come in now, 0: not known
    downloading: bool = False
    asking: bool = False  # for the others to wait
    _arrivals: int = 0  # since this node was last in office
    _downloads: int = 0  # since then
    _named: int | None = None  # in office since this round; None: it is not
    _replay_s: float = 0.0  # 0: not measured
    _replaying_since: float | None = None
    _download_s: float = 0.0
    _began: float = 0.0
    # shares of the download under way: what is here of it, and what was here before
    _done: float = 0.0
    _had: float = 0.0
    _missed: int = 0  # rounds that were missing when it began
    _heard: dict[PeerId, tuple[int, float]] = field(default_factory=dict)  # where, and when
    _pace: deque[float] = field(default_factory=lambda: deque(maxlen=15))  # seconds a round

    # --- what was measured -----------------------------------------------------------------------

    def heard(self, peer: PeerId, round_: int, now: float) -> None:
        """A peer says that it stands at ``round_``."""
        before, at = self._heard.get(peer, (round_, now))
        if round_ > before:
            self._pace.append((now - at) / (round_ - before))
        if round_ != before or peer not in self._heard:
            self._heard.pop(peer, None)
            self._heard[peer] = (round_, now)
            if len(self._heard) > MAX_PEERS:
                del self._heard[next(iter(self._heard))]

    def replays(self, since: float | None) -> None:
        """A round has been under replay since then; None: none is."""
        self._replaying_since = since

    def replayed(self, seconds: float) -> None:
        """One round was replayed.

        The last download may have been slow because hardly anybody could be reached. So replays
        bring its time down towards what the sizes suggest: a node that only replays would never
        measure another download.
        """
        self._replay_s += (WEIGHT if self._replay_s else 1.0) * (seconds - self._replay_s)
        if self._download_s and self.round_bytes:
            by_size = seconds * self.state_bytes / self.round_bytes
            self._download_s += STALE * min(0.0, by_size - self._download_s)

    def stands(self, round_: int, *, in_office: bool) -> None:
        """This node stands at ``round_``; ``in_office``: it is one of those who decide it.

        Whoever was named for a round and comes to it late may be put out by those who went on.
        So it is in office for good only once it is named for the next round, too.
        """
        if not in_office:
            self._named = None
        elif self._named is None:
            self._named = round_
        elif round_ != self._named:
            self._arrivals = self._downloads = 0

    def arrived(self) -> None:
        """It has caught up, for the moment."""
        self._arrivals += 1

    def downloaded(self, seconds: float) -> None:
        """The state was downloaded.

        The last replay may have been slow because this machine was busy starting. So downloads
        bring its time down towards what the sizes suggest: a node that only downloads would never
        measure another replay.
        """
        self._download_s = seconds
        if self._replay_s and self.state_bytes:
            by_size = seconds * self.round_bytes / self.state_bytes
            self._replay_s += WEIGHT * min(0.0, by_size - self._replay_s)

    def begins(self, missing: int, now: float) -> None:
        """A download begins, while ``missing`` rounds are missing here."""
        self.downloading, self._began, self._missed = True, now, missing
        self._done = self._had = 0.0

    def came(self, share: float) -> None:
        """So much of the download under way has come: of 1, as far as that is known."""
        self._done = share

    def had(self, share: float) -> None:
        """So much of the download under way was here before it began."""
        self._done = self._had = share

    def ends(self, now: float, *, arrived: bool) -> None:
        """It has ended; if it failed, downloads are taken to be slower than was thought.

        One of which next to all was here before says nothing of others.
        """
        self.downloading, taken = False, now - self._began
        self._downloads += 1
        if not arrived:
            self._replay_s, taken = self.replay_s, 2 * max(taken, self.download_s)
            self.downloaded(taken)
        elif (missed := 1.0 - self._had) > LITTLE:
            self.downloaded(taken / missed)

    # --- what follows ----------------------------------------------------------------------------

    @property
    def narrow(self) -> tuple[float, float] | None:
        """Seconds in which a round is replayed here and made by the others, where that is in vain.

        None: it comes nearer, or may yet.
        """
        if not self.asking or self._downloads < IN_VAIN:
            return None
        return self.replay_s, median(self._pace)

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
        """Seconds after which it would have caught up if the others waited; 0: they need not.

        It asks only if it does not come nearer otherwise, or if it always arrives just after the
        others have planned without it; and then it asks until it is there.
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
        taken, missed = now - self._began, 1.0 - self._had
        came = (self._done - self._had) / missed if missed else 1.0
        whole = taken / came if came > LITTLE else max(taken, missed * self.download_s)
        return max(whole - taken, LITTLE * whole) + self._then(missing - self._missed)

    def _replayed_s(self, now: float) -> float:
        """Seconds that are over of the replay under way, at most nearly all of the usual time."""
        taken = 0.0 if self._replaying_since is None else now - self._replaying_since
        return min(taken, (1 - LITTLE) * self.replay_s)

    def _then(self, missing: int, replayed_s: float = 0.0) -> float:
        """Seconds for so many rounds, by the quicker way."""
        if self.is_far(missing):
            return self.download_s
        return max(0.0, missing * self.replay_s - replayed_s)
