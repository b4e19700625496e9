"""What an agreement (:mod:`gossip.rounds.agreement`) tells its round has come about, as values.

The round makes instructions of them for its driver (:mod:`gossip.rounds.instructions`).
"""

from __future__ import annotations

from dataclasses import dataclass

from protocols.identity import PeerId
from protocols.messages import Certificate, Plan, Vote


@dataclass(frozen=True)
class Adopted:
    """Work by this plan from now on: send slices, merge, fetch what is known already."""

    plan: Plan


@dataclass(frozen=True)
class CastVote:
    """Send this vote to the whole roster."""

    vote: Vote


@dataclass(frozen=True)
class Decided:
    """The round is committed, and every part of it is held here."""

    certificate: Certificate


@dataclass(frozen=True)
class DecidedElsewhere:
    """A majority decided on something that is not held here: fetch it from these."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Equivocated:
    """This member has signed two outcomes under one ballot: its votes count no more."""

    peer: PeerId


AgreementEvent = Adopted | CastVote | Decided | DecidedElsewhere | Equivocated
