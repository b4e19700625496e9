"""Who is there: what islands have said about themselves, and whether they still answer.

Sans-IO bookkeeping: verified announcements, contacts and failures go in with ``now``; liveness
comes out. The patience with a silent peer follows from how regularly it has been heard before and
how long its link takes (:mod:`gossip.membership.silence`), so a loaded machine is given more time
than a quiet one, and a satellite more than a cable.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from gossip.membership.pulse import Beat, leads, tag_of
from gossip.membership.silence import Rhythm, silence_s
from gossip.membership.sketch import name_in
from gossip.membership.standing import seen_from
from gossip.membership.trips import ENOUGH, TRUSTED, RoundTrip, answer_s, stillness_s
from protocols.bounds import MAX_PEERS
from protocols.identity import PeerId
from protocols.messages import Announce

MEMBERS = ("island", "server")  # roles of those who decide and merge; servers do not train


class Liveness(StrEnum):
    """What this node believes about a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"  # silent for longer than usual, or a connection to it failed
    DEAD = "dead"  # silent for so long that nobody plans with it any more
    LEFT = "left"  # said farewell


class Heard(Enum):
    """What a heartbeat that somebody passes on is."""

    NEWS = auto()
    KNOWN = auto()  # as new a one has come
    STRANGE = auto()  # of an announcement that is not held here


THERE = (Liveness.ALIVE, Liveness.SUSPECT)


@dataclass(frozen=True)
class Patience:
    """How much silence is forgiven."""

    heartbeat_s: float = 1.0  # how often islands announce themselves
    unknown_beats: float = 4.0  # until a peer's rhythm and link are measured
    dead_floor_s: float = 10.0
    dead_factor: float = 4.0  # times what makes a peer suspect
    refused_dead_s: float = 3.0  # connections fail outright for this long: the process is gone
    forget_s: float = 600.0


@dataclass
class KnownPeer:
    """One peer as seen from here."""

    announce: Announce
    envelope: bytes  # the signed announcement, to be passed on
    sequence: int
    heard: float  # last announcement, or other sign of life
    said: float  # when the announcement came
    forgiven_s: float  # seconds of silence before it is suspect
    rhythm: Rhythm = field(default_factory=Rhythm)
    failing_since: float | None = None  # connections have been failing since
    trip: RoundTrip | None = None  # how long it takes to answer
    met: bool = False  # it has answered once: a connection stands
    expelled: bool = False  # it lied: nobody counts on it until it is forgotten
    origin: str = ""  # where it comes from (:mod:`gossip.membership.origin`), empty: not known
    observed: bool = False  # from a connection, not by its own word
    surplus: bool = False  # one too many from there: nobody counts on it until there is room
    expires: float = 0.0  # when the announcement does, by its own clock
    tag: bytes = b""  # of the announcement, for heartbeats that refer to it
    beat: int = 0  # number of the newest of them,
    pulse: bytes = b""  # its value,
    beaten: float = 0.0  # and when it came; the announcement is the first one
    sketch: bytes = b""  # name of the sketch that it announced; the sketch may have yet to come
    _views: dict[int, tuple[Announce, Announce]] = field(default_factory=dict)  # by fragment

    def seen_from(self, fragment: int) -> Announce:
        """What it announced, as if ``fragment`` were the only one."""
        whole, view = self._views.get(fragment, (None, self.announce))
        if whole is not self.announce:
            view = seen_from(self.announce, fragment)
            self._views[fragment] = (self.announce, view)
        return view

    def liveness(self, now: float, patience: Patience) -> Liveness:
        """Alive, suspect, dead or left, at ``now``."""
        if self.announce.status == "leaving":
            return Liveness.LEFT
        silence = now - self.heard
        if (
            self.expelled
            or self.surplus
            or silence > max(patience.dead_floor_s, patience.dead_factor * self.forgiven_s)
        ):
            return Liveness.DEAD
        if self.failing_since is not None:
            refused = now - self.failing_since > patience.refused_dead_s
            return Liveness.DEAD if refused else Liveness.SUSPECT
        return Liveness.SUSPECT if silence > self.forgiven_s else Liveness.ALIVE

    def counts_at(self, origin: str, observed: bool) -> bool:
        """Whether it is here as one from ``origin``, and is ``observed`` there if that is asked."""
        return not self.surplus and self.origin == origin and self.observed >= observed

    def measured(self, patience: Patience, others: RoundTrip) -> None:
        """Its rhythm or link was measured anew: update how long it may be silent.

        Heartbeats that are passed on come over the links of ``others``, taken together; and a node
        of a large swarm seldom calls any single one.
        """
        beat, trip = patience.heartbeat_s, self.trip
        if self.announce.pulse and (trip is None or trip.count < TRUSTED):
            trip = others
        self.forgiven_s = silence_s(beat, self.rhythm, trip, patience.unknown_beats * beat)


@dataclass
class Membership:
    """All peers this node has heard of in the run, itself excluded.

    Their places and contributions are those that they announced for one ``fragment``.
    """

    me: PeerId
    patience: Patience = field(default_factory=Patience)
    islands: dict[PeerId, KnownPeer] = field(default_factory=dict)
    fragment: int = 0
    most_from_one_place: int = 0  # 0: any number
    _tagged: dict[bytes, list[PeerId]] = field(default_factory=dict)  # by what they announced
    _trip: RoundTrip = field(default_factory=lambda: RoundTrip(0.0, 0.0, 0))  # of all together

    def seen_from(self, fragment: int) -> Membership:
        """The same peers, seen from another fragment."""
        mine = (self.me, self.patience, self.islands, fragment)
        return Membership(*mine, _tagged=self._tagged, _trip=self._trip)

    def on_announce(self, announce: Announce, envelope: bytes, sequence: int, now: float) -> bool:
        """Take a verified announcement; returns whether it was news.

        The newest incarnation wins, and within it the highest sequence number. When the table
        is full, the longest-silent peer that is dead or has left makes room; if there is none, the
        newcomer is not kept. Nobody loses its place by being silent for a moment: an attacker with
        any number of names may be waiting for that.
        """
        peer = announce.peer
        if peer == self.me:
            return False
        known = self.islands.get(peer)
        if known is None:
            if len(self.islands) >= MAX_PEERS and not self._evict(now):
                return False
            silence = self.patience.unknown_beats * self.patience.heartbeat_s
            known = KnownPeer(announce, envelope, sequence, now, now, silence)
            self.islands[peer] = known
        elif (announce.incarnation, sequence) <= (known.announce.incarnation, known.sequence):
            return False
        else:
            self._untag(peer)
            self._sign_of_life(known, now)
        name = name_in(announce.sketch)
        if name and name == announce.sketch == known.sketch:
            announce = replace(announce, sketch=known.announce.sketch)
        known.announce, known.envelope, known.sequence = announce, envelope, sequence
        known.said, known.sketch = now, name
        known.tag, known.beat, known.pulse = tag_of(envelope), 0, announce.pulse
        known.beaten = now
        self._tagged.setdefault(known.tag, []).append(peer)
        return True

    def on_beat(self, beat: Beat, now: float) -> tuple[Heard, PeerId | None]:
        """Take a heartbeat from whoever passed it on: what it is, and whose."""
        known = None
        for peer in self._tagged.get(beat.tag, ()):
            island = self.islands.get(peer)
            if island is None:
                continue
            if beat.number <= island.beat:
                known = peer
            elif leads(peer, beat.number, beat.value, island.beat, island.pulse):
                self._sign_of_life(island, now)
                island.beat, island.pulse, island.beaten = beat.number, beat.value, now
                return Heard.NEWS, peer
        return Heard.STRANGE if known is None else Heard.KNOWN, known

    def lacking(self) -> list[bytes]:
        """Names of the sketches that were announced and have not come."""
        islands = self.islands.values()
        return [i.sketch for i in islands if i.sketch and i.announce.sketch == i.sketch]

    def on_sketches(self, sketches: Iterable[bytes]) -> list[Announce]:
        """Take sketches; what those announced that had lacked them, with them."""
        wanted = set(self.lacking())
        found = {name: data for data in sketches if (name := name_in(data)) in wanted}
        complete = []
        for island in self.islands.values():
            if island.announce.sketch == island.sketch and island.sketch in found:
                island.announce = replace(island.announce, sketch=found[island.sketch])
                complete.append(island.announce)
        return complete

    def _sign_of_life(self, island: KnownPeer, now: float) -> None:
        """An announcement or a heartbeat of its own, whoever has brought it."""
        island.rhythm.add(now - island.beaten, self.patience.heartbeat_s)
        island.measured(self.patience, self._trip)
        island.heard, island.failing_since = now, None

    def _untag(self, peer: PeerId) -> None:
        """The announcement of this peer is not held any more."""
        tag = self.islands[peer].tag
        if others := [other for other in self._tagged.get(tag, ()) if other != peer]:
            self._tagged[tag] = others
        else:
            self._tagged.pop(tag, None)

    def _drop(self, peer: PeerId) -> None:
        self._untag(peer)
        del self.islands[peer]

    def crowded(self, peer: PeerId, origin: str, observed: bool, now: float) -> bool:
        """Whether as many others are here from ``origin`` as may come from one place.

        Peers that are dead or have left do not count: a machine may come back under another name.
        Nor, for a peer ``observed`` there, do mere claims of others: they could be from anywhere.
        """
        known, most = self.islands.get(peer), self.most_from_one_place
        if not (origin and most) or (known is not None and known.counts_at(origin, observed)):
            return False
        others = (
            island
            for other, island in self.islands.items()
            if island.origin == origin and other != peer and island.observed >= observed
        )
        return sum(i.liveness(now, self.patience) in THERE for i in others) >= most

    def on_contact(self, peer: PeerId, now: float) -> None:
        """The peer did something over an authenticated link: it is alive."""
        if (island := self.islands.get(peer)) is not None:
            island.heard, island.failing_since = now, None

    def on_answer(self, peer: PeerId, seconds: float) -> None:
        """The peer has answered a short call; the first one mostly took the time to connect."""
        island = self.islands.get(peer)
        if island is None:
            return
        if island.trip is not None:
            island.trip.add(seconds)
        elif island.met:
            island.trip = RoundTrip.first(seconds)
        if island.met:
            self._trip.add(seconds)
        island.met = True
        island.measured(self.patience, self._trip)

    def answer_s(self, peer: PeerId, unknown: float) -> float:
        """How long a peer may take to answer a short call, by what was measured."""
        island = self.islands.get(peer)
        return answer_s(island.trip if island else None, unknown)

    def trips(self, peers: Iterable[PeerId]) -> dict[PeerId, float]:
        """Seconds of the shortest round trip of late to each of these, where it is known."""
        islands = {peer: self.islands.get(peer) for peer in peers}
        known = {peer: island.trip for peer, island in islands.items() if island and island.trip}
        return {peer: trip.shortest for peer, trip in known.items() if trip.count >= ENOUGH}

    def stillness_s(self, peers: Iterable[PeerId], unknown: float) -> float:
        """For how long a transfer between any of these may stand still, by what was measured."""
        islands = (self.islands.get(peer) for peer in peers)
        return stillness_s((i.trip for i in islands if i is not None and i.trip), unknown)

    def on_unreachable(self, peer: PeerId, now: float) -> None:
        """A connection to the peer failed or broke."""
        island = self.islands.get(peer)
        if island is not None and island.failing_since is None:
            island.failing_since = now

    def expel(self, peer: PeerId) -> None:
        """The peer is known to lie: take it for dead from now on."""
        if (island := self.islands.get(peer)) is not None:
            island.expelled = True

    def forgive(self, seconds: float, now: float) -> None:
        """This process itself stood still for ``seconds``: nobody's silence in them counts."""
        for island in self.islands.values():
            island.heard = min(island.heard + seconds, now)
            if island.failing_since is not None:
                island.failing_since = min(island.failing_since + seconds, now)

    def forget_old(self, now: float) -> None:
        """Drop peers not heard of for a long time."""
        gone = [p for p, i in self.islands.items() if now - i.heard > self.patience.forget_s]
        for peer in gone:
            self._drop(peer)

    def liveness(self, peer: PeerId, now: float) -> Liveness:
        """Liveness of any peer; one never heard of is dead, this node itself is alive."""
        if peer == self.me:
            return Liveness.ALIVE
        island = self.islands.get(peer)
        return Liveness.DEAD if island is None else island.liveness(now, self.patience)

    def there(self, peer: PeerId, now: float) -> bool:
        """Whether a peer is alive, as far as it is known."""
        return self.liveness(peer, now) in THERE

    def alive(self, now: float) -> list[PeerId]:
        """Peers that are alive, in no particular order."""
        return [peer for peer in self.islands if self.liveness(peer, now) is Liveness.ALIVE]

    def announcement(self, peer: PeerId) -> Announce | None:
        """The newest announcement of a peer."""
        island = self.islands.get(peer)
        return island.seen_from(self.fragment) if island else None

    def eta(self, peer: PeerId, now: float) -> float:
        """Seconds until a peer is ready, by its last announcement and the time since."""
        return self.remaining_s(peer, self.islands[peer].seen_from(self.fragment).eta, now)

    def remaining_s(self, peer: PeerId, seconds: float, now: float) -> float:
        """What is left by now of the ``seconds`` in a peer's last announcement."""
        return max(0.0, seconds - (now - self.islands[peer].said))

    def members_alive(self, now: float) -> list[Announce]:
        """Announcements of the live peers that take part in rounds (no seeds, no observers)."""
        return [
            island.seen_from(self.fragment)
            for island in self.islands.values()
            if island.announce.role in MEMBERS
            and island.liveness(now, self.patience) is Liveness.ALIVE
        ]

    def _evict(self, now: float) -> bool:
        idle = [
            (island.heard, peer)
            for peer, island in self.islands.items()
            if island.liveness(now, self.patience) in (Liveness.DEAD, Liveness.LEFT)
        ]
        if not idle:
            return False
        self._drop(min(idle)[1])
        return True
