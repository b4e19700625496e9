"""Chains of rounds whose rosters change, signed by who was in office."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from gossip_kit import RUN, certificate_of, roster_of

from gossip.catchup.lineage import Lineage
from gossip.plans.certificate import genesis, outcome_hash
from protocols.identity import Identity
from protocols.messages import (
    Certificate,
    Outcome,
)

CREATOR, *OTHERS = (Identity.from_seed(bytes([n]) * 32) for n in range(1, 9))
FOUNDERS = (CREATOR.peer_id,)
Roster = Sequence[Identity]


class Chain:
    """Certificates one upon the other, without anything merged."""

    def __init__(self) -> None:
        self.certificates: list[Certificate] = []
        self.roster: Roster = [CREATOR]
        self.head = genesis(RUN)
        self.work = 0

    def add(
        self,
        next_roster: Roster | None = None,
        *,
        voters: Roster | None = None,
        deciders: Roster | None = None,
        ballot: tuple[int, int] = (0, 0),
        tokens: int = 100,
        state: bytes = bytes(32),
    ) -> Certificate:
        following = self.roster if next_roster is None else next_roster
        deciders = self.roster if deciders is None else deciders
        self.work += tokens
        outcome = Outcome(
            fragment=0,
            round=len(self.certificates),
            previous=self.head,
            state=state,
            codec="int4",
            contributors=(),
            parts=(),
            next_roster=roster_of(following),
            work=self.work,
        )
        made = certificate_of(
            outcome, deciders if voters is None else voters, roster_of(deciders), ballot
        )
        self.certificates.append(made)
        self.roster, self.head = following, outcome_hash(outcome)
        return made

    def lineage(self) -> Lineage:
        kept = Lineage(RUN, FOUNDERS)
        for certificate in self.certificates:
            kept.add(certificate)
        return kept

    @property
    def claim(self) -> tuple[int, bytes, int]:
        return len(self.certificates), self.head, self.work


def changing(changes: int) -> Chain:
    """A chain in which the roster changes every third round."""
    chain = Chain()
    rosters = itertools.cycle([[CREATOR, OTHERS[0]], OTHERS[:3], OTHERS[1:5], [OTHERS[4], CREATOR]])
    for _ in range(changes):
        chain.add(next(rosters))
        chain.add()
        chain.add()
    return chain
