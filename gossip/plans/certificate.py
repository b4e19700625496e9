"""Certificates: the outcome of a round, and the proof that a majority holds all of it.

A round is committed when more than half of its roster has signed the hash of one
:class:`~protocols.messages.Outcome`. A member signs only when it holds the bytes of every part
in it, so whatever is certified can be fetched from those who signed. Certificates form a chain:
each names its predecessor, and the first builds on :func:`genesis`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from blake3 import blake3

from protocols.counts import runs_of
from protocols.errors import BadSignature, Stale
from protocols.identity import Identity, PeerId, verify
from protocols.messages import (
    Certificate,
    Contributor,
    Handover,
    Outcome,
    PartResult,
    Plan,
    Signed,
    Vote,
)

_VOTE = b"atoll vote\x00"
_RESULT = b"atoll part\x00"
_OUTCOME = b"atoll outcome\x00"
_GENESIS = b"atoll genesis\x00"
_ORDER = b"atoll order\x00"
_BASIS = b"atoll basis\x00"

MAX_WORK = 2**62  # upper bound of the work of a chain


def genesis(run: bytes) -> bytes:
    """What the first round of a run builds on."""
    return blake3(_GENESIS + run).digest()


def outcome_hash(outcome: Outcome) -> bytes:
    """32 bytes that name an outcome; also the identity of its certificate in the chain."""
    return handover_hash(_unsigned(outcome))


def handover_hash(handover: Handover) -> bytes:
    """The :func:`outcome_hash` of the outcome that a handover is of, from the handover alone."""
    named = replace(handover, run=b"", epoch=0, ballot=0, roster=(), votes=())
    return blake3(_OUTCOME + named.encode()).digest()


def handover_of(certificate: Certificate) -> Handover:
    """The part of a certificate that shows who handed office to whom."""
    return replace(
        _unsigned(certificate.outcome),
        run=certificate.run,
        epoch=certificate.epoch,
        ballot=certificate.ballot,
        roster=certificate.roster,
        votes=certificate.votes[: majority(certificate.roster)],
    )


def _unsigned(outcome: Outcome) -> Handover:
    content = blake3(outcome.encode()).digest()
    return Handover(
        run=b"",
        fragment=outcome.fragment,
        round=outcome.round,
        epoch=0,
        ballot=0,
        roster=(),
        previous=outcome.previous,
        next_roster=outcome.next_roster,
        work=outcome.work,
        content=content,
        votes=(),
    )


def basis_of(codec: str, contributors: Iterable[Contributor]) -> bytes:
    """32 bytes that name the codec, and who contributes with which weight, norm and scale.

    Two plans of one round may have different bases; a part merged for one is useless to the other.
    Whether a contributor was found dead (``active``) does not enter.
    """
    hasher = blake3(_BASIS + codec.encode() + b"\n")
    for c in contributors:
        numbers = " ".join(float(number).hex() for number in (c.weight, c.norm, c.scale))
        hasher.update(f"{c.peer} {numbers} {c.tokens}\n".encode())
    return hasher.digest()


def majority(roster: Sequence[PeerId]) -> int:
    """The fewest votes of a roster such that any two sets of that many share a voter."""
    return len(roster) // 2 + 1


def leader_order(run: bytes, fragment: int, round_: int, roster: Iterable[PeerId]) -> list[PeerId]:
    """The roster in the order in which its members lead a round, the same on every member.

    Ordering by a hash of run, round and peer spreads the work of leading over the swarm.
    """
    salt = _ORDER + run + fragment.to_bytes(8, "big") + round_.to_bytes(8, "big")
    return sorted(roster, key=lambda peer: blake3(salt + peer.encode()).digest())


def sign_result(identity: Identity, run: bytes, unsigned: PartResult) -> PartResult:
    """The owner's signature under what it merged."""
    signature = identity.sign(_result_bytes(run, unsigned))
    return replace(unsigned, signature=signature)


def check_result(run: bytes, result: PartResult) -> None:
    """Raise :class:`BadSignature` unless the owner named in the result signed it."""
    verify(result.owner, result.signature, _result_bytes(run, result))


def sign_vote(
    identity: Identity,
    run: bytes,
    fragment: int,
    round_: int,
    previous: bytes,
    ballot: tuple[int, int],
    hash_: bytes,
) -> Vote:
    """``I hold every part of this outcome`` in ``ballot`` = (epoch, number)."""
    vote = Vote(run, fragment, round_, previous, *ballot, hash_, identity.peer_id, b"")
    return replace(vote, signature=identity.sign(_VOTE + vote.encode()))


def check_vote(vote: Vote) -> None:
    """Raise :class:`BadSignature` unless the voter signed it."""
    unsigned = replace(vote, signature=b"")
    verify(vote.voter, vote.signature, _VOTE + unsigned.encode())


def certify(
    run: bytes,
    ballot: tuple[int, int],
    roster: tuple[PeerId, ...],
    outcome: Outcome,
    votes: dict[PeerId, bytes],
) -> Certificate:
    """Outcome and votes, in the roster's order."""
    signed = tuple(Signed(peer, votes[peer]) for peer in roster if peer in votes)
    return Certificate(run, *ballot, roster, outcome, signed)


def check_certificate(
    certificate: Certificate, *, run: bytes, previous: bytes, roster: tuple[PeerId, ...] | None
) -> None:
    """Verify a certificate as the successor of ``previous``.

    ``roster`` is who may decide according to the previous certificate; a certificate of epoch 0
    must carry exactly these. One of a later epoch was made by survivors who had lost their
    majority: it is valid in itself, and :func:`heavier` decides between it and a rival.

    Raises :class:`Stale` (another run or place in the chain) or :class:`BadSignature` (too few
    valid votes).
    """
    if certificate.run != run or certificate.outcome.previous != previous:
        raise Stale("the certificate belongs to another run or another place in the chain")
    whole = replace(_unsigned(certificate.outcome), run=run, roster=certificate.roster)
    check_handover(
        replace(whole, epoch=certificate.epoch, ballot=certificate.ballot, votes=certificate.votes),
        run=run,
        roster=roster,
    )


def check_handover(handover: Handover, *, run: bytes, roster: tuple[PeerId, ...] | None) -> None:
    """Verify who decided, and their votes, as :func:`check_certificate` does."""
    decided = set(handover.roster)
    if handover.run != run:
        raise Stale("a handover of another run")
    if len(decided) != len(handover.roster):
        raise BadSignature("a roster with doubled names")
    if roster is not None and handover.epoch == 0 and decided != set(roster):
        raise Stale("the certificate was not made by the roster in office")
    if roster is not None and not decided <= set(roster):
        raise Stale("the certificate was made by strangers")
    place = (handover.fragment, handover.round, handover.previous)
    ballot = (handover.epoch, handover.ballot)
    hash_ = handover_hash(handover)
    seen: set[PeerId] = set()
    for signed in handover.votes:
        if signed.voter in seen or signed.voter not in decided:
            raise BadSignature("a vote is doubled or from outside the roster")
        check_vote(Vote(run, *place, *ballot, hash_, signed.voter, signed.signature))
        seen.add(signed.voter)
    if len(seen) < majority(handover.roster):
        raise BadSignature(f"{len(seen)} votes of a roster of {len(handover.roster)}")


def heavier(mine: tuple[int, bytes], theirs: tuple[int, bytes]) -> bool:
    """Whether ``theirs`` = (work, head) beats ``mine`` when two parts of a swarm meet again.

    More merged tokens win; the hash breaks ties, so that both sides judge alike.
    """
    return theirs > mine


def outcome_of(plan: Plan, results: Sequence[PartResult], work_before: int) -> Outcome:
    """What ``plan`` comes to with ``results``, one for each of its parts, in order."""
    return Outcome(
        plan.fragment,
        plan.round,
        plan.previous,
        plan.state,
        plan.codec,
        plan.contributors,
        tuple(results),
        plan.next_roster,
        work_after(work_before, plan.contributors, results),
        plan.servers,
    )


def work_after(
    before: int, contributors: Sequence[Contributor], results: Iterable[PartResult]
) -> int:
    """The weight of a chain with one more round: the tokens that are in it.

    A contributor of whom only a share of the elements was merged counts with that share of its
    tokens, rounded down: the rest of what it has learnt is not in the chain.
    """
    return min(before + sum(merged_tokens(contributors, results)), MAX_WORK)


def merged_peers(outcome: Outcome) -> set[PeerId]:
    """Whose contributions are in a round's result, in part of it at least."""
    runs = {run for part in outcome.parts for run in runs_of(part.counts)}  # few differ
    return {c.peer for run in runs for c in outcome.contributors[run.first : run.stop]}


def merged_tokens(contributors: Sequence[Contributor], results: Iterable[PartResult]) -> list[int]:
    """The tokens that each contributor of a round adds to the work of the chain."""
    size, steps = 0, Counter[int]()  # how the count changes from one contributor to the next
    for result in results:
        size += result.stop - result.start
        for run in runs_of(result.counts):
            steps[run.first] += run.elements
            steps[run.stop] -= run.elements
    found, count = list[int](), 0
    for index, contributor in enumerate(contributors):
        count += steps[index]
        found.append(contributor.tokens * count // size if count else 0)
    return found


def tokens_by_island(outcome: Outcome) -> list[int]:
    """Those that each island has in a round's result, without islands that have none."""
    return [tokens for tokens in merged_tokens(outcome.contributors, outcome.parts) if tokens]


def _result_bytes(run: bytes, result: PartResult) -> bytes:
    return _RESULT + run + replace(result, signature=b"").encode()
