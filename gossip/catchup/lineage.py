"""Who handed office to whom since the run's creator: how a stranger can trust a chain.

The roster of a round is named by the certificate of the round before, so authority goes from
majority to majority, and only the rounds in which the roster changes matter for it. Of these a
member keeps a :class:`~protocols.messages.Handover` for good: the certificate without what was
merged, some hundred bytes for a few islands. Whoever follows the handovers from the creator on
knows who is in office, and so whose votes make a certificate of any later round.

Beyond :data:`MAX_BYTES` nothing more is kept: members go on, and strangers stay outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from gossip.plans.certificate import (
    check_certificate,
    check_handover,
    handover_hash,
    handover_of,
    outcome_hash,
)
from protocols.asking import ask
from protocols.errors import BadSignature, Malformed, RemoteProtocolError, Stale
from protocols.identity import PeerId
from protocols.messages import (
    MAX_HANDOVERS_AT_ONCE,
    Certificate,
    CertificateRequest,
    Certificates,
    Handover,
    HandoverRequest,
    Handovers,
    Outcome,
)
from protocols.tasks import Offload
from protocols.transport import Transport

MAX_BYTES = 64 * 1024 * 1024  # of one lineage at most: 80,000 changes among four islands
CALL_TIMEOUT_S = 5.0
ANSWER_BYTES = 128 * 1024  # comes in that time also by a slow link that others use


class Lineage:
    """The handovers of one fragment up to some round. ``founders`` decide its first round."""

    def __init__(self, run: bytes, founders: Sequence[PeerId], fragment: int = 0) -> None:
        self.run, self.founders, self.fragment = run, tuple(founders), fragment
        self.roster = self.founders  # in office after the last handover
        self._encoded: list[bytes] = []
        self.bytes = 0
        self._round = -1
        self._work = 0

    def __len__(self) -> int:
        return len(self._encoded)

    def copy(self) -> Lineage:
        """One that can be followed further by itself."""
        other = Lineage(self.run, self.founders, self.fragment)
        other.roster, other._encoded, other.bytes = self.roster, [*self._encoded], self.bytes
        other._round, other._work = self._round, self._work
        return other

    def first(self, count: int) -> Lineage:
        """One of only the first ``count`` handovers."""
        other = Lineage(self.run, self.founders, self.fragment)
        other._encoded = self._encoded[:count]
        if last := other.at(count - 1):
            other.bytes = sum(map(len, other._encoded))
            other._round, other._work, other.roster = last.round, last.work, last.next_roster
        return other

    def at(self, index: int) -> Handover | None:
        """One of the handovers kept; None where there is none."""
        if not 0 <= index < len(self):
            return None
        found: Handover = Handover.decode(self._encoded[index])
        return found

    @property
    def full(self) -> bool:
        """Another handover might not fit; everybody who follows this lineage finds the same."""
        return self.bytes > MAX_BYTES - Handover.MAX_BYTES

    def add(self, certificate: Certificate) -> None:
        """Note a round that was committed and verified here; one that is :attr:`full` stays."""
        if not self.full and set(certificate.outcome.next_roster) != set(self.roster):
            self._keep(handover_of(certificate))

    def page(self, first: int, count: int) -> Handovers:
        """Up to ``count`` handovers from the ``first``-th on, as many as fit into an answer."""
        found: list[Handover] = []
        room = ANSWER_BYTES
        for encoded in self._encoded[max(0, first) :][: min(count, MAX_HANDOVERS_AT_ONCE)]:
            room -= len(encoded)
            if found and room < 0:
                break
            found.append(Handover.decode(encoded))
        return Handovers(len(self), tuple(found))

    def encode(self) -> bytes:
        """For a checkpoint: each handover behind its length, 4 bytes."""
        return b"".join(len(one).to_bytes(4, "big") + one for one in self._encoded)

    @classmethod
    def decode(
        cls, run: bytes, founders: Sequence[PeerId], data: bytes, fragment: int = 0
    ) -> Lineage:
        """Our own record again. Raises Malformed; signatures were verified before."""
        lineage, at = cls(run, founders, fragment), 0
        while at < len(data):
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            lineage._keep(Handover.decode(data[at + 4 : end]))
            at = end
        return lineage

    def follow(self, handovers: Iterable[Handover]) -> None:
        """Verify further handovers and keep them. Raises RemoteProtocolError."""
        for handover in handovers:
            if handover.fragment != self.fragment:
                raise Malformed("a handover of another fragment")
            if handover.round <= self._round or handover.work < self._work:
                raise Stale("handovers that are not in the order of their rounds")
            if set(handover.next_roster) == set(self.roster) or not handover.next_roster:
                raise Malformed("a handover to nobody else")
            if self.full:
                raise Malformed(f"handovers of more than {MAX_BYTES} bytes")
            check_handover(handover, run=self.run, roster=self.roster)
            self._keep(handover)

    def check(self, newest: Certificate, *, own: bool = False) -> None:
        """Verify that those in office made this certificate. Raises RemoteProtocolError.

        ``own``: it was verified before, and is to be whole; a full record need not lead to it.
        """
        outcome = newest.outcome
        if outcome.fragment != self.fragment:
            raise Malformed("a certificate of another fragment")
        if self._encoded and outcome.round == self._round:
            last: Handover = Handover.decode(self._encoded[-1])
            if handover_hash(last) != outcome_hash(outcome):
                raise BadSignature("the newest certificate is not the one that handed over")
            return
        if outcome.round < self._round or outcome.work < self._work:
            raise Stale("a certificate from before the last handover")
        beyond = self.full and own
        if not beyond and set(outcome.next_roster) != set(self.roster):
            if self.full:
                limit = f"{MAX_BYTES} bytes, the most that members keep"
                raise Malformed(f"office was handed over after {limit}: no newcomer can follow")
            raise Malformed("the last handover is missing")
        roster = None if beyond else self.roster
        check_certificate(newest, run=self.run, previous=outcome.previous, roster=roster)

    def _keep(self, handover: Handover) -> None:
        encoded = handover.encode()
        self.bytes += len(encoded)
        self._encoded.append(encoded)
        self._round, self._work = handover.round, handover.work
        self.roster = handover.next_roster


class Claim(NamedTuple):
    """A place in a chain, behind some round, that a peer says it stands at."""

    round: int  # > 0
    head: bytes | None  # None: any place of that round, with as much work at least
    work: int

    def fits(self, newest: Outcome) -> bool:
        """Whether this outcome leads to the place."""
        if newest.round + 1 != self.round:
            return False
        if self.head is None:
            return newest.work >= self.work
        return (outcome_hash(newest), newest.work) == (self.head, self.work)


async def prove(
    transport: Transport,
    peer: PeerId,
    run: bytes,
    founders: Sequence[PeerId],
    claim: Claim,
    offload: Offload,
    *,
    fragment: int = 0,
    known: Lineage | None = None,
    shown: Callable[[int], None] = lambda count: None,
) -> tuple[Certificate, Lineage]:
    """Have a peer show that a fragment came to the place of its claim.

    What follows on ``known`` is asked for first, and where that does not lead there, what follows
    on as much of it as the peer has. ``shown`` is told of each page of handovers that holds, in
    bytes: what is known already does not count, or time could be had for it again and again.
    Returns the newest certificate and the way to it. Raises RemoteProtocolError where what it
    shows does not lead there, and what :meth:`Transport.call` raises.
    """
    witness = _Witness(transport, peer, run, fragment)
    newest = await witness.certificate(claim)
    proof = _Proof(witness, newest, known, offload, shown)
    if not known:
        return newest, await proof.extended(Lineage(run, founders, fragment))
    try:
        return newest, await proof.extended(known.copy())
    except RemoteProtocolError:
        # it may be on another side of a fork, that went its own way before the last of these
        common = await witness.shares(known)
        if common == len(known):
            raise
    return newest, await proof.extended(known.first(common))


@dataclass(frozen=True)
class _Witness:
    """A peer that is asked for the history of a fragment."""

    transport: Transport
    peer: PeerId
    run: bytes
    fragment: int

    async def certificate(self, claim: Claim) -> Certificate:
        """The certificate that leads to the place. Raises Stale where it shows none or another."""
        if claim.round < 1:
            raise Stale("nothing comes before the first round")
        request = CertificateRequest(self.run, self.fragment, claim.round - 1, 1)
        answer = await ask(
            self.transport, self.peer, "certificates", request, Certificates, timeout=CALL_TIMEOUT_S
        )
        if not answer.certificates:
            raise Stale("it does not show the certificate it stands on")
        newest = answer.certificates[0]
        if not claim.fits(newest.outcome):
            raise Stale("its certificate is of another place than it announces")
        return newest

    async def page(self, first: int, count: int) -> Handovers:
        """Its handovers from the ``first``-th on."""
        request = HandoverRequest(self.run, first, count, self.fragment)
        return await ask(
            self.transport, self.peer, "handovers", request, Handovers, timeout=CALL_TIMEOUT_S
        )

    async def shares(self, kept: Lineage) -> int:
        """How many handovers it has in common with a lineage: from there on they differ."""
        common, end = 0, len(kept)
        while common < end:
            middle = (common + end) // 2
            page = await self.page(middle, 1)
            if page.handovers and _same(page.handovers[0], kept.at(middle)):
                common = middle + 1
            else:
                end = middle
        return common


@dataclass(frozen=True)
class _Proof:
    """A certificate, and a witness that is to show the way to it."""

    witness: _Witness
    newest: Certificate
    known: Lineage | None
    offload: Offload
    shown: Callable[[int], None]

    async def extended(self, lineage: Lineage) -> Lineage:
        """The lineage, followed to the certificate. Raises RemoteProtocolError."""
        first, total = len(lineage), len(lineage) + 1
        while first < total:
            page = await self.witness.page(first, MAX_HANDOVERS_AT_ONCE)
            if page.handovers and self.known and _same(page.handovers[0], self.known.at(first)):
                raise Stale("a handover that it has denied before")
            first, total = first + len(page.handovers), page.total
            if not page.handovers and first < total:
                raise Malformed("fewer handovers than it says")
            # it may have moved on since it showed the certificate
            wanted = [one for one in page.handovers if one.round <= self.newest.outcome.round]
            before = lineage.bytes
            await self.offload(partial(lineage.follow, wanted))
            self.shown(lineage.bytes - before)
            if len(wanted) < len(page.handovers):
                break
        await self.offload(partial(lineage.check, self.newest))
        return lineage


def _same(one: Handover, other: Handover | None) -> bool:
    """Whether both are of one outcome: those who keep it may have other votes for it."""
    return other is not None and handover_hash(one) == handover_hash(other)
