"""Announcements: what this node says about itself, and what it hears about others.

Every second or so, and whenever something about it changes, a node signs an
:class:`~protocols.messages.Announce` and sends it to everybody who is there as far as it knows; in
a large swarm to a few, who pass it on (:mod:`gossip.membership.rumours`). To find out who else is
there, a node asks any other for the announcements that it holds (``known``). They are signed, so it
does not matter who passes them on.
"""

from __future__ import annotations

import asyncio
import hmac
import math
from collections import Counter
from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from blake3 import blake3

from gossip.membership.members import THERE, Liveness, Membership
from gossip.membership.origin import origin
from gossip.membership.rumours import EVERYBODY, FANOUT, PAUSE_S, Rumours
from gossip.membership.silence import Wakefulness
from gossip.membership.standing import fragments, with_places
from gossip.place import Place
from gossip.wiring import Wiring
from protocols.asking import ask
from protocols.envelope import Opened, check_times, open_envelope, seal
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
from protocols.messages import MAX_ANNOUNCE_BYTES, Announce, Known, KnownRequest

LIFETIME_S = 60.0
CALL_TIMEOUT_S = 5.0
TRIES = 3  # of an announcement whose connection breaks
AT_ONCE = 2  # announcements on their way to one peer: of later ones only the newest waits
ASK_EVERY = 5  # heartbeats between two questions for who else is there
MAX_KNOWN = 256
AGAIN_S = 60.0  # before it is reported once more that a place has too many identities


def open_announce(envelope: bytes, run: bytes, now: float) -> Opened[Announce]:
    """A peer's own announcement. Raises RemoteProtocolError for one that is not valid."""
    opened = _opened(envelope, run)
    check_times(opened.expires, now)
    return opened


@lru_cache(maxsize=1024)
def _opened(envelope: bytes, run: bytes) -> Opened[Announce]:
    if len(envelope) > MAX_ANNOUNCE_BYTES:  # it would be passed on, and that has this bound
        raise Malformed(f"an announcement of {len(envelope)} bytes exceeds {MAX_ANNOUNCE_BYTES}")
    opened = open_envelope(envelope, Announce, purpose="announce", run=run, now=None)
    if opened.message.peer != opened.signer:
        raise Malformed("an announcement of somebody else")
    return opened


def _name(envelope: bytes) -> bytes:
    """The short name of an announcement, for those who have it."""
    return blake3(envelope).digest(8)


@dataclass
class Presence:
    """This node's presence in a run. ``status`` is what it says of itself.

    ``on_news`` is called with every new announcement, ``on_change`` when the liveness of a peer
    has changed (peer, what it is now, what it was), ``on_rejected`` for what was refused, and
    ``on_double`` when a process that has this node's key and started later announces itself.
    ``observed`` tells the address from which a peer is connected, if it is.
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
    office: Callable[[], Collection[PeerId]] = tuple  # who decides rounds, where there are any
    _sequence: int = 0
    _double: int = 0  # sequence number of the newest announcement from such a process
    _crowded_out: dict[str, float] = field(default_factory=dict)  # places, and when reported
    _awake: Wakefulness = field(default_factory=Wakefulness)
    _seen: dict[PeerId, Liveness] = field(default_factory=dict)  # of those in the membership
    _newest: bytes = b""
    _telling: Counter[PeerId] = field(default_factory=Counter)  # announcements on their way
    _told: dict[PeerId, bytes] = field(default_factory=dict)  # the newest of them
    _rumours: Rumours = field(init=False)
    _spreading: bool = False

    def __post_init__(self) -> None:
        self._rumours = Rumours(self.wiring.identity.peer_id)
        self.status = with_places(self.status, self.places())
        transport = self.wiring.transport
        transport.on_call("announce", self._on_announce, max_body=MAX_ANNOUNCE_BYTES)
        transport.on_call("gossip", self._on_gossip)
        transport.on_call("known", self._on_known)

    # --- speaking ------------------------------------------------------------------------------

    def note(self, **changes: Any) -> None:
        """Change what this node says of itself; it is said with the next heartbeat."""
        self.status = replace(self.status, **changes)

    def envelope(self) -> bytes:
        """This node's announcement as of now, signed."""
        self.status = with_places(self.status, self.places())
        self._sequence += 1
        return seal(
            self.wiring.identity,
            self.status,
            purpose="announce",
            run=self.wiring.run,
            expires=self.wall() + LIFETIME_S,
            sequence=self._sequence,
        )

    def tell(self) -> None:
        """Announce to everybody who may be there; in a large swarm as a rumour.

        A peer that is slow to take one gets the newest announcement after it, and none of those in
        between: so it keeps up, however much there is to say.
        """
        self._newest, now = self.envelope(), self.wiring.now()
        if self._crowded():
            self._pass_on(self.wiring.identity.peer_id, self._newest)
            return
        for peer in self.membership.islands:
            if self._telling[peer] < AT_ONCE and self._there(now, peer):
                self._telling[peer] += 1
                self.wiring.spawn(self._keep_telling(peer))

    async def _keep_telling(self, peer: PeerId) -> None:
        try:
            while self._told.get(peer) is not self._newest:
                self._told[peer] = self._newest
                await self._say(peer, "announce", self._newest)
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
                group.create_task(self._say(peer, "announce", envelope))

    async def heartbeats(self) -> None:
        """Announce, look after the membership, and ask around, until cancelled."""
        turn = 0
        while True:
            self.tell()
            now = self.wiring.now()
            for peer in list(self.membership.islands):
                self.notice(peer)
            self.membership.forget_old(now)
            self._forget()
            alive = sorted(self.membership.alive(now))
            if alive and self._crowded():  # rumours leave some out
                self.wiring.spawn(self.ask(self._rumours.one_of(alive)))
            elif alive and turn % ASK_EVERY == 0:
                self.wiring.spawn(self.ask(alive[turn // ASK_EVERY % len(alive)]))
            dead = sorted(self._dead(now))
            if turn % ASK_EVERY == 1 and dead:  # or two halves of a swarm never meet again
                self.wiring.spawn(self.ask(dead[turn // ASK_EVERY % len(dead)]))
            turn += 1
            await asyncio.sleep(self.membership.patience.heartbeat_s)

    def _there(self, now: float, peer: PeerId) -> bool:
        return self.membership.liveness(peer, now) in THERE

    def _crowded(self) -> bool:
        """Whether there are too many to tell each of them everything."""
        return len(self.membership.islands) > EVERYBODY

    def _pass_on(self, peer: PeerId, envelope: bytes) -> None:
        """This is news of a peer: pass it on to some others."""
        self._rumours.add(peer, envelope)
        if not self._spreading:
            self._spreading = True
            self.wiring.spawn(self._spread())

    async def _spread(self) -> None:
        """Pass on rumours until there are none; those that come meanwhile go together."""
        under_way: set[asyncio.Task[None]] = set()
        try:
            while batch := self._rumours.batch():
                body = Known(batch).encode()
                peers, now = list(self.membership.islands), self.wiring.now()
                there = partial(self._there, now)
                for peer in self._rumours.targets(peers, there, self.office()):
                    task = self.wiring.spawn(self._say(peer, "gossip", body))
                    under_way.add(task)
                    task.add_done_callback(under_way.discard)
                await asyncio.sleep(PAUSE_S)
                while len(under_way) > AT_ONCE * FANOUT:  # add nothing to what is slow to arrive
                    await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._spreading = False

    async def _say(self, peer: PeerId, name: str, body: bytes) -> None:
        for left in reversed(range(TRIES)):
            asked = self.wiring.now()
            try:
                await self.wiring.transport.call(peer, name, body, timeout=CALL_TIMEOUT_S)
            except Unreachable as error:
                if error.why is Why.RESET and left:
                    continue  # old connections may all have broken: that is not the peer's death
                self.unreachable(peer)
            except TransportError:
                return  # silence is noticed by itself
            else:
                self.membership.on_answer(peer, self.wiring.now() - asked)
                self.contact(peer)
            return

    # --- listening -----------------------------------------------------------------------------

    def learn(
        self, envelope: bytes, sender: PeerId | None = None, *, pass_on: bool = False
    ) -> Announce:
        """Take a signed announcement. Raises RemoteProtocolError for one that is not valid.

        ``pass_on``: if it is news, pass it on to others. Raises Crowded where too many identities
        come from its place already.
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
        place, observed = self._origin(announce, sender)
        news = self.membership.on_announce(announce, envelope, opened.sequence, self.wiring.now())
        if (island := self.membership.islands.get(announce.peer)) is not None:
            island.origin, island.observed = place, observed
        if sender == announce.peer:
            self.contact(announce.peer)
        if news:
            self.notice(announce.peer)
            self.on_news(announce)
            if pass_on and self._crowded():
                self._pass_on(announce.peer, envelope)
        return announce

    def _origin(self, announce: Announce, sender: PeerId | None) -> tuple[str, bool]:
        """Where a peer comes from, and whether that was seen. Raises Crowded."""
        peer, now = announce.peer, self.wiring.now()
        known = self.membership.islands.get(peer)
        if known is not None and known.observed:
            return known.origin, True
        place, seen = origin(self.observed(peer) if sender == peer else "", announce.addresses)
        if not self.membership.crowded(peer, place, seen, now):
            return place, seen
        why = Crowded(f"{peer} is one of too many identities from {place}")
        if now - self._crowded_out.get(place, -math.inf) > AGAIN_S:  # not once for each of them
            self._crowded_out.pop(place, None)
            self._crowded_out[place] = now
            if len(self._crowded_out) > MAX_KNOWN:
                del self._crowded_out[next(iter(self._crowded_out))]
            self.on_rejected(peer, why)
        raise why

    def _look_for_double(self, mine: Announce, sequence: int) -> None:
        """Look for a newer process with this node's key: others believe that one. A single message
        may be an echo of this node's own earlier process, from before the clock was put back."""
        if mine.incarnation > self.status.incarnation:
            if 0 < self._double < sequence:
                self.on_double()
            self._double = max(self._double, sequence)

    def known(self, but: Container[bytes] = ()) -> Known:
        """The announcements held here, this node's own first, bounded in number and size.

        Without those whose :func:`_name` is among ``but``.
        """
        room, found = Known.MAX_BYTES - MAX_ANNOUNCE_BYTES, [self.envelope()]
        for island in self.membership.islands.values():
            fresh = self.wiring.now() - island.said < LIFETIME_S / 2
            if not island.envelope or not fresh or _name(island.envelope) in but:
                continue
            room -= len(island.envelope) + 8
            if room > 0 and len(found) < MAX_KNOWN:
                found.append(island.envelope)
        return Known(tuple(found))

    async def ask(self, peer: PeerId) -> None:
        """Hear from a peer whom it knows, itself included."""
        held = {island.envelope for island in self.membership.islands.values()}
        request = KnownRequest(b"".join(_name(envelope) for envelope in held))
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
        except RemoteProtocolError as error:
            self.on_rejected(peer, error)
        except TransportError:
            return  # the heartbeat will find out what is wrong
        else:
            self.contact(peer)

    async def _on_announce(self, sender: PeerId, body: bytes) -> bytes:
        self.learn(body, sender, pass_on=True)
        return b""

    async def _on_gossip(self, sender: PeerId, body: bytes) -> bytes:
        self.contact(sender)
        for envelope in Known.decode(body).announces:
            if self._rumours.met(envelope):
                continue
            try:
                self.learn(envelope, pass_on=True)
            except (Stale, Crowded):
                continue  # it has expired, or is not accepted: its sender may not know
            except RemoteProtocolError as error:
                self.on_rejected(sender, error)
        return b""

    async def _on_known(self, sender: PeerId, body: bytes) -> bytes:
        have = KnownRequest.decode(body).have
        self.contact(sender)
        return self.known({have[at : at + 8] for at in range(0, len(have), 8)}).encode()

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
        self.membership.on_contact(peer, self.wiring.now())

    def unreachable(self, peer: PeerId) -> None:
        """A connection to the peer failed or broke."""
        self.membership.on_unreachable(peer, self.wiring.now())
        self.notice(peer)

    def notice(self, peer: PeerId) -> None:
        """Tell when the liveness of a peer in the membership has changed."""
        if peer not in self.membership.islands:
            return
        now = self.membership.liveness(peer, self.wiring.now())
        if (before := self._seen.get(peer)) is not now:
            self._seen[peer] = now
            if len(self._seen) > len(self.membership.islands):  # others made room for this one
                self._forget()
            self.on_change(peer, now.value, before.value if before else "")

    def _forget(self) -> None:
        """Know nothing more of whoever is not in the membership any more."""
        for peer in self._seen.keys() - self.membership.islands.keys():
            del self._seen[peer]
