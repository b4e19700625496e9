"""After a round, asks owners to show how they merged a chunk, and answers such questions itself.

Only where contributions are weighed (:mod:`gossip.plans.weighing`); elsewhere owners keep no
slices. Each member looks at one chunk that it has drawn, and nobody can know beforehand which. An
owner that has merged something else is expelled by it, and by all others, who are told where to
look (:class:`~protocols.messages.Accusation`) and judge for themselves. An owner that shows nothing
is not convicted: it may have restarted, or its link may be dark. But once it has refused, or has
not answered some times in a row, this member gives it no parts for some rounds. An owner whose part
went to somebody else after it was weighed was in trouble then, and may have nothing left: if it
says so, that counts as no answer. No round waits for any of this.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from gossip.exchange.auditing import Case, Shown
from gossip.exchange.exchange import Exchange
from gossip.exchange.ledger import NOT_KEPT
from gossip.plans.certificate import outcome_hash
from gossip.plans.mix import Mix
from gossip.plans.weighing import draft_basis
from gossip.wiring import Wiring
from protocols.bodies import BufferFeed, read_into
from protocols.errors import Malformed, RemoteProtocolError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import Accusation, Certificate, EvidenceRequest, Gram
from protocols.transport import Feed

SHARE = 1 / 16  # of what came in a round may come again as evidence
KEPT = 2  # rounds of which this node can show something, and judge
STILL_S, WHOLE_S = 30.0, 300.0  # evidence may stand still, and take, this long
PATIENT = 3  # times that an owner may say that it is not there yet, each after some seconds
UNANSWERED = 3  # questions in a row without an answer: fewer may be the fault of the link
SUSPENDED = 16  # rounds in which an owner that showed nothing merges nothing, if there are others
_DRAW = b"atoll audit\x00"


class AuditListener(Protocol):
    """Told of what was found."""

    def caught(self, peer: PeerId, why: str) -> None:
        """A member has lied, for all to see."""
        ...

    def unproven(self, peer: PeerId, error: Exception) -> None:
        """A member did not show what it merged."""
        ...


@dataclass
class _Weighed:
    """A round that this node can look into."""

    certificate: Certificate
    grams: Mapping[tuple[int, int], Gram]
    shown: Mapping[tuple[int, int], Shown]  # of the parts that I have weighed
    convicting: dict[tuple[int, int, int], bytes] = field(default_factory=dict)  # evidence I have
    liars: set[PeerId] = field(default_factory=set)  # convicted by what they did in this round


@dataclass
class Auditor:
    """Of one fragment. ``part``: a certified part's bytes, by round, range and digest."""

    wiring: Wiring
    mix: Mix
    part: Callable[[int, int, int, bytes], torch.Tensor | None]
    listener: AuditListener
    _rounds: OrderedDict[int, _Weighed] = field(default_factory=OrderedDict)
    _suspended: dict[PeerId, int] = field(default_factory=dict)  # up to which round
    _unanswered: Counter[PeerId] = field(default_factory=Counter)  # questions in a row
    _accusers: set[PeerId] = field(default_factory=set)  # whose accusations are being judged

    def ending(self, certificate: Certificate, exchange: Exchange) -> None:
        """A round is decided: keep what I have weighed for it before it is let go of."""
        if self.mix.weigh is not None:
            outcome = certificate.outcome
            basis = draft_basis(outcome.codec, outcome.contributors)
            exchange.owning.answer_as_decided(basis)

    def ended(self, certificate: Certificate, exchange: Exchange, *, replayed: bool) -> None:
        """A round is over: look at something of it, if this member took part in it.

        What was weighed here is shown also where the round was ``replayed``.
        """
        plan, round_ = exchange.plan, certificate.outcome.round
        # whoever was out of office for a round is suspended still
        self._suspended = {p: until for p, until in self._suspended.items() if round_ < until}
        for peer in self._unanswered.keys() - set(certificate.outcome.next_roster):
            del self._unanswered[peer]
        said = plan.grams if plan is not None and not replayed else ()
        grams, shown = {(gram.start, gram.stop): gram for gram in said}, exchange.owning.shown
        if self.mix.weigh is None or not (grams or shown):
            return
        self._rounds[round_] = _Weighed(certificate, grams, shown)
        while len(self._rounds) > KEPT:
            self._rounds.popitem(last=False)
        case = self._drawn(self._rounds[round_], exchange.bytes_received)
        if case is not None:
            self.wiring.spawn(self._look_at(self._rounds[round_], case))

    def suspended(self, round_: int) -> frozenset[PeerId]:
        """Who is to merge nothing in a round: it has not shown what it merged before."""
        return frozenset(peer for peer, until in self._suspended.items() if round_ <= until)

    # --- what others ask -------------------------------------------------------------------------

    async def show(self, sender: PeerId, request: EvidenceRequest) -> Feed:
        """The evidence for a chunk. Raises RemoteRefused where there is none."""
        found = self._of(sender, request.round)
        key, number = (request.start, request.stop), request.chunk
        data, mine = found.convicting.get((*key, number)), found.shown.get(key)
        if data is None and mine is not None and 0 <= number < len(mine.slices):
            data = await self.wiring.offload(partial(mine.evidence, number))
        if data is None:
            raise RemoteRefused(NOT_KEPT, "no evidence of this part is kept here")
        return BufferFeed(data)

    async def accused(self, sender: PeerId, accusation: Accusation) -> None:
        """A member says that an owner has lied: check that.

        One accusation at a time from each member. Raises Malformed if the owner has not lied, or
        it cannot be shown, and RemoteRefused ``busy``.
        """
        found = self._of(sender, accusation.round)
        if not found.grams:
            raise RemoteRefused(NOT_KEPT, "what was stated in this round is not known here")
        case = self._case(found, accusation.start, accusation.stop, accusation.chunk)
        if case is None:
            raise Malformed("an accusation about what nobody has weighed")
        if case.owner in found.liars:
            return
        if sender in self._accusers:  # memory for evidence is taken before any has come
            raise RemoteRefused("busy", "an accusation of its own is being judged")
        self._accusers.add(sender)
        try:
            why = await self._judged(found, case, sender)
        except RemoteRefused as error:
            raise Malformed(f"an accusation without evidence: {error}") from error
        finally:
            self._accusers.discard(sender)
        if not why:
            raise Malformed("an accusation that is not true")
        self._convict(found, case.owner, why)

    def _of(self, sender: PeerId, round_: int) -> _Weighed:
        found = self._rounds.get(round_)
        if found is None:
            raise RemoteRefused(NOT_KEPT, "this round cannot be looked into here")
        if sender not in found.certificate.roster:
            raise RemoteRefused("stranger", "not a member of that round")
        return found

    # --- what I look at --------------------------------------------------------------------------

    def _drawn(self, found: _Weighed, received: int) -> Case | None:
        """Draw a chunk that another member weighed; None: its evidence is too much for this round.

        It is drawn by a signature that only I can make, so that nobody knows it beforehand.
        """
        outcome = found.certificate.outcome
        dice = random.Random(self.wiring.identity.sign(_DRAW + outcome_hash(outcome)))
        me, codec = self.wiring.identity.peer_id, self.wiring.codec.named(outcome.codec)
        chunks = [
            (part.start, part.stop, number)
            for part in outcome.parts
            if (gram := found.grams.get((part.start, part.stop))) is not None and gram.owner != me
            for number in range(len(codec.chunks(part.start, part.stop)))
        ]
        case = self._case(found, *dice.choice(chunks)) if chunks else None
        return case if case is not None and dice.random() * case.size <= SHARE * received else None

    def _case(self, found: _Weighed, start: int, stop: int, number: int) -> Case | None:
        """One chunk of a part; None where nobody has weighed it, or it is not here.

        If somebody else has merged it, by a later plan, only the products are judged.
        """
        outcome, gram = found.certificate.outcome, found.grams.get((start, stop))
        result = next((r for r in outcome.parts if (r.start, r.stop) == (start, stop)), None)
        if gram is None or result is None:
            return None
        if gram.basis != draft_basis(outcome.codec, outcome.contributors):
            return None  # of a later plan, that was not certified
        merged = None
        if gram.owner == result.owner:
            merged = self.part(result.round, start, stop, result.digest)
            if merged is None:
                return None
        codec = self.wiring.codec.named(outcome.codec)
        case = Case(self.wiring.run, outcome, result, merged, gram, number, codec)
        return case if 0 <= number < len(case.chunks) else None

    async def _look_at(self, found: _Weighed, case: Case) -> None:
        owner = case.owner
        try:
            why = await self._judged_in_time(found, case, owner)
        except (TransportError, RemoteProtocolError) as error:
            said = isinstance(error, RemoteRefused | RemoteProtocolError)
            said = said and not _excused(case, error)
            self._unanswered[owner] += 1
            if said or self._unanswered[owner] == UNANSWERED:
                self._suspended[owner] = case.outcome.round + SUSPENDED
                self.listener.unproven(owner, error)
                del self._unanswered[owner]
            return
        del self._unanswered[owner]
        if why:
            self._convict(found, owner, why)
            self._accuse(found, case)

    async def _judged_in_time(self, found: _Weighed, case: Case, owner: PeerId) -> str:
        """As :meth:`_judged`; an owner may come to the end of the round later than this member."""
        for _ in range(PATIENT):
            try:
                return await self._judged(found, case, owner)
            except RemoteRefused as error:
                if error.code != "behind":
                    raise
        return await self._judged(found, case, owner)

    async def _judged(self, found: _Weighed, case: Case, source: PeerId) -> str:
        """What is wrong with a chunk, by the evidence of ``source``, which is kept if it convicts.

        Raises RemoteProtocolError, TransportError.
        """
        result = case.result
        where = (result.start, result.stop, case.number)
        request = EvidenceRequest(case.run, result.fragment, result.round, *where)
        evidence = await self._pull(source, request, case.size)
        why: str = await self.wiring.offload(lambda: case.judge(memoryview(evidence)))
        if why:
            found.convicting[where] = evidence
        return why

    async def _pull(self, source: PeerId, request: EvidenceRequest, size: int) -> bytes:
        data = bytearray(size)
        try:
            async with (
                asyncio.timeout(WHOLE_S),
                self.wiring.transport.pull(
                    source, "evidence", request.encode(), max_length=size, timeout=STILL_S
                ) as incoming,
            ):
                await read_into(incoming, data)
        except TimeoutError:
            raise RemoteRefused("slow", f"no evidence within {WHOLE_S:.0f} s") from None
        return bytes(data)

    # --- who has lied ----------------------------------------------------------------------------

    def _convict(self, found: _Weighed, owner: PeerId, why: str) -> None:
        """Report a liar, once a round: one that was expelled may come back and lie again."""
        if owner not in found.liars:
            found.liars.add(owner)
            self.listener.caught(owner, why)

    def _accuse(self, found: _Weighed, case: Case) -> None:
        result = case.result
        said = Accusation(result.fragment, result.round, result.start, result.stop, case.number)
        for peer in set(found.certificate.roster) - {self.wiring.identity.peer_id, case.owner}:
            self.wiring.spawn(self._tell(peer, said))

    async def _tell(self, peer: PeerId, said: Accusation) -> None:
        try:
            await self.wiring.transport.call(peer, "accuse", said.encode(), timeout=WHOLE_S)
        except (TransportError, RemoteProtocolError):
            return  # it looks at something of its own in every round


def _excused(case: Case, error: Exception) -> bool:
    """Whether an owner that shows nothing may have lost it with the part, which another merged."""
    lost = isinstance(error, RemoteRefused) and error.code in (NOT_KEPT, "behind")
    return lost and case.merged is None
