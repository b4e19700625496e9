"""Members that take the lead of rounds for themselves: whole swarms on the virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from gossip_kit import announce_of
from simulated_swarm import Member, lengths, simulated_swarm
from toy_replica import RUN

from bootstrap.manifest_rounds import Merge
from gossip.catchup.replay import Ending
from gossip.plans.certificate import leader_order
from gossip.plans.planning import Remains
from gossip.rounds.agreement import Agreement
from gossip.rounds.company import Company
from gossip.rounds.drafting import Drafting
from gossip.rounds.instructions import Send
from gossip.rounds.proposer import Proposer
from gossip.rounds.round import Round
from node.replicas.mixing import mix_of
from protocols.envelope import seal
from protocols.errors import TransferStalled
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import Gram, Plan, Prepare

STRANGER = Identity.from_seed(b"s" * 32)


def silence(member: Member) -> None:
    """It talks, and moves no tensors."""

    async def push(peer: PeerId, *what: Any, timeout: float, **more: Any) -> bytes:
        await asyncio.sleep(timeout)
        raise TransferStalled("nothing moved")

    member.swarm.wiring.transport.push = push  # type: ignore[method-assign]


def free(agreement: Agreement) -> tuple[int, int]:
    """The lowest ballot of its own above everything seen."""
    asked = Proposer(agreement).prepare(0, agreement.roster)
    return (asked.epoch, asked.ballot)


def plans_anew(member: Member, now: float) -> None:
    """It sends a plan under a ballot that it has asked nobody for."""
    chain = member.swarm.chains[0]
    of = chain.round
    remains = Remains(free(of.agreement), of.roster, None, {})
    chain.carry_out(of, of._lead(remains, now))


def asks_anew(member: Member, now: float) -> None:
    """It asks for promises, and makes nothing of them."""
    chain = member.swarm.chains[0]
    of = chain.round
    prepare = Proposer(of.agreement).prepare(0, of.roster)
    of.agreement.on_prepare(chain.me, prepare)
    chain.carry_out(of, [Send(peer, prepare) for peer in of.roster if peer != chain.me])


@dataclass
class AsksAgain:
    """It asks for the same promise all the time, once it has it, and makes nothing of it."""

    of: Round | None = None
    asked: Prepare | None = None

    def __call__(self, member: Member, now: float) -> None:
        chain = member.swarm.chains[0]
        of = chain.round
        if of is not self.of or self.asked is None:
            self.of, self.asked = of, Proposer(of.agreement).prepare(0, of.roster)
            of.agreement.on_prepare(chain.me, self.asked)
            of.tick = lambda now: []  # type: ignore[method-assign]
            of.leadership.compose = lambda *what: None  # type: ignore[method-assign]
        chain.carry_out(of, [Send(peer, self.asked) for peer in of.roster if peer != chain.me])


def commits_beside(act: Callable[[Member, float], None], every: float) -> int:
    """Rounds that four commit in half a minute with a fifth that is silent, and does that.

    That it is silent alone leaves them 18.
    """
    found = []

    async def main() -> None:
        async with simulated_swarm(5) as swarm:
            members = list(swarm.members.values())
            faulty, others = members[0], members[1:]
            silence(faulty)
            now = asyncio.get_running_loop().time
            end = now() + 30.0
            while now() < end:
                await asyncio.sleep(every)
                act(faulty, now())
            swarm.agree()
            found.append(min(lengths(others)))

    virtual_time.run(main())
    return found[0]


@pytest.mark.parametrize(
    ("act", "every"),
    [
        (plans_anew, 0.2),
        (plans_anew, 0.6),
        (plans_anew, 2.0),
        (asks_anew, 1.2),
        (AsksAgain(), 0.2),
        (AsksAgain(), 0.6),
    ],
)
def test_who_takes_the_lead_again_and_again_stops_nobody(
    act: Callable[[Member, float], None], every: float
) -> None:
    assert commits_beside(act, every) >= 5


def test_who_moves_nothing_is_counted_on_ever_less() -> None:
    """Else each round would be planned anew, or wait for it: 10 rounds in half a minute."""

    async def main() -> None:
        async with simulated_swarm(5, uploads=[12.5e6] * 5) as swarm:
            faulty, *others = swarm.members.values()
            silence(faulty)
            await asyncio.sleep(30.0)
            first = min(lengths(others))
            assert first >= 14
            await asyncio.sleep(30.0)
            swarm.agree()
            assert min(lengths(others)) - first >= first + 3  # it owns nothing, and leads last

    virtual_time.run(main())


@pytest.mark.parametrize("whom", ["itself", "a stranger", "all but one"])
def test_no_leader_chooses_alone_who_is_in_office_next(
    whom: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everybody leads in its turn, and whoever is in office decides the next round."""
    honest = Company.next_roster

    async def main() -> None:
        async with simulated_swarm(4) as swarm:
            members = list(swarm.members.values())
            faulty, others = members[0], members[1:]
            named = {
                "itself": {faulty.peer},
                "a stranger": {*swarm.roster, STRANGER.peer_id},
                "all but one": set(swarm.roster) - {others[0].peer},
            }[whom]

            def next_roster(
                company: Company, roster: tuple[PeerId, ...], reformed: bool, now: float
            ) -> set[PeerId]:
                asked = honest(company, roster, reformed, now)
                return named if company.me == faulty.peer else asked

            monkeypatch.setattr(Company, "next_roster", next_roster)
            await asyncio.sleep(30.0)
            swarm.agree()
            certificates = others[0].replica.certificates
            assert {one.outcome.next_roster for one in certificates} == {swarm.roster}
            assert min(lengths(members)) >= 12
            led = [leader_order(RUN, 0, one.outcome.round, swarm.roster)[0] for one in certificates]
            assert faulty.peer in led

    virtual_time.run(main())


def test_strangers_have_no_say_in_which_state_is_right() -> None:
    """Identities cost nothing: however many claim to hold another one, those in office count."""
    strangers = [Identity.from_seed(bytes([200 + n]) * 32) for n in range(8)]
    given_up: list[Ending] = []

    async def on_behind(member: Member, fragment: int, ending: Ending) -> None:
        given_up.append(ending)

    async def main() -> None:
        async with simulated_swarm(3) as swarm:
            swarm.on_behind = on_behind
            for turn in range(50):
                await asyncio.sleep(0.1)
                for member in swarm.members.values():
                    place = replace(member.replica.place, state=b"another".ljust(32))
                    for stranger in strangers:
                        member.swarm.presence.learn(
                            seal(
                                stranger,
                                announce_of(stranger.peer_id, place),
                                purpose="announce",
                                run=RUN,
                                expires=member.swarm.presence.wall() + 60,
                                sequence=turn,
                            )
                        )
            swarm.agree()

    virtual_time.run(main())
    assert not given_up


def test_who_makes_no_plan_of_its_draft_leads_no_more_in_that_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each renewed draft would have as long again as the round has lasted, several times over."""

    async def main() -> None:
        async with simulated_swarm(5, mix=mix_of(Merge(rule="geometric-median"))) as swarm:
            liar, *others = list(swarm.members.values())
            gathered = Drafting.add

            def nothing(self: Drafting, sender: PeerId, gram: Gram) -> Plan | None:
                return None if self.agreement.me == liar.peer else gathered(self, sender, gram)

            monkeypatch.setattr(Drafting, "add", nothing)
            now = asyncio.get_running_loop().time
            while now() < 60.0:
                await asyncio.sleep(1.0)
                plans = [other.swarm.chains[0].round.agreement.plan for other in others]
                if any(plan is not None and plan.leader != liar.peer for plan in plans):
                    plans_anew(liar, now())
            swarm.agree()
            found.append(min(lengths(others)))

    found: list[int] = []
    virtual_time.run(main())
    assert found[0] >= 8
