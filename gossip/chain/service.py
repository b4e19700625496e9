"""A member's handlers: what it answers when others send control messages, slices or merged parts.

Past rounds are asked for here, too. Whatever breaks the rules is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, TypeVar

from gossip.chain.chain import Chain
from gossip.chain.handing import Handing, explains
from gossip.exchange.bodies import MAX_TRAILER, as_bytes
from gossip.exchange.exchange import Exchange
from gossip.exchange.ledger import NOT_KEPT
from gossip.exchange.readers import Readers
from gossip.membership.presence import Presence
from gossip.plans.commitments import SEAL_SIZE
from gossip.rounds.instructions import FollowPlan
from gossip.rounds.spreading import check_passed
from gossip.wiring import Wiring
from protocols.asking import check_run
from protocols.bodies import BufferFeed
from protocols.errors import BadSignature, Malformed, RemoteProtocolError, RemoteRefused
from protocols.identity import PeerId
from protocols.messages import (
    Accusation,
    Certificate,
    CertificateRequest,
    Certificates,
    EvidenceRequest,
    Gram,
    HandoverRequest,
    PartRequest,
    Passed,
    Plan,
    PlanRequest,
    Prepare,
    Suspect,
    TransferHeader,
    Vote,
    Votes,
)
from protocols.transport import Feed
from protocols.wire import decode_any

CERTIFICATES_BYTES = 512 * 1024  # of one answer, which may hold many small objects

P = ParamSpec("P")
T = TypeVar("T")
Handler = Callable[Concatenate[PeerId, P], Coroutine[Any, Any, T]]


@dataclass
class Service:
    """Registers itself with the transport. What breaks the rules is refused, and ``rejected`` told.

    It is told who sent it, or, where the content of a message that was handed on breaks the rules,
    who signed it.

    ``chains`` are those of fragments 0, 1, …: a message names the one it is for.
    """

    wiring: Wiring
    presence: Presence
    chains: Sequence[Chain]
    rejected: Callable[[PeerId, RemoteProtocolError], None]
    readers: Readers
    _handing: Handing = field(init=False)

    def __post_init__(self) -> None:
        transport = self.wiring.transport
        self._handing = Handing(self._take, self.rejected)
        largest = max(chain.rules.most_bytes for chain in self.chains)
        reporting = self._reporting
        transport.on_call("round", reporting(self._on_round), max_body=Passed.MAX_BYTES)
        transport.on_call("plan", reporting(self._on_plan))
        transport.on_call("certificates", reporting(self._on_certificates))
        transport.on_call("handovers", reporting(self._on_handovers))
        into = self._to_exchange
        transport.on_push(
            "slice", into(lambda to: to.slices.on_slice), max_length=largest + SEAL_SIZE
        )
        transport.on_push(
            "merged", into(lambda to: to.merged.on_merged), max_length=largest + MAX_TRAILER
        )
        transport.on_call("slice", into(lambda to: to.slices.slice_reached))
        transport.on_call("merged", into(lambda to: to.merged.merged_reached))
        marked = 2 * largest  # with a mark for each chunk
        transport.on_push("sum", into(lambda to: to.slices.on_sum), max_length=marked)
        transport.on_call("sum", into(lambda to: to.slices.sum_reached))
        transport.on_call("bring", into(lambda to: to.outbox.bring))
        transport.on_call("give", into(lambda to: to.slices.give))
        transport.on_pull("part", reporting(self._on_part), slow=True)
        transport.on_pull("evidence", reporting(self._on_evidence))
        transport.on_call("accuse", reporting(self._on_accuse))

    def _reporting(self, handler: Handler[P, T]) -> Handler[P, T]:
        """A handler that tells ``rejected`` of who breaks the rules."""

        async def answer(sender: PeerId, /, *args: P.args, **kwargs: P.kwargs) -> T:
            try:
                return await handler(sender, *args, **kwargs)
            except RemoteProtocolError as error:
                self.rejected(sender, error)
                raise

        return answer

    def _to_exchange(
        self,
        part_of: Callable[[Exchange], Handler[Concatenate[TransferHeader, P], bytes]],
    ) -> Handler[Concatenate[bytes, P], bytes]:
        """A handler that gives a transfer to that part of the exchange that its header names."""

        async def answer(
            sender: PeerId, header: bytes, /, *args: P.args, **kwargs: P.kwargs
        ) -> bytes:
            transfer, exchange = await self._transfer(sender, header)
            return await part_of(exchange)(sender, transfer, *args, **kwargs)

        return self._reporting(answer)

    async def _on_round(self, sender: PeerId, body: bytes) -> bytes:
        message = decode_any(body, Prepare, Vote, Suspect, Gram, Passed)
        chain = self._chain(message.fragment)
        await self._come_to(chain, message.round, sender)
        if isinstance(message, Passed):
            return self._take(chain, sender, message)
        if message.round < chain.replica.place.round:
            kept = chain.ledger.certificate(message.round)
            return kept.encode() if kept and isinstance(message, Prepare) else b""
        of = chain.round
        if isinstance(message, Prepare):
            answer = of.on_prepare(sender, message, chain.now())
            await chain.promises.before_answer(of.place.at)
            return answer.encode()
        if isinstance(message, Vote | Suspect):
            ballot = (message.epoch, message.ballot)
            self._handing.wonder(chain, sender, lambda: of.knows(ballot))
        chain.carry_out(of, of.on_message(sender, message, chain.now()))
        return b""

    def _take(self, chain: Chain, sender: PeerId, note: Passed) -> bytes:
        """What a member in office says, from itself or by way of another one."""
        message = self._checked(chain, note)
        passed_on = sender != note.author or chain.sending.pass_on(
            chain.round, chain.replica.roster, note
        )
        answer = b""
        if message.round < chain.replica.place.round:
            kept = chain.ledger.certificate(message.round)
            answer = kept.encode() if kept and isinstance(message, Plan) else b""
        else:
            of = chain.round
            with self._signed_by(note.author):
                instructions = of.on_message(note.author, message, chain.now())
            if any(isinstance(one, FollowPlan) for one in instructions):  # it is adopted
                chain.signed_plan = note
            chain.carry_out(of, instructions)
        if not passed_on:
            raise RemoteRefused("full", "that is more than is passed on for one member")
        return answer

    async def _on_plan(self, sender: PeerId, body: bytes) -> bytes:
        request = PlanRequest.decode(body)
        return self._handing.answer(self._chain(request.fragment), sender, request).encode()

    def _checked(self, chain: Chain, note: Passed) -> Plan | Votes:
        """What a member in office says by way of others.

        Checked before it is passed on: else members would spread what anybody made up.
        """
        if note.author not in chain.replica.roster:
            raise RemoteRefused("stranger", "not a member of this round")
        check_passed(self.wiring.run, note)
        with self._signed_by(note.author):
            message: Plan | Votes = decode_any(note.body, Plan, Votes)
            author = message.leader if isinstance(message, Plan) else note.author
            if (message.fragment, author) != (note.fragment, note.author):
                raise Malformed("signed as what it is not")
        if message.round != note.round:  # that is not signed
            raise Malformed("passed on as of another round")
        return message

    @contextlib.contextmanager
    def _signed_by(self, author: PeerId) -> Iterator[None]:
        """What breaks the rules in here has a valid signature: the blame is its author's.

        Not for what is stale: it may have been right where, or when, it was said.
        """
        try:
            yield
        except (Malformed, BadSignature) as error:
            self.rejected(author, error)
            raise RemoteRefused("unsound", f"signed by {author}: {error}") from error

    async def _on_certificates(self, sender: PeerId, body: bytes) -> bytes:
        request = CertificateRequest.decode(body)
        check_run(request.run, self.wiring.run)
        found: list[Certificate] = []
        room = CERTIFICATES_BYTES
        ledger = self._chain(request.fragment).ledger
        if request.count > 1:  # else it only wants to see what somebody stands on
            self.readers.replays(sender, request.fragment, request.round)
        for certificate in ledger.since(request.round, min(request.count, 32)):
            room -= len(certificate.encode())
            if found and room < 0:
                break
            found.append(certificate)
        return Certificates(tuple(found)).encode()

    async def _on_handovers(self, _: PeerId, body: bytes) -> bytes:
        request = HandoverRequest.decode(body)
        check_run(request.run, self.wiring.run)
        lineage = self._chain(request.fragment).lineage
        return lineage.page(request.first, request.count).encode()

    async def _transfer(self, sender: PeerId, header: bytes) -> tuple[TransferHeader, Exchange]:
        """What is to be transferred, and the exchange that it belongs to."""
        transfer = TransferHeader.decode(header)
        check_run(transfer.run, self.wiring.run)
        chain = self._chain(transfer.fragment)
        await self._come_to(chain, transfer.round, sender)
        exchange = chain.exchange
        if transfer.round != exchange.round:
            raise RemoteRefused("late", f"round {transfer.round} is over here")
        if sender not in chain.replica.roster:
            raise RemoteRefused("stranger", "not a member of this round")
        ends = {sender, chain.me}

        def known() -> bool:  # asked as long as the round lasts; it must not hold its exchange
            agreement = chain.round.agreement
            bases = {agreement.basis, *chain.exchange.joint}
            return explains(agreement.plan, bases, transfer, ends)

        self._handing.wonder(chain, sender, known)
        return transfer, exchange

    async def _come_to(self, chain: Chain, round_: int, sender: PeerId) -> None:
        """Make sure that this node has come to ``round_``, if a peer can know that there is one."""
        self.presence.contact(sender)
        if round_ > chain.replica.place.round:
            if sender not in chain.replica.roster and not chain.membership.announcement(sender):
                raise RemoteRefused("stranger", "announce yourself first")
            await chain.reach(round_, sender)

    async def _on_part(self, sender: PeerId, header: bytes) -> Feed:
        request = PartRequest.decode(header)
        check_run(request.run, self.wiring.run)
        wanted = (request.start, request.stop, request.digest)
        chain = self._chain(request.fragment)
        self.readers.replays(sender, request.fragment, request.round)
        data = chain.ledger.part(request.round, *wanted)
        if data is None and request.round == chain.exchange.round:
            for result, held in chain.exchange.merged.kept():
                if (result.start, result.stop, result.digest) == wanted:
                    data = held
        if data is None:
            raise RemoteRefused(NOT_KEPT, "this part is not kept here")
        if request.skip > len(data):
            raise Malformed("more is skipped than there is")
        return BufferFeed(as_bytes(data)[request.skip :])

    async def _on_evidence(self, sender: PeerId, header: bytes) -> Feed:
        request = EvidenceRequest.decode(header)
        check_run(request.run, self.wiring.run)
        chain = self._chain(request.fragment)
        await self._come_to(chain, request.round + 1, sender)
        return await chain.auditor.show(sender, request)

    async def _on_accuse(self, sender: PeerId, body: bytes) -> bytes:
        accusation = Accusation.decode(body)
        chain = self._chain(accusation.fragment)
        await self._come_to(chain, accusation.round + 1, sender)
        await chain.auditor.accused(sender, accusation)
        return b""

    def _chain(self, fragment: int) -> Chain:
        if not 0 <= fragment < len(self.chains):
            raise Malformed(f"there is no fragment {fragment}")
        return self.chains[fragment]
