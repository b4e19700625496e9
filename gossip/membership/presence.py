"""Announcements: what this node says about itself, and what it hears about others.

Every second or so, and whenever something about it changes, a node signs an
:class:`~protocols.messages.Announce` and sends it to everybody who is there as far as it knows; in
a large swarm to a few, who pass it on (:mod:`gossip.membership.crowd`). To find out who else is
there, a node asks any other for the announcements that it holds (``known``). They are signed, so it
does not matter who passes them on.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from gossip.membership.answering import NO_BEAT, Held, answer, short_name
from gossip.membership.crowd import AT_ONCE, CALL_TIMEOUT_S, Crowd, Said
from gossip.membership.doorkeeper import Doorkeeper
from gossip.membership.members import THERE, Liveness, Membership
from gossip.membership.opening import open_announce
from gossip.membership.pulse import Beat, HashChain, tags_in
from gossip.membership.rumours import EVERYBODY
from gossip.membership.silence import Wakefulness
from gossip.membership.sketch import name_in
from gossip.membership.standing import fragments, with_places
from gossip.place import Place
from gossip.wiring import Wiring
from protocols.asking import ask
from protocols.envelope import seal
from protocols.errors import (
    BadSignature,
    Crowded,
    Malformed,
    RemoteProtocolError,
    Stale,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.messages import (
    MAX_ANNOUNCE_BYTES,
    Announce,
    Known,
    KnownRequest,
)

LIFETIME_S = 60.0
TRIES = 3  # of an announcement whose connection breaks
ASK_EVERY = 5  # heartbeats between two questions for who else is there


@dataclass
class Presence:
    """This node's presence in a run. ``status`` is what it says of itself.

    ``on_news`` is called with every new announcement, ``on_change`` when the liveness of a peer, or
    else its status, has changed (peer, what it is now, what it was), ``on_rejected`` for what was
    refused, and ``on_double`` when a process that has this node's key and started later announces
    itself.
    ``observed`` tells the address from which a peer is connected, if it is, and ``reached`` the one
    at which this node has a connection to it.
    """

    wiring: Wiring
    membership: Membership
    status: Announce
    places: Callable[[], Sequence[Place]]  # in the chain of each fragment
    wall: Callable[[], float]  # corrected wall clock, Unix seconds
    admission: Callable[[PeerId], bytes] = lambda peer: b""  # proof that an announcement needs
    on_news: Callable[[Announce], None] = lambda announce: None
    on_change: Callable[[PeerId, str, str], None] = lambda peer, now, before: None
    on_rejected: Callable[[PeerId, RemoteProtocolError], None] = lambda peer, error: None
    on_double: Callable[[], None] = lambda: None
    observed: Callable[[PeerId], str] = lambda peer: ""
    reached: Callable[[PeerId], str] = lambda peer: ""
    office: Callable[[], Collection[PeerId]] = tuple  # who decides rounds, where there are any
    _sequence: int = 0
    _double: int = 0  # sequence number of the newest announcement from such a process
    _awake: Wakefulness = field(default_factory=Wakefulness)
    # of those in the membership, with their status
    _seen: dict[PeerId, tuple[Liveness, str]] = field(default_factory=dict)
    _newest: bytes = b""
    _telling: Counter[PeerId] = field(default_factory=Counter)  # announcements on their way
    _told: dict[PeerId, bytes] = field(default_factory=dict)  # the newest of them
    _crowd: Crowd = field(init=False)
    _door: Doorkeeper = field(init=False)

    def __post_init__(self) -> None:
        self._crowd, self._door = Crowd(self), Doorkeeper(self)
        self.status = with_places(self.status, self.places())
        transport = self.wiring.transport
        transport.on_call("announce", self._on_announce, max_body=MAX_ANNOUNCE_BYTES)
        transport.on_call("known", self._on_known)

    # --- speaking ------------------------------------------------------------------------------

    def note(self, **changes: Any) -> None:
        """Change what this node says of itself; it is said with the next heartbeat."""
        self.status = replace(self.status, **changes)

    def envelope(self) -> bytes:
        """This node's announcement as of now, signed."""
        said = self.status = with_places(self.status, self.places())
        self._sequence += 1
        crowded, chain, wall = self.crowded(), self._chain(), self.wall()
        if crowded:  # what is long is asked for
            said = replace(said, pulse=chain.pulse, sketch=name_in(said.sketch))
        envelope = seal(
            self.wiring.identity,
            said,
            purpose="announce",
            run=self.wiring.run,
            expires=wall + LIFETIME_S,
            sequence=self._sequence,
        )
        self._crowd.said = None
        if crowded:
            self._crowd.said = Said(envelope, self.status, self.wiring.now(), wall, chain)
        return envelope

    def _chain(self) -> HashChain:
        """Heartbeats that nobody else can make: no other announcement has had the same."""
        this = f"{self.status.incarnation} {self._sequence} {self.wall()}"
        secret = b"atoll pulse 1\x00" + self.wiring.run + this.encode()
        return HashChain(self.wiring.identity.peer_id, self.wiring.identity.sign(secret))

    def tell(self) -> None:
        """Announce to everybody who may be there; in a large swarm as a rumour.

        A peer that is slow to take one gets the newest announcement after it, and none of those in
        between: so it keeps up, however much there is to say.
        """
        self._newest, now = self.envelope(), self.wiring.now()
        if self.crowded():
            self._crowd.tell()
            return
        for peer in self.membership.islands:
            if self._telling[peer] < AT_ONCE and self.membership.there(peer, now):
                self._telling[peer] += 1
                self.wiring.spawn(self._keep_telling(peer))

    def _due(self) -> bool:
        """Whether what was announced in a large swarm does not hold any more."""
        said = self._crowd.said
        status = with_places(self.status, self.places())
        return said is None or said.due(self.wiring.now(), self.wall(), status)

    async def _keep_telling(self, peer: PeerId) -> None:
        try:
            while self._told.get(peer) is not self._newest and self.membership.there(
                peer, self.wiring.now()
            ):
                self._told[peer] = self._newest
                await self.say(peer, "announce", self._newest)
        finally:
            self._telling[peer] -= 1
            if not self._telling[peer]:
                del self._telling[peer]
                self._told.pop(peer, None)

    async def leave(self) -> None:
        """Say farewell to everybody who is there."""
        self.note(status="leaving", ready=False)
        envelope = self.envelope()
        async with asyncio.TaskGroup() as group:
            for peer in self.membership.alive(self.wiring.now()):
                group.create_task(self.say(peer, "announce", envelope))

    async def heartbeats(self) -> None:
        """Announce, look after the membership, and ask around, until cancelled."""
        turn = 0
        while True:
            if self._due() or not self.crowded():
                self.tell()
            else:
                self._crowd.beat()
            now = self.wiring.now()
            for peer in list(self.membership.islands):
                self.notice(peer)
            self.membership.forget_old(now)
            self._forget()
            alive = sorted(self.membership.alive(now))
            if alive and turn % ASK_EVERY == 0:
                self.wiring.spawn(self.ask(alive[turn // ASK_EVERY % len(alive)]))
            if alive:
                self._crowd.fetch_sketches(self._crowd.rumours.one_of(alive))
            dead = sorted(self._dead(now))
            if turn % ASK_EVERY == 1 and dead:  # or two halves of a swarm never meet again
                self.wiring.spawn(self.ask(dead[turn // ASK_EVERY % len(dead)]))
            turn += 1
            await asyncio.sleep(self.membership.patience.heartbeat_s)

    def crowded(self) -> bool:
        """Whether there are too many to tell each of them everything."""
        return len(self.membership.islands) > EVERYBODY

    async def say(self, peer: PeerId, name: str, body: bytes) -> bytes:
        """Call a peer: the answer, empty where there is none."""
        for left in reversed(range(TRIES)):
            asked = self.wiring.now()
            try:
                transport = self.wiring.transport
                reply = await transport.call(peer, name, body, timeout=CALL_TIMEOUT_S)
            except Unreachable as error:
                if error.why is Why.RESET and left:
                    continue  # old connections may all have broken: that is not the peer's death
                self.unreachable(peer)
            except TransportError:
                break  # silence is noticed by itself
            else:
                self.membership.on_answer(peer, self.wiring.now() - asked)
                self.contact(peer)
                return reply
            break
        return b""

    # --- listening -----------------------------------------------------------------------------

    def learn(
        self,
        envelope: bytes,
        sender: PeerId | None = None,
        *,
        pass_on: bool = False,
        pushed_by: PeerId | None = None,
    ) -> Announce:
        """Take a signed announcement. Raises RemoteProtocolError for one that is not valid.

        ``pass_on``: if it is news, pass it on to others; as a whole if its origin has ``pushed`` it
        to a few, and not to all, or was asked for it. Raises Crowded where too many identities come
        from its place already.
        """
        opened = open_announce(envelope, self.wiring.run, self.wall())
        announce = opened.message
        if announce.peer == self.wiring.identity.peer_id:
            self._look_for_double(announce, opened.sequence)
            return announce
        if fragments(announce) != fragments(self.status):
            raise Malformed(f"{announce.peer} has another number of fragments")
        needed = self.admission(announce.peer)
        if needed and not hmac.compare_digest(needed, announce.admission):
            raise BadSignature(f"{announce.peer} announces itself without a valid invitation")
        directly, now = sender == announce.peer, self.wiring.now()
        place, observed = self._door.admit(announce, now, directly=directly)
        news = self.membership.on_announce(announce, envelope, opened.sequence, now)
        if (island := self.membership.islands.get(announce.peer)) is not None:
            island.origin, island.observed, island.surplus = place, observed, False
            island.expires = opened.expires if news else island.expires
        if directly:
            self.contact(announce.peer)
        if news:
            self.notice(announce.peer)
            self.on_news(announce if island is None else island.announce)
            if pass_on and self.crowded():
                self._crowd.pass_on(announce.peer, envelope, whole=pushed_by == announce.peer)
        return announce

    def clock_behind_s(self) -> float:
        """How far this node's clock is behind others', by when what they say expires: the median.

        Seconds; less by what announcements were on their way. 0 where nobody is there.
        """
        now, wall = self.wiring.now(), self.wall()
        islands = self.membership.islands
        theirs = [
            island.expires - LIFETIME_S + now - island.said
            for peer, island in islands.items()
            if self.membership.there(peer, now)
        ]
        return median(theirs) - wall if theirs else 0.0

    def _look_for_double(self, mine: Announce, sequence: int) -> None:
        """Look for a newer process with this node's key: others believe that one. A single message
        may be an echo of this node's own earlier process, from before the clock was put back."""
        if mine.incarnation > self.status.incarnation:
            if 0 < self._double < sequence:
                self.on_double()
            self._double = max(self._double, sequence)

    def known(self, but: Container[bytes] = (), want: Container[bytes] | None = None) -> Known:
        """The announcements held here, this node's own first (:func:`answering.answer`)."""
        return answer(self._held(), but, want)

    def _held(self) -> Iterator[Held]:
        """Announcements that may be passed on, the newest heartbeat of each, and its sketch."""
        now = self.wiring.now()
        if self.crowded():
            if self._due():
                self.tell()
            said = self._crowd.said
            assert said is not None
            yield Held(said.envelope, said.beat(), self.status.sketch)
        else:
            yield Held(self.envelope(), NO_BEAT, b"")
        for island in self.membership.islands.values():
            if island.envelope and now - island.said < LIFETIME_S / 2 and not island.surplus:
                beat = Beat(island.tag, island.beat, island.pulse)
                yield Held(island.envelope, beat, island.announce.sketch)

    async def ask(self, peer: PeerId) -> None:
        """Hear from a peer whom it knows, itself included."""
        held = {island.envelope for island in self.membership.islands.values()}
        request = KnownRequest(b"".join(map(short_name, held)))
        try:
            transport = self.wiring.transport
            known = await ask(transport, peer, "known", request, Known, timeout=CALL_TIMEOUT_S)
            for envelope in known.announces:
                if envelope in held:
                    continue  # nothing new: its signature need not be looked at once more
                try:
                    self.learn(envelope)
                except (Stale, Crowded):
                    continue  # it has expired, or is not accepted: its sender may not know
            self._crowd.take_beats(known.beats, peer)
        except RemoteProtocolError as error:
            self.on_rejected(peer, error)
        except TransportError:
            return  # the heartbeat will find out what is wrong
        else:
            self.contact(peer)

    async def _on_announce(self, sender: PeerId, body: bytes) -> bytes:
        self.learn(body, sender, pass_on=True)
        return b""

    async def _on_known(self, sender: PeerId, body: bytes) -> bytes:
        request: KnownRequest = KnownRequest.decode(body)
        self.contact(sender)
        have = {request.have[at : at + 8] for at in range(0, len(request.have), 8)}
        return self.known(have, tags_in(request.want) if request.want else None).encode()

    # --- liveness ------------------------------------------------------------------------------

    def _dead(self, now: float) -> list[PeerId]:
        """Peers that fell silent without a farewell."""
        islands = self.membership.islands
        return [p for p in islands if self.membership.liveness(p, now) is Liveness.DEAD]

    def woke_late(self, due: float) -> bool:
        """Whether this process stood still, as what was due at ``due`` happens only now.

        Nobody's silence in that time counts.
        """
        now = self.wiring.now()
        dazed = self._awake.dazed(now - due)
        if missed := self._awake.woke(due, now):
            self.membership.forgive(missed, now)
        return dazed

    def contact(self, peer: PeerId) -> None:
        """The peer did something over an authenticated link."""
        now = self.wiring.now()
        self.membership.on_contact(peer, now)
        if self._door.look_again(peer, now):
            self.notice(peer)

    def unreachable(self, peer: PeerId) -> None:
        """A connection to the peer failed or broke."""
        self.membership.on_unreachable(peer, self.wiring.now())
        self.notice(peer)

    def notice(self, peer: PeerId) -> None:
        """Tell when the liveness or the status of a peer in the membership has changed."""
        if (island := self.membership.islands.get(peer)) is None:
            return
        now = self.membership.liveness(peer, self.wiring.now()), island.announce.status
        if (before := self._seen.get(peer)) == now:
            return
        back = before is not None and before[0] not in THERE and now[0] in THERE
        if back and self._door.back(peer, self.wiring.now()):
            return
        self._seen[peer] = now
        if len(self._seen) > len(self.membership.islands):  # others made room for this one
            self._forget()
        if before is None or before[0] is not now[0]:
            self.on_change(peer, now[0].value, before[0].value if before else "")
        else:
            self.on_change(peer, now[1], before[1])

    def _forget(self) -> None:
        """Know nothing more of whoever is not in the membership any more."""
        for peer in self._seen.keys() - self.membership.islands.keys():
            del self._seen[peer]
