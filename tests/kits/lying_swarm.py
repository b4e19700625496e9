"""A swarm some of whose members lie (:mod:`lying_kit`), and what is asked of the others.

Whatever an honest member commits is looked at once more, by nothing that members themselves go by:
who has signed it, who has planned it, what the rule makes of what was sent. And what is known to
one may not go back, neither of what it has promised nor of what others say of themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from lying_kit import Liar, decoded
from lying_transport import LyingTransport
from simulated_swarm import Member, SimulatedSwarm
from trouble_kit import Mishaps

from gossip.exchange.exchange import Exchange
from gossip.membership.members import Membership
from gossip.plans.certificate import (
    check_result,
    check_vote,
    leader_order,
    outcome_hash,
)
from gossip.plans.planning import Ballot
from gossip.plans.validity import MAX_TOKENS
from gossip.plans.weighing import weighed
from gossip.rounds.agreement import Agreement
from gossip.rounds.succession import OTHERWISE
from protocols.errors import BadSignature
from protocols.identity import Identity, PeerId
from protocols.memory.transport import MemoryTransport
from protocols.messages import Certificate, Contributor, Outcome, Passed, Plan, Vote

MANY = 1000  # of anything that a node keeps, at most
LOOK_S = 0.1  # between two looks at what members know
# fragment, what it builds on, epoch, ballot; who contributes, who is in office next, and how many
# in office do not train
Planned = tuple[int, bytes, int, int, tuple[Contributor, ...], tuple[PeerId, ...], int]


class Overheard:
    """The transport of an honest member: what it plans is written down."""

    def __init__(self, inner: MemoryTransport, swarm: LyingSwarm) -> None:
        self._inner, self._swarm = inner, swarm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def call(self, peer: PeerId, name: str, body: bytes, **how: Any) -> bytes:
        said = decoded(body) if name == "round" else None
        plan = decoded(said.body) if isinstance(said, Passed) else None
        if isinstance(plan, Plan) and plan.leader == self._inner.peer_id:
            at = (plan.fragment, plan.previous, plan.epoch, plan.ballot)
            self._swarm.planned.add((*at, plan.contributors, plan.next_roster, plan.servers))
        return await self._inner.call(peer, name, body, **how)


@dataclass
class LyingSwarm(SimulatedSwarm):
    """Such members, some of whom lie."""

    lying: dict[PeerId, Liar] = field(default_factory=dict)
    two_faced: bool = False
    committed_: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    planned: set[Planned] = field(default_factory=set)  # by honest leaders
    came: set[PeerId] = field(default_factory=set)  # whoever was ever there
    _promised: dict[tuple[PeerId, int], tuple[Agreement, Ballot]] = field(default_factory=dict)
    _heard: dict[tuple[PeerId, PeerId], tuple[Membership, int, int]] = field(default_factory=dict)

    def wired(self, identity: Identity, transport: MemoryTransport) -> Any:
        self.came.add(identity.peer_id)
        liar = self.lying.get(identity.peer_id)
        return Overheard(transport, self) if liar is None else LyingTransport(transport, liar)

    def honest(self) -> list[Member]:
        return [member for peer, member in self.members.items() if peer not in self.lying]

    def applied(self, peer: PeerId, certificate: Certificate, exchange: Exchange | None) -> None:
        """Of one round there is one result, but where a majority was taken for gone."""
        outcome = certificate.outcome
        for contributor in outcome.contributors:
            assert 0 <= contributor.weight <= contributor.tokens <= MAX_TOKENS
        if peer in self.lying:
            return
        self._is_signed(certificate)
        self._is_as_planned(certificate)
        self._is_scaled(outcome, None if exchange is None else exchange.plan)
        if certificate.epoch or self.two_faced:
            return
        at, head = (outcome.fragment, outcome.previous), outcome_hash(outcome)
        known = self.committed_.setdefault(at, head)
        assert known == head, f"round {outcome.round} of fragment {outcome.fragment} differs"

    def _is_signed(self, certificate: Certificate) -> None:
        """By most of those in office, and each part by who has merged it."""
        outcome, roster = certificate.outcome, certificate.roster
        at = (certificate.run, outcome.fragment, outcome.round, outcome.previous)
        ballot, named = (certificate.epoch, certificate.ballot), outcome_hash(outcome)
        votes = [Vote(*at, *ballot, named, one.voter, one.signature) for one in certificate.votes]
        voters = {signed.voter for signed in certificate.votes}
        assert voters <= set(roster)
        assert 2 * len(voters) > len(roster)
        try:
            for vote in votes:
                check_vote(vote)
            for result in outcome.parts:
                check_result(certificate.run, result)
        except BadSignature as error:  # who replays a round would take it for another's fault
            raise AssertionError("signed by nobody") from error

    def _is_as_planned(self, certificate: Certificate) -> None:
        """By its leader, or, where that one lies, for an office that the others can bear."""
        outcome, roster, ballot = certificate.outcome, certificate.roster, certificate.ballot
        order = leader_order(certificate.run, outcome.fragment, outcome.round, roster)
        leader = order[ballot % len(order)]
        if leader not in self.lying:
            at = (outcome.fragment, outcome.previous, certificate.epoch, ballot)
            plan = (*at, outcome.contributors, outcome.next_roster, outcome.servers)
            assert len(roster) == 1 or plan in self.planned, "planned by somebody else"
        elif not certificate.epoch and len(roster) < OTHERWISE:
            assert self.came.issuperset(outcome.next_roster), "nobody knows them"
            there = {member.peer for member in self.living()} & set(roster)
            assert 2 * len(there - set(outcome.next_roster)) <= len(roster), "most are put out"

    def _is_scaled(self, outcome: Outcome, plan: Plan | None) -> None:
        """As the rule makes it of the announced norms, or of what was sent."""
        mix, contributors = self.rules.mix, outcome.contributors
        if mix.weigh is None:
            assert contributors == mix.scaled(contributors)
            return
        fixed = plan is None or all(part.result is not None for part in plan.parts)
        if plan is not None and plan.grams and not fixed and plan.contributors == contributors:
            assert contributors == weighed(contributors, plan.grams, mix)

    async def watch(self) -> None:
        """What the honest know does not go back; ends only by what is wrong."""
        while True:
            await asyncio.sleep(LOOK_S)
            for member in self.living():
                if member.peer not in self.lying:
                    self._look_at(member)

    def _look_at(self, member: Member) -> None:
        for chain in member.swarm.chains:
            agreement = chain.round.agreement
            before = self._promised.get((member.peer, chain.fragment))
            if before is not None and before[0] is agreement:
                assert agreement.promised >= before[1], "a promise that goes back"
            self._promised[member.peer, chain.fragment] = (agreement, agreement.promised)
        membership = member.swarm.membership
        for peer, island in membership.islands.items():
            newest = (island.announce.incarnation, island.sequence)
            heard = self._heard.get((member.peer, peer))
            if heard is not None and heard[0] is membership:
                assert newest >= heard[1:], "an announcement that goes back"
            self._heard[member.peer, peer] = (membership, *newest)
            if peer not in self.lying and peer in self.came:
                assert newest[0] <= self.incarnations[peer], "announced by somebody else"
                assert not island.expelled, "nobody has lied"

    def agree(self) -> None:
        members = self.members
        self.members = {member.peer: member for member in self.honest()}
        super().agree()
        self.members = members


class AmongLiars(Mishaps):
    """What befalls those among whom some lie: the honest stay more than two thirds."""

    def _expendable(self, who: Any) -> bool:
        swarm = self.here.swarm
        assert isinstance(swarm, LyingSwarm)
        liars = [peer for peer in self.members if peer in swarm.lying]
        honest = len(self.members) - len(liars)
        if who.peer not in swarm.lying and honest - 1 <= 2 * len(liars):
            return False
        there = [one.peer for one in self.members.values() if swarm.keeps(one)]
        others = {peer for peer in there if peer not in swarm.lying} - {who.peer}
        replicas = [replica for member in self.members.values() for replica in member.replicas]
        return all(others.intersection(replica.roster) for replica in replicas)


def largest(root: object) -> tuple[int, str]:
    """The container with the most in it of all that a node keeps, and where that is."""
    found, seen = (0, ""), set[int]()
    left: list[tuple[object, str]] = [(root, "")]
    while left:
        one, path = left.pop()
        module = type(one).__module__
        if id(one) in seen or module.startswith("protocols.memory.transport"):
            continue
        seen.add(id(one))
        inside: list[tuple[object, object]] = []
        if isinstance(one, dict | list | tuple | set | frozenset | deque):
            found = max(found, (len(one), path))
            inside = list(one.items()) if isinstance(one, dict) else list(enumerate(one))
        elif module.startswith(("gossip.", "protocols.")):
            names = [*vars(one)] if hasattr(one, "__dict__") else [*getattr(one, "__slots__", ())]
            inside = [(name, getattr(one, name, None)) for name in names]
        left += [(value, f"{path}.{name}") for name, value in inside]
    return found


@contextmanager
def no_errors() -> Iterator[None]:
    """Nothing is logged as an error meanwhile: no handler failed, and no task."""
    found: list[str] = []

    class Found(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler = Found(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert not found, found[0]
