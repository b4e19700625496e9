"""Where peers are: signed address records, kept, exchanged and asked for.

A peer id is a key and says nothing of an address. So every peer signs a
:class:`~protocols.messages.PeerRecord`, sends it along with its DHT calls, and keeps the records
of those it met. A node that hears of an id from a peer can ask that peer ``where`` the id is; the
answer is signed by the id itself, so it does not matter who passes it on. The record with the
highest sequence number wins: a peer that moves publishes a new one and the old is forgotten.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from protocols import envelope
from protocols.address_book import AddressBook
from protocols.asking import ask
from protocols.errors import Malformed, RemoteProtocolError, TransportError
from protocols.identity import Identity, PeerId
from protocols.messages import Found, PeerRecord, Where
from protocols.tasks import Background, Together
from protocols.transport import Transport

PURPOSE = "record"
LIFETIME = 3600.0  # seconds a record is valid; it is signed anew at half of that
MAX_RECORD_BYTES = 4096
MAX_KNOWN = 4096  # records and mentions kept
MAX_INFORMANTS = 4  # peers remembered for, and asked about, one id
MAX_ASKED = 32  # ids in one question
ASK_TIMEOUT = 3.0  # seconds
GATHER_S = 0.01  # until a question is asked: others may have one for the same informant
MORE_S = 0.3  # that the others have once one has answered: they may know of a later move


def milliseconds(now: float) -> int:
    """A sequence number that grows for as long as nobody puts the clock back."""
    return int(now * 1000)


@dataclass(frozen=True, slots=True)
class VerifiedRecord:
    """A verified record as it arrived."""

    record: PeerRecord
    sequence: int
    expires: float
    data: bytes


@dataclass(eq=False, slots=True)
class _Question:
    """Of whom one informant is asked at a time, and the task that asks it."""

    peers: list[PeerId] = field(default_factory=list)
    task: asyncio.Task[dict[PeerId, VerifiedRecord]] = field(init=False)


class Whereabouts:
    """The records one node holds, its own among them.

    With ``book``, the transport's address book, what is learned goes there, and the book asks here
    when it knows no address of a peer or all of them failed. ``clock`` is wall time (Unix
    seconds): records carry expiries that other machines set. ``number`` makes a record's sequence
    number of it: a key that outlives the process needs one that remembers the last, or its records
    are old to others once the clock was put back between two starts. ``is_member``: whether a peer
    is one of the node's own swarm, and is not forgotten for a stranger: keys cost nothing.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        book: AddressBook | None = None,
        *,
        clock: Callable[[], float] = time.time,
        number: Callable[[float], int] = milliseconds,
        limit: int = MAX_KNOWN,
    ) -> None:
        self._transport = transport
        self._identity = identity
        self._clock, self._number = clock, number
        self._limit = limit
        self.is_member: Callable[[PeerId], bool] = lambda peer: False
        self._run = b""
        self._own: VerifiedRecord | None = None
        self._known: OrderedDict[PeerId, VerifiedRecord] = OrderedDict()
        self._mentions: OrderedDict[PeerId, OrderedDict[PeerId, None]] = OrderedDict()
        self._asking: Together[PeerId, VerifiedRecord | None] = Together()
        self._questions: dict[PeerId, _Question] = {}  # not asked yet, by informant
        self._tasks = Background()  # of questions: each ends with the last who waits for it
        self._book = book
        if book is not None:
            book.resolver = self._resolve
        transport.on_call("where", self._answer)

    # --- our own record -------------------------------------------------------------------------

    def publish(self, addresses: Iterable[str], relay: str = "") -> bytes:
        """Say where we are from now on; returns the envelope, which peers learn with our calls."""
        record = PeerRecord(self._identity.peer_id, tuple(addresses), relay)
        now = self._clock()
        sequence = max(self._number(now), self._own.sequence + 1 if self._own else 0)
        data = envelope.seal(
            self._identity,
            record,
            purpose=PURPOSE,
            run=self._run,
            sequence=sequence,
            expires=now + LIFETIME,
        )
        self._own = VerifiedRecord(record, sequence, now + LIFETIME, data)
        return data

    def enter(self, run: bytes) -> None:
        """Sign our record for a run from now on, as the run's directory wants it."""
        if run != self._run:
            self._run = run
            if self._own is not None:
                self.publish(self._own.record.addresses, self._own.record.relay)

    @property
    def own(self) -> VerifiedRecord | None:
        """Our record, signed anew when half its lifetime has passed; None before `publish`.

        Also where the clock was put back by hours: others would find that it lives too long.
        """
        own = self._own
        if own is not None and not LIFETIME / 2 <= own.expires - self._clock() <= LIFETIME:
            self.publish(own.record.addresses, own.record.relay)
        return self._own

    # --- others' records ------------------------------------------------------------------------

    def learn(self, data: bytes, expected: PeerId | None = None) -> VerifiedRecord:
        """Verify and keep a record; returns the newest one held of its peer.

        Raises :class:`~protocols.errors.RemoteProtocolError` (malformed, badly signed, expired,
        or about somebody else than its signer or ``expected``).
        """
        if expected is not None and (held := self._known.get(expected)) and held.data == data:
            return held  # what most calls carry: verified before
        known = self.verify(data)
        peer = known.record.peer
        if expected is not None and peer != expected:
            raise Malformed(f"the record of {peer} where that of {expected} was due")
        return self._keep(known)

    def _keep(self, known: VerifiedRecord) -> VerifiedRecord:
        """The newest record of its peer, which may be another."""
        peer = known.record.peer
        if peer == self._identity.peer_id:
            return known
        held = self._known.get(peer)
        if held is not None and held.sequence >= known.sequence:
            return held
        self._known[peer] = known
        self._known.move_to_end(peer)
        while len(self._known) > self._limit:
            self._forget_one(self._known)
        if self._book is not None:
            self._book.add_record(known.record, known.sequence)
        return known

    def verify(self, data: bytes) -> VerifiedRecord:
        """Check a record's bounds, signature, lifetime and that it speaks of its signer."""
        if len(data) > MAX_RECORD_BYTES:
            raise Malformed("an oversized record")
        # a record counts whichever run it is for
        opened = envelope.open(data, now=self._clock(), purpose=PURPOSE, max_lifetime=2 * LIFETIME)
        record: PeerRecord = PeerRecord.decode(opened.body)
        if record.peer != opened.signer:
            raise Malformed("a record that speaks of somebody else")
        return VerifiedRecord(record, opened.sequence, opened.expires, data)

    def get(self, peer: PeerId) -> VerifiedRecord | None:
        """The record held of ``peer``, if it has not expired."""
        if peer == self._identity.peer_id:
            return self.own
        known = self._known.get(peer)
        if known is not None and known.expires < self._clock():
            del self._known[peer]
            return None
        return known

    def _forget_one(self, kept: OrderedDict[PeerId, Any]) -> None:
        """The oldest stranger; where there is none, the oldest member."""
        for _ in range(len(kept)):
            oldest = next(iter(kept))
            if not self.is_member(oldest):
                break
            kept.move_to_end(oldest)  # so that it is not looked at each time
        kept.popitem(last=False)

    def has_met(self, peer: PeerId, address: str) -> bool:
        """Whether this node itself has reached ``peer`` at ``address``; False without a book."""
        return self._book is not None and self._book.has_worked(peer, address)

    def sequence(self, peer: PeerId) -> int:
        """Sequence number of the record held of ``peer``; 0 if none."""
        known = self.get(peer)
        return known.sequence if known else 0

    # --- asking ---------------------------------------------------------------------------------

    def mention(self, peer: PeerId, by: PeerId) -> None:
        """``by`` spoke of ``peer``, so it may know where that is."""
        if peer in (self._identity.peer_id, by):
            return
        informants = self._mentions.setdefault(peer, OrderedDict())
        informants[by] = None
        informants.move_to_end(by)
        while len(informants) > MAX_INFORMANTS:
            self._forget_one(informants)
        self._mentions.move_to_end(peer)
        while len(self._mentions) > self._limit:
            self._forget_one(self._mentions)

    async def ask(self, peer: PeerId) -> VerifiedRecord | None:
        """Ask those who spoke of ``peer``; None unless a record newer than ours turned up.

        Askers of one id share one round of questions.
        """
        return await self._asking.do(peer, lambda: self._ask(peer))

    async def _resolve(self, peer: PeerId) -> None:
        await self.ask(peer)  # what is learned goes to the book

    async def _ask(self, peer: PeerId) -> VerifiedRecord | None:
        before = self.sequence(peer)
        # only those whose own address is at hand: else two unknown peers could wait for each other
        informants = [p for p in reversed(self._mentions.get(peer, ())) if self.get(p) is not None]
        found: list[VerifiedRecord] = []

        async def one(informant: PeerId) -> None:
            try:
                known = await self._told(informant, peer)
            except (TransportError, RemoteProtocolError):
                return  # an informant that is gone or lies is one answer less, the others remain
            if known is not None and known.sequence > before:
                found.append(known)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(informant)) for informant in informants]
            while not found and (left := [task for task in tasks if not task.done()]):
                await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            if found:
                await asyncio.wait(tasks, timeout=MORE_S)
            for task in tasks:
                task.cancel()  # who says nothing holds up nobody
        return max(found, key=lambda known: known.sequence, default=None)

    async def _told(self, informant: PeerId, peer: PeerId) -> VerifiedRecord | None:
        """What ``informant`` says of ``peer``; what it is asked at one time is one question."""
        question = self._questions.get(informant)
        if question is None or len(question.peers) == MAX_ASKED:
            question = self._questions[informant] = _Question()
            # not in the task of one who may leave: the others would wait from the beginning again
            question.task = self._tasks.spawn(self._put(informant, question))
        question.peers.append(peer)
        try:
            await asyncio.wait([question.task])
            return question.task.result().get(peer)
        finally:
            question.peers.remove(peer)
            if not question.peers:
                self._close(informant, question)
                await self._ended(question)

    async def _ended(self, question: _Question) -> None:
        """Nobody waits for its answer any more."""
        question.task.cancel()
        await asyncio.wait([question.task])
        if not question.task.cancelled():
            question.task.exception()  # else asyncio says that nobody has seen it

    async def _put(self, informant: PeerId, question: _Question) -> dict[PeerId, VerifiedRecord]:
        """Ask it, once all are in it who have the same informant to ask; the records by peer."""
        await asyncio.sleep(GATHER_S)
        self._close(informant, question)
        wanted = Where(tuple(question.peers))
        answer = await ask(self._transport, informant, "where", wanted, Found, timeout=ASK_TIMEOUT)
        found = dict[PeerId, VerifiedRecord]()
        for data in answer.records:
            with contextlib.suppress(RemoteProtocolError):  # that spoils no other one
                known = self.verify(data)
                if known.record.peer in wanted.peers:
                    found[known.record.peer] = self._keep(known)
        return found

    def _close(self, informant: PeerId, question: _Question) -> None:
        """Nobody else is added to it."""
        if self._questions.get(informant) is question:
            del self._questions[informant]

    async def _answer(self, peer: PeerId, body: bytes) -> bytes:
        wanted = (self.get(asked) for asked in Where.decode(body).peers)
        return Found(tuple(known.data for known in wanted if known is not None)).encode()
