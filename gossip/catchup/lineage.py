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
from functools import partial

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


async def prove(
    transport: Transport,
    peer: PeerId,
    run: bytes,
    founders: Sequence[PeerId],
    claim: tuple[int, bytes | None, int],
    offload: Offload,
    *,
    fragment: int = 0,
    known: Lineage | None = None,
    shown: Callable[[int], None] = lambda count: None,
) -> tuple[Certificate, Lineage]:
    """Have a peer show that a fragment came to ``claim`` = (round, head, work), round > 0.

    Without a head, to any place of that round, with as much work at least. What follows on
    ``known`` is asked for first, and where that does not lead there, what follows on as much of it
    as the peer has. ``shown`` is told of each page of handovers that holds, in bytes: what is known
    already does not count, or time could be had for it again and again.
    Returns the newest certificate and the way to it. Raises RemoteProtocolError where what it
    shows does not lead there, and what :meth:`Transport.call` raises.
    """
    if claim[0] < 1:
        raise Stale("nothing comes before the first round")
    request = CertificateRequest(run, fragment, claim[0] - 1, 1)
    answer = await ask(
        transport, peer, "certificates", request, Certificates, timeout=CALL_TIMEOUT_S
    )
    if not answer.certificates:
        raise Stale("it does not show the certificate it stands on")
    newest = answer.certificates[0]
    outcome = newest.outcome
    round_, head, work = claim
    right = (
        outcome.work >= work
        if head is None
        else (outcome_hash(outcome), outcome.work) == (head, work)
    )
    if outcome.round + 1 != round_ or not right:
        raise Stale("its certificate is of another place than it announces")

    async def page_of(first: int, count: int) -> Handovers:
        wanted = HandoverRequest(run, first, count, fragment)
        return await ask(transport, peer, "handovers", wanted, Handovers, timeout=CALL_TIMEOUT_S)

    async def led(lineage: Lineage) -> Lineage:
        first, total = len(lineage), len(lineage) + 1
        while first < total:
            page = await page_of(first, MAX_HANDOVERS_AT_ONCE)
            if page.handovers and known and _same(page.handovers[0], known.at(first)):
                raise Stale("a handover that it has denied before")
            first, total = first + len(page.handovers), page.total
            if not page.handovers and first < total:
                raise Malformed("fewer handovers than it says")
            # it may have moved on since it showed the certificate
            wanted = [one for one in page.handovers if one.round <= outcome.round]
            before = lineage.bytes
            await offload(partial(lineage.follow, wanted))
            shown(lineage.bytes - before)
            if len(wanted) < len(page.handovers):
                break
        await offload(partial(lineage.check, newest))
        return lineage

    async def has(index: int, kept: Lineage) -> bool:
        page = await page_of(index, 1)
        return bool(page.handovers) and _same(page.handovers[0], kept.at(index))

    if not known:
        return newest, await led(Lineage(run, founders, fragment))
    try:
        return newest, await led(known.copy())
    except RemoteProtocolError:
        # it may be on another side of a fork, that went its own way before the last of these
        common, end = 0, len(known)
        while common < end:
            middle = (common + end) // 2
            if await has(middle, known):
                common = middle + 1
            else:
                end = middle
        if common == len(known):
            raise
    return newest, await led(known.first(common))


def _same(one: Handover, other: Handover | None) -> bool:
    """Whether both are of one outcome: those who keep it may have other votes for it."""
    return other is not None and handover_hash(one) == handover_hash(other)
