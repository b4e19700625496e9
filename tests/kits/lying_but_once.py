"""Lies that are right in everything but one thing, so that a single check is what stops them.

What :mod:`lying_kit` draws is mostly refused for the first thing that is wrong with it. Here a liar
goes by what its own node knows of the round (place, office, plan, evidence), signs with its own
key, and says something every half a second or so that all checks but one would let pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from blake3 import blake3
from lying_kit import Liar, decoded
from lying_swarm import MANY, LyingSwarm, largest
from simulated_swarm import Member

from gossip.chain.chain import Chain
from gossip.membership.presence import LIFETIME_S
from gossip.plans.certificate import (
    basis_of,
    certify,
    outcome_hash,
    outcome_of,
    sign_result,
    sign_vote,
)
from gossip.rounds.spreading import passed
from protocols.counts import pack_counts
from protocols.envelope import seal
from protocols.errors import ProtocolError, TransportError
from protocols.identity import Identity, PeerId
from protocols.messages import (
    Announce,
    Certificate,
    CertificateRequest,
    Certificates,
    Contributor,
    EvidenceRequest,
    Part,
    PartRequest,
    PartResult,
    Passed,
    Plan,
    Prepare,
)

SCHEMES = (
    "another_certificate", "forged_votes", "merged_by_others", "in_their_name", "out_of_turn",
    "back", "plans_back", "other_scales", "slander", "announced_for", "announced_before",
    "next_office",
)  # fmt: skip
PAUSE_S = (0.2, 1.0)
LOOK_S, LOOKS = 0.02, 100  # for a plan of others


def _scaled_down(plan: Plan) -> Plan:
    """One by which somebody counts with half of what the rule says."""
    contributors = list(plan.contributors)
    at = max(range(len(contributors)), key=lambda index: contributors[index].scale)
    contributors[at] = replace(contributors[at], scale=contributors[at].scale / 2)
    return replace(plan, contributors=tuple(contributors))


@asynccontextmanager
async def schemed_against(
    swarm: LyingSwarm, liar: Liar, schemes: Sequence[str]
) -> AsyncIterator[None]:
    """Meanwhile the liar lies so, and the honest are watched; in the end little of it is kept."""
    works = [swarm.watch()]
    if schemes:
        works.append(ButOnce(swarm, liar, schemes).run())
    tasks = [swarm.group.create_task(work) for work in works]
    yield
    for one in swarm.honest():
        many, where = largest(one.swarm)
        assert many < MANY, where
    for task in tasks:
        task.cancel()


@dataclass
class ButOnce:
    """What ``liar`` says beside its node; :meth:`run` until cancelled."""

    swarm: LyingSwarm
    liar: Liar
    schemes: Sequence[str]
    _certificate: Certificate | None = None
    _bodies: dict[bytes, bytes] = field(default_factory=dict)  # of parts, by digest
    _heard: list[bytes] = field(default_factory=list)  # announcements of others, some time ago

    def __post_init__(self) -> None:
        self.liar.made_up, self.liar.instead = self._made_up, self._instead

    async def run(self) -> None:
        """Say one after the other, while it lies and is in office."""
        dice, me = self.liar.dice, self.liar.me
        async with asyncio.TaskGroup() as group:
            while True:
                await asyncio.sleep(dice.uniform(*PAUSE_S))
                member, scheme = self.swarm.members.get(me), dice.choice(self.schemes)
                if member is None or me in self.swarm.stopped or not self.liar.lies:
                    continue
                chain = dice.choice(member.swarm.chains)
                if me in chain.replica.roster and len(chain.replica.roster) > 2:
                    group.create_task(self._carry_out(scheme, member, chain))

    async def _carry_out(self, scheme: str, member: Member, chain: Chain) -> None:
        with suppress(TransportError, ProtocolError):
            await getattr(self, scheme)(member, chain)

    # --- how ------------------------------------------------------------------------------------

    def _made_up(self, name: str, body: bytes) -> bytes | None:
        """What it answers from what it has made up; None: nothing of it is asked for."""
        with suppress(ProtocolError):
            if name == "part":
                request = PartRequest.decode(body)
                data = self._bodies.get(request.digest)
                return None if data is None else data[request.skip :]
            if name == "certificates" and (made := self._certificate) is not None:
                asked, outcome = CertificateRequest.decode(body), made.outcome
                if (asked.fragment, asked.round) == (outcome.fragment, outcome.round):
                    return Certificates((made,)).encode()
        return None

    def _instead(self, name: str, body: bytes) -> bytes:
        """What it says in place of a plan of its own that its node has weighed: owners merge once,
        so by another one they merge nothing."""
        said = decoded(body) if name == "round" and self.liar.lies else None
        mine = isinstance(said, Passed) and said.author == self.liar.me
        plan = decoded(said.body) if isinstance(said, Passed) and mine else None
        if "other_scales" not in self.schemes or not isinstance(plan, Plan) or not plan.grams:
            return body
        return passed(self.liar.identity, self.liar.run, _scaled_down(plan)).encode()

    async def _tell(self, member: Member, name: str, body: bytes) -> None:
        """All others."""
        transport = member.swarm.wiring.transport

        async def tell(peer: PeerId) -> None:
            with suppress(TransportError, ProtocolError):
                await transport.call(peer, name, body, timeout=2.0)

        others = [peer for peer in self.liar.names() if peer != self.liar.me]
        await asyncio.gather(*map(tell, others))

    async def _told(self, member: Member, plan: Plan, *, author: PeerId | None = None) -> None:
        """A plan, signed by this one, whoever is said to be its author."""
        note: Passed = passed(self.liar.identity, self.liar.run, plan)
        await self._tell(member, "round", replace(note, author=author or note.author).encode())

    async def _plan(self, chain: Chain, *, draft: bool = False) -> Plan | None:
        """The plan of others that the round goes by; None where there is none for a while."""
        for _ in range(LOOKS):
            plan = chain.round.agreement.plan
            if plan is not None and not plan.epoch and plan.draft <= draft:
                return plan
            await asyncio.sleep(LOOK_S)
        return None

    def _ballot(self, chain: Chain, mine: bool) -> tuple[int, PeerId]:
        """The next ballot of this one, or of somebody else; and whose it is."""
        agreement = chain.round.agreement
        order, number = agreement.order(agreement.roster), agreement.promised[1] + 1
        while (order[number % len(order)] == self.liar.me) is not mine:
            number += 1
        return number, order[number % len(order)]

    def _anew(self, plan: Plan, chain: Chain, mine: bool = True) -> Plan:
        """A plan of the next ballot, as if nothing were merged yet."""
        ballot, leader = self._ballot(chain, mine)
        weighs = chain.rules.mix.weigh is not None
        contributors = tuple(replace(c, scale=1.0) if weighs else c for c in plan.contributors)
        parts = tuple(replace(part, result=None) for part in plan.parts)
        return replace(
            plan, ballot=ballot, leader=leader, contributors=contributors, parts=parts,
            draft=weighs, grams=(), groups=(),
        )  # fmt: skip

    def _part(self, chain: Chain, part: Part, contributors: int, **how: Any) -> PartResult:
        """A part of zeros with all of everybody in it, signed by this one."""
        codec = self.liar.codec
        data = bytes(codec.encoded_size(part.start, part.stop))
        digest = blake3(data).digest()
        self._bodies = {digest: data}
        place = chain.replica.place
        counts = pack_counts([part.stop - part.start] * contributors)
        result = PartResult(
            place.fragment, place.round, part.start, part.stop, part.owner, codec.name, digest,
            counts, how["basis"], b"",
        )  # fmt: skip
        return sign_result(self.liar.identity, self.liar.run, result)

    # --- what -----------------------------------------------------------------------------------

    async def another_certificate(self, member: Member, chain: Chain) -> None:
        """To be a round further, by a certificate with too few votes, or others' than there are."""
        place, roster, me = chain.replica.place, chain.replica.roster, self.liar.identity
        size, rules = chain.rules.size, chain.rules
        contributors = rules.mix.scaled((Contributor(me.peer_id, 1e3, 1000, True, 1.0),))
        basis = basis_of(self.liar.codec.name, contributors)
        part = Part(0, size, me.peer_id, None)
        result = self._part(chain, part, 1, basis=basis)
        plan = Plan(
            place.fragment, place.round, 0, 0, me.peer_id, place.previous, place.state,
            self.liar.codec.name, roster, contributors, (part,), roster, 1.0, 1.0,
        )  # fmt: skip
        outcome = outcome_of(plan, (result,), place.work)
        head = outcome_hash(outcome)

        def vote(by: Identity) -> bytes:
            at = (self.liar.run, place.fragment, place.round, place.previous)
            return sign_vote(by, *at, (0, 0), head).signature

        votes = {me.peer_id: vote(me)}
        whole = certify(self.liar.run, (0, 0), roster, outcome, votes)
        strangers = [Identity.from_seed(self.liar.dice.randbytes(32)) for _ in roster]
        signed = whole.votes[0]
        match self.liar.dice.choice(["few", "theirs", "strangers", "twice"]):
            case "theirs":
                shown = tuple(replace(signed, voter=peer) for peer in roster)
            case "strangers":
                shown = tuple(type(signed)(one.peer_id, vote(one)) for one in strangers)
            case "twice":
                shown = (signed,) * len(roster)
            case _:
                shown = (signed,)
        self._certificate = replace(whole, votes=shown)
        claim = replace(
            chain.presence.status, round=place.round + 1, head=head, work=outcome.work
        )  # fmt: skip
        await self._announce(member, claim)

    async def _announce(self, member: Member, claim: Announce) -> None:
        presence = member.swarm.presence
        presence._sequence += 1
        sealed = seal(
            self.liar.identity, claim, purpose="announce", run=self.liar.run,
            expires=presence.wall() + LIFETIME_S, sequence=presence._sequence,
        )  # fmt: skip
        await self._tell(member, "announce", sealed)

    async def forged_votes(self, member: Member, chain: Chain) -> None:
        """That all others have voted as this one did."""
        for _ in range(LOOKS):
            agreement = chain.round.agreement
            if agreement.voted is not None and agreement.certificate is None:
                break
            await asyncio.sleep(LOOK_S / 4)
        else:
            return
        place, (ballot, outcome) = agreement.place, agreement.voted
        at = (place.run, place.fragment, place.round, place.previous, ballot)
        vote = sign_vote(self.liar.identity, *at, outcome_hash(outcome))
        said = [replace(vote, voter=peer).encode() for peer in agreement.office]
        await asyncio.gather(*(self._tell(member, "round", body) for body in said))

    async def merged_by_others(self, member: Member, chain: Chain) -> None:
        """That another one has merged zeros."""
        plan = await self._plan(chain)
        if plan is None:
            return
        basis = basis_of(plan.codec, plan.contributors)
        parts = list(plan.parts)
        theirs = [n for n, part in enumerate(parts) if part.owner != self.liar.me]
        if not theirs or plan.codec != self.liar.codec.name:
            return
        at = self.liar.dice.choice(theirs)
        result = self._part(chain, parts[at], len(plan.contributors), basis=basis)
        parts[at] = replace(parts[at], result=result)
        ballot, leader = self._ballot(chain, True)
        await self._told(member, replace(plan, ballot=ballot, leader=leader, parts=tuple(parts)))

    def _richer(self, plan: Plan) -> Plan:
        """One in which somebody brings a token more."""
        first, *rest = plan.contributors
        return replace(plan, contributors=(replace(first, tokens=first.tokens + 1), *rest))

    async def in_their_name(self, member: Member, chain: Chain) -> None:
        """A plan of whoever leads next."""
        plan = await self._plan(chain, draft=True)
        if plan is not None:
            made = self._richer(self._anew(plan, chain, mine=False))
            await self._told(member, made, author=made.leader)

    async def out_of_turn(self, member: Member, chain: Chain) -> None:
        """A plan of its own, under the ballot of whoever leads next."""
        plan = await self._plan(chain, draft=True)
        if plan is not None:
            made = self._richer(self._anew(plan, chain, mine=False))
            await self._told(member, replace(made, leader=self.liar.me))

    def _asked(self, chain: Chain, ballot: int) -> bytes:
        place, roster = chain.replica.place, chain.replica.roster
        return Prepare(place.fragment, place.round, 0, ballot, place.previous, roster).encode()

    async def back(self, member: Member, chain: Chain) -> None:
        """To stand under a ballot, and then under one below it."""
        ballot, _ = self._ballot(chain, True)
        above = ballot + len(chain.replica.roster)
        low, high = self._asked(chain, ballot), self._asked(chain, above)
        await self._tell(member, "round", high)
        await asyncio.sleep(0.15)
        await self._tell(member, "round", low)

    async def plans_back(self, member: Member, chain: Chain) -> None:
        """The same, and then a plan under the lower one."""
        plan = await self._plan(chain, draft=True)
        if plan is not None:
            made = self._anew(plan, chain)
            high = self._asked(chain, made.ballot + len(plan.roster))
            await self._tell(member, "round", high)
            await asyncio.sleep(0.15)
            await self._told(member, made)

    async def other_scales(self, member: Member, chain: Chain) -> None:
        """A plan that gives somebody less than the rule does."""
        plan = await self._plan(chain)
        if plan is None:
            return
        ballot, leader = self._ballot(chain, True)
        parts = tuple(replace(part, result=None) for part in plan.parts)
        made = replace(plan, ballot=ballot, leader=leader, parts=parts)
        await self._told(member, _scaled_down(made))

    async def next_office(self, member: Member, chain: Chain) -> None:
        """A plan by which it would be alone in office, or beside nobody knows whom."""
        plan = await self._plan(chain, draft=True)
        if plan is None:
            return
        stranger = Identity.from_seed(self.liar.dice.randbytes(32)).peer_id
        roster = self.liar.dice.choice([(self.liar.me,), (*plan.next_roster, stranger)])
        await self._told(member, replace(self._anew(plan, chain), next_roster=roster))

    async def slander(self, member: Member, chain: Chain) -> None:
        """That an owner has merged something else than it was sent."""
        auditor = chain.auditor
        if not auditor._rounds:
            return
        found = [*auditor._rounds.values()][-1]
        theirs = [r for r in found.certificate.outcome.parts if r.owner != self.liar.me]
        if not theirs:
            return
        result = self.liar.dice.choice(theirs)
        case = auditor._case(found, result.start, result.stop, 0)
        if case is None:
            return
        where = (result.start, result.stop, 0)
        request = EvidenceRequest(self.liar.run, result.fragment, result.round, *where)
        evidence = bytearray(await auditor._pull(result.owner, request, case.size))
        match self.liar.dice.choice(["as it is", "slice", "products"]):
            case "slice":
                first = case._sent(case.present[0])
                evidence[:first] = bytes(first)
            case "products":
                evidence[-8:] = bytes(8)
        found.convicting[where] = bytes(evidence)
        auditor._accuse(found, case)

    async def announced_for(self, member: Member, chain: Chain) -> None:
        """That another one is leaving, in its next life."""
        known = member.swarm.membership.islands
        others = [peer for peer in known if peer != self.liar.me]
        if others:
            theirs = known[self.liar.dice.choice(sorted(others))].announce
            claim = replace(theirs, incarnation=theirs.incarnation + 1, status="leaving")
            await self._announce(member, claim)

    async def announced_before(self, member: Member, chain: Chain) -> None:
        """What others have said of themselves some time ago."""
        heard, self._heard = self._heard, []
        for island in member.swarm.membership.islands.values():
            self._heard.append(island.envelope)
        for envelope in heard:
            await self._tell(member, "announce", envelope)
