"""One member of a round and its company, with plans, doubts and reports as the test has them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from gossip_kit import EVERYBODY, agreement_of, announce_of, company_of, leader, plan_of

from gossip.plans.planning import Ballot
from protocols.identity import PeerId
from protocols.messages import Contributor, Plan, Suspect

NOW = 10.0  # when the round's first plan is there, and all are heard
PATIENCE = 2.0  # seconds, of every plan
EXPECTED = 3.0  # likewise
SOON = 0.01


class Scene:
    """A member of a round to whose first plan all contribute, each with a part of its own."""

    def __init__(self, count: int = 5, *, leads: bool = False) -> None:
        self.members = EVERYBODY[:count]
        self.me = leader(self.members, 0 if leads else 1)
        self.company = company_of(agreement_of(self.me, self.members), NOW)
        first = leader(self.members).peer_id
        others = [member.peer_id for member in self.members if member is not self.me]
        self.others = sorted(others, key=lambda peer: peer == first)  # who leads comes last
        self.adopt()

    def adopt(
        self,
        ballot: Ballot = (0, 0),
        turn: int = 0,
        *,
        without: Collection[PeerId] = (),
        **more: Any,
    ) -> Plan:
        """There is a plan of whoever leads in this turn, and it counts on nobody of ``without``."""
        owners = [member for member in self.members if member.peer_id not in without]
        contributors = tuple(
            Contributor(peer, 100.0, 100, peer not in without)
            for peer in self.company.agreement.roster
        )
        waits = {"patience_s": PATIENCE, "expected_s": EXPECTED}
        given = {"ballot": ballot, "owners": owners, "contributors": contributors, **waits, **more}
        plan = plan_of(leader(self.members, turn), self.members, **given)
        self.company.agreement.plan, self.company.agreement.promised = plan, ballot
        self.company.adopted(plan)
        return plan

    def announces(self, peer: PeerId, **changes: Any) -> None:
        """A peer says something else of itself than that it is here and ready."""
        self.company.membership.on_announce(announce_of(peer, **changes), b"", 2, NOW)

    def hears(self, now: float, *peers: PeerId) -> None:
        """These, or all others, are heard of by then."""
        for peer in peers or self.others:
            self.company.membership.on_contact(peer, now)

    def doubts(self, *peers: PeerId, now: float = NOW) -> None:
        """These do not deliver to me."""
        for peer in peers:
            self.company.doubt(peer, now)

    def told(self, teller: PeerId, *peers: PeerId, now: float = NOW, **changes: Any) -> None:
        """A member reports that these do not deliver to it."""
        plan = self.company.agreement.plan
        assert plan is not None
        at = {"epoch": plan.epoch, "ballot": plan.ballot} | changes
        suspect = Suspect(plan.fragment, plan.round, at["epoch"], at["ballot"], peers)
        self.company.reported(teller, suspect, now)

    def gone(self, now: float) -> set[PeerId]:
        """Whom I count on no more, as I see it now."""
        self.company.judge(now, PATIENCE)
        return self.company.gone
