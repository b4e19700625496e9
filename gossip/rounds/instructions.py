"""What a round (:mod:`gossip.rounds.round`) tells its driver to do, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

from protocols.errors import Contradiction
from protocols.identity import PeerId
from protocols.messages import Certificate, Gram, Plan, Prepare, Suspect, Vote, Votes


@dataclass(frozen=True)
class Send:
    """Send a control message; a reply that is a message comes back as an event."""

    to: PeerId
    message: Prepare | Vote | Suspect | Gram


@dataclass(frozen=True)
class Broadcast:
    """Tell these something that they can pass on: in a large roster they are told by way of some
    of them (:mod:`gossip.rounds.spreading`)."""

    to: tuple[PeerId, ...]
    message: Plan | Votes


@dataclass(frozen=True)
class FollowPlan:
    """Move tensors by this plan."""

    plan: Plan


@dataclass(frozen=True)
class Commit:
    """The round is committed; every part is held here."""

    certificate: Certificate


@dataclass(frozen=True)
class CatchUp:
    """The round is committed elsewhere; these hold all of it. Here it goes on meanwhile."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True)
class Accuse:
    """Tell the operator of a member that lies."""

    peer: PeerId
    error: Contradiction


Instruction = Send | Broadcast | FollowPlan | Commit | CatchUp | Accuse
