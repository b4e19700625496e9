"""Being there: what this node says of itself, and what it hears of others.

Every second or so, and whenever something about it changes, a node signs an
:class:`~protocols.messages.Announce` and sends it to everybody it knows to be there. Whoever wants
to know who else is there asks any node for the announcements it holds (``known``); they are signed,
so it does not matter who passes them on.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from gossip.agreement import Place
from gossip.exchange import Wiring
from gossip.membership import Liveness, Membership
from gossip.silence import Wakefulness
from gossip.standing import fragments, with_places
from protocols.envelope import Opened, check_times, open_envelope, seal
from protocols.errors import (
    BadSignature,
    Malformed,
    RemoteProtocolError,
    Stale,
    TransportError,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.messages import Announce, Known

LIFETIME_S = 60.0
CALL_TIMEOUT_S = 5.0
TRIES = 3  # of an announcement whose connection breaks
AT_ONCE = 2  # announcements on their way to one peer: what comes then waits, and only the newest
ASK_EVERY = 5  # heartbeats between two questions for who else is there
MAX_KNOWN = 256
MAX_ENVELOPE_BYTES = 4096
THERE = (Liveness.ALIVE, Liveness.SUSPECT)


def open_announce(envelope: bytes, run: bytes, now: float) -> Opened[Announce]:
    """A peer's own announcement. Raises RemoteProtocolError for one that does not hold."""
    opened = _opened(envelope, run)
    check_times(opened.expires, now)
    return opened


@lru_cache(maxsize=1024)
def _opened(envelope: bytes, run: bytes) -> Opened[Announce]:
    opened = open_envelope(envelope, Announce, purpose="announce", run=run, now=None)
    if opened.message.peer != opened.signer:
        raise Malformed("an announcement of somebody else")
    return opened


@dataclass
class Presence:
    """This node's presence in a run. ``status`` is what it says of itself.

    ``on_news`` is called with every new announcement, ``on_change`` when the liveness of a peer
    has changed (peer, what it is now, what it was), ``on_rejected`` for what was refused.
    """

    wiring: Wiring
    membership: Membership
    status: Announce
    places: Callable[[], Sequence[Place]]  # in the chain of each fragment
    wall: Callable[[], float]  # corrected wall clock, Unix seconds
    admission: Callable[[PeerId], bytes] = lambda peer: b""  # proof that an announcement needs
    on_news: Callable[[Announce], None] = lambda announce: None
    on_change: Callable[[PeerId, str, str], None] = lambda peer, now, before: None
    on_rejected: Callable[[PeerId, str], None] = lambda peer, why: None
    _sequence: int = 0
    _awake: Wakefulness = field(default_factory=Wakefulness)
    _seen: dict[PeerId, Liveness] = field(default_factory=dict)
    _newest: bytes = b""
    _telling: Counter[PeerId] = field(default_factory=Counter)  # announcements on their way
    _told: dict[PeerId, bytes] = field(default_factory=dict)  # the newest of them

    def __post_init__(self) -> None:
        self.status = with_places(self.status, self.places())
        self.wiring.transport.on_call("announce", self._on_announce)
        self.wiring.transport.on_call("known", self._on_known)

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
        """Announce to everybody who may be there.

        Who is slow to take what is on its way gets the newest announcement after it, and none of
        those in between: where everybody has much to say that is what keeps up.
        """
        self._newest, now = self.envelope(), self.wiring.now()
        for peer in self.membership.islands:
            if self._telling[peer] < AT_ONCE and self.membership.liveness(peer, now) in THERE:
                self._telling[peer] += 1
                self.wiring.spawn(self._keep_telling(peer))

    async def _keep_telling(self, peer: PeerId) -> None:
        try:
            while self._told.get(peer) is not self._newest:
                self._told[peer] = self._newest
                await self._tell(peer, self._newest)
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
                group.create_task(self._tell(peer, envelope))

    async def heartbeats(self) -> None:
        """Announce, look after the membership, and ask around, until cancelled."""
        turn = 0
        while True:
            self.tell()
            now = self.wiring.now()
            for peer in list(self.membership.islands):
                self.notice(peer)
            self.membership.forget_old(now)
            alive = sorted(self.membership.alive(now))
            if turn % ASK_EVERY == 0 and alive:
                self.wiring.spawn(self.ask(alive[turn // ASK_EVERY % len(alive)]))
            dead = sorted(self._dead(now))
            if turn % ASK_EVERY == 1 and dead:  # or two halves of a swarm never meet again
                self.wiring.spawn(self.ask(dead[turn // ASK_EVERY % len(dead)]))
            turn += 1
            await asyncio.sleep(self.membership.patience.heartbeat_s)

    async def _tell(self, peer: PeerId, envelope: bytes) -> None:
        for left in reversed(range(TRIES)):
            asked = self.wiring.now()
            try:
                await self.wiring.transport.call(peer, "announce", envelope, timeout=CALL_TIMEOUT_S)
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

    def learn(self, envelope: bytes, sender: PeerId | None = None) -> Announce:
        """Take a signed announcement. Raises RemoteProtocolError for one that does not hold."""
        opened = open_announce(envelope, self.wiring.run, self.wall())
        announce = opened.message
        if announce.peer == self.wiring.identity.peer_id:
            return announce
        if fragments(announce) != fragments(self.status):
            raise Malformed(f"{announce.peer} has another number of fragments")
        needed = self.admission(announce.peer)
        if needed and not hmac.compare_digest(needed, announce.admission):
            raise BadSignature(f"{announce.peer} announces itself without a valid invitation")
        news = self.membership.on_announce(announce, envelope, opened.sequence, self.wiring.now())
        if sender == announce.peer:
            self.contact(announce.peer)
        if news:
            self.notice(announce.peer)
            self.on_news(announce)
        return announce

    def known(self) -> Known:
        """The announcements held here, this node's own first, bounded in number and size."""
        room, found = Known.MAX_BYTES - MAX_ENVELOPE_BYTES, [self.envelope()]
        for island in self.membership.islands.values():
            room -= len(island.envelope) + 8
            fresh = self.wiring.now() - island.said < LIFETIME_S / 2
            if island.envelope and fresh and room > 0 and len(found) < MAX_KNOWN:
                found.append(island.envelope)
        return Known(tuple(found))

    async def ask(self, peer: PeerId) -> None:
        """Hear from a peer whom it knows, itself included."""
        try:
            reply = await self.wiring.transport.call(
                peer, "known", b"", timeout=CALL_TIMEOUT_S, max_reply=Known.MAX_BYTES
            )
            held = {island.envelope for island in self.membership.islands.values()}
            for envelope in Known.decode(reply).announces:
                if envelope in held:
                    continue  # nothing new: its signature need not be looked at once more
                try:
                    self.learn(envelope)
                except Stale:
                    continue  # it travelled too long
        except RemoteProtocolError as error:
            self.on_rejected(peer, str(error))
        except TransportError:
            return  # the heartbeat will find out what is wrong
        else:
            self.contact(peer)

    async def _on_announce(self, sender: PeerId, body: bytes) -> bytes:
        self.learn(body, sender)
        return b""

    async def _on_known(self, sender: PeerId, body: bytes) -> bytes:
        del body
        self.contact(sender)
        return self.known().encode()

    # --- liveness ------------------------------------------------------------------------------

    def _dead(self, now: float) -> list[PeerId]:
        """Peers that fell silent without a farewell."""
        islands = self.membership.islands
        return [p for p in islands if self.membership.liveness(p, now) is Liveness.DEAD]

    def woke_late(self, due: float) -> bool:
        """Whether this process stood still: what was due at ``due`` comes only now.

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
        """Tell when the liveness of a peer has changed."""
        now = self.membership.liveness(peer, self.wiring.now())
        if (before := self._seen.get(peer)) is not now:
            self._seen[peer] = now
            self.on_change(peer, now.value, before.value if before else "")
