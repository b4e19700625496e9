"""What a node does in a swarm in which too many are there to tell each of them everything.

It announces what has changed, and otherwise only that it is alive (:mod:`gossip.membership.pulse`).
It passes on what is news to it (:mod:`gossip.membership.rumours`), asks for announcements and
sketches that others have named, and for heartbeats that are overdue.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterable, Set
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Protocol

from gossip.membership.drift import outdated
from gossip.membership.members import THERE, Heard, Membership
from gossip.membership.pulse import Beat, HashChain, beats_in, packed, tag_of
from gossip.membership.rumours import FANOUT, PAUSE_S, Rumours
from gossip.wiring import Wiring
from protocols.asking import ask
from protocols.bounds import MAX_PEERS
from protocols.errors import Crowded, RemoteProtocolError, Stale, TransportError
from protocols.identity import PeerId
from protocols.messages import BEAT_BYTES, TAG_BYTES, Announce, Known, KnownRequest

CALL_TIMEOUT_S = 5.0
AT_ONCE = 2  # announcements on their way to one peer: of later ones only the newest waits
ASKED_AT_ONCE = 8  # questions to one peer; what it names meanwhile others name as well
RENEW_S = 25.0  # what is older is hardly passed on to newcomers any more
CLOCK_S = 5.0  # by which the wall clock may have been put right or back before that is news
OVERDUE = 1.3  # heartbeats: others have had the next one by then


class CrowdHost(Protocol):
    """What a :class:`Crowd` needs of the node's presence, which does with news what is to be
    done."""

    wiring: Wiring
    membership: Membership

    def on_news(self, announce: Announce, /) -> None: ...

    def on_rejected(self, peer: PeerId, error: RemoteProtocolError, /) -> None: ...

    def office(self) -> Collection[PeerId]: ...

    def crowded(self) -> bool: ...

    def learn(
        self,
        envelope: bytes,
        sender: PeerId | None = None,
        *,
        pass_on: bool = False,
        pushed_by: PeerId | None = None,
    ) -> Announce: ...

    def contact(self, peer: PeerId) -> None: ...

    def notice(self, peer: PeerId) -> None: ...

    async def say(self, peer: PeerId, name: str, body: bytes) -> bytes: ...


@dataclass
class Said:
    """This node's newest announcement, and its heartbeats since."""

    envelope: bytes
    status: Announce
    at: float
    wall: float  # Unix seconds: it expires by these
    chain: HashChain

    def due(self, now: float, wall: float, status: Announce) -> bool:
        """Whether it is time for another one."""
        passed = now - self.at
        jumped = abs(wall - self.wall - passed) > CLOCK_S  # or the machine was suspended
        old = self.chain.spent or passed >= RENEW_S or jumped
        return old or outdated(self.status, status, passed)

    def beat(self) -> Beat:
        """The newest heartbeat."""
        return Beat(tag_of(self.envelope), self.chain.number, self.chain.value)


@dataclass
class Crowd:
    """One node's part in what goes round in a large swarm."""

    host: CrowdHost
    said: Said | None = None
    rumours: Rumours = field(init=False)
    _spreading: bool = False
    _asking: Counter[PeerId] = field(default_factory=Counter)  # questions under way

    def __post_init__(self) -> None:
        self.rumours = Rumours(self._wiring.identity.peer_id)
        self._wiring.transport.on_call("gossip", self._on_gossip)

    @property
    def _wiring(self) -> Wiring:
        return self.host.wiring

    @property
    def _membership(self) -> Membership:
        return self.host.membership

    # --- telling -------------------------------------------------------------------------------

    def tell(self) -> None:
        """Announce what this node has just said."""
        assert self.said is not None
        self.pass_on(self._wiring.identity.peer_id, self.said.envelope, whole=True)

    def beat(self) -> None:
        """Say that this node is alive, and that what it has said still holds."""
        assert self.said is not None
        self.said.chain.next()
        self.rumours.beat(self._wiring.identity.peer_id, self.said.beat())
        self._start()

    def pass_on(self, peer: PeerId, envelope: bytes, *, whole: bool) -> None:
        """This is news of a peer: pass it on to some others, or only that it is there."""
        if whole:
            self.rumours.add(peer, envelope)
        elif (island := self._membership.islands.get(peer)) is not None:
            self.rumours.met(envelope)
            self.rumours.beat(peer, Beat(island.tag, island.beat, island.pulse))
        self._start()

    def _start(self) -> None:
        if not self._spreading:
            self._spreading = True
            self._wiring.spawn(self._spread())

    async def _spread(self) -> None:
        """Pass on rumours until there are none; those that come meanwhile go together."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while True:
                batch, beats = self.rumours.batch(), self.rumours.beats()
                if not (batch or beats):
                    return
                now = self._wiring.now()
                there = partial(self._membership.there, now=now)
                overdue = b"".join(beat.packed() for beat in self._overdue(now))
                body = Known(batch, (beats + overdue)[: BEAT_BYTES * MAX_PEERS]).encode()
                peers = list(self._membership.islands)
                for peer in self.rumours.targets(peers, there, self.host.office()):
                    task = self._wiring.spawn(self._push(peer, body))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                await asyncio.sleep(PAUSE_S)
                while len(under_way) > AT_ONCE * FANOUT:  # add nothing to what is slow to arrive
                    await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._spreading = False

    async def _push(self, peer: PeerId, body: bytes) -> None:
        """Pass on, and take the newer heartbeats that the peer has."""
        if reply := await self.host.say(peer, "gossip", body):
            try:
                self.take_beats(Known.decode(reply).beats, peer)
            except RemoteProtocolError as error:
                self.host.on_rejected(peer, error)

    def _overdue(self, now: float) -> Iterable[Beat]:
        """The last heartbeats of those whose next one has come to most others by now."""
        membership = self._membership
        late = now - OVERDUE * membership.patience.heartbeat_s
        for island in membership.islands.values():
            if not island.announce.pulse or island.beaten > late:
                continue
            if island.liveness(now, membership.patience) in THERE:
                yield Beat(island.tag, island.beat, island.pulse)

    # --- hearing -------------------------------------------------------------------------------

    async def _on_gossip(self, sender: PeerId, body: bytes) -> bytes:
        self.host.contact(sender)
        known = Known.decode(body)
        self._take(known, sender, pushed=True)
        newer = self.take_beats(known.beats, sender)
        return Known((), b"".join(beat.packed() for beat in newer)).encode() if newer else b""

    def _take(self, known: Known, sender: PeerId, *, pushed: bool) -> None:
        """Take announcements that are passed on, and sketches; ask for those it names besides."""
        named = set[bytes]()
        for envelope in known.announces:
            if self.rumours.met(envelope):
                continue
            try:
                by = sender if pushed else None
                named.add(self.host.learn(envelope, pass_on=True, pushed_by=by).sketch)
            except (Stale, Crowded):
                continue  # it has expired, or is not accepted: its sender may not know
            except RemoteProtocolError as error:
                self.host.on_rejected(sender, error)
        if known.sketches:
            for announce in self._membership.on_sketches(known.sketches):
                self.host.on_news(announce)
        self.fetch_sketches(sender, named)

    def take_beats(self, data: bytes, sender: PeerId) -> list[Beat]:
        """Take heartbeats, and ask for the announcements of those that are strange here.

        Returns the newer ones that are known here.
        """
        now, newer, strange = self._wiring.now(), list[Beat](), set[bytes]()
        for beat in beats_in(data):
            heard, peer = self._membership.on_beat(beat, now)
            if heard is Heard.STRANGE:
                strange.add(beat.tag)
            elif peer is None:
                continue
            elif heard is Heard.NEWS:
                self.host.notice(peer)
                self.host.on_news(self._membership.islands[peer].announce)  # it says so still
                if self.host.crowded():
                    self.rumours.beat(peer, beat)
                    self._start()
            elif (known := self._membership.islands[peer]).beat > beat.number:
                newer.append(Beat(known.tag, known.beat, known.pulse))
        self._fetch(sender, strange)
        return newer

    def fetch_sketches(self, peer: PeerId, named: Set[bytes] | None = None) -> None:
        """Ask a peer for the sketches that are lacking here, of those that it has ``named``."""
        lacking = self._membership.lacking() if named is None or named else ()
        found = [name[:TAG_BYTES] for name in lacking if named is None or name in named]
        self._fetch(peer, found)

    def _fetch(self, peer: PeerId, tags: Collection[bytes]) -> None:
        if not tags or self._asking[peer] >= ASKED_AT_ONCE:
            return
        mine = {self.said.beat().tag} if self.said is not None else set[bytes]()
        wanted = self.rumours.wanted(islice(set(tags) - mine, MAX_PEERS), self._wiring.now())
        if wanted:
            self._asking[peer] += 1
            asking = self._wiring.spawn(self._ask(peer, wanted))
            asking.add_done_callback(lambda _: self._asked(peer))

    def _asked(self, peer: PeerId) -> None:
        self._asking[peer] -= 1
        if not self._asking[peer]:
            del self._asking[peer]

    async def _ask(self, peer: PeerId, wanted: Collection[bytes]) -> None:
        request = KnownRequest(want=packed(wanted))
        transport = self._wiring.transport
        try:
            known = await ask(transport, peer, "known", request, Known, timeout=CALL_TIMEOUT_S)
            self._take(known, peer, pushed=False)
            self.take_beats(known.beats, peer)
        except RemoteProtocolError as error:
            self.host.on_rejected(peer, error)
        except TransportError:
            return  # others name it as well
        else:
            self.host.contact(peer)
