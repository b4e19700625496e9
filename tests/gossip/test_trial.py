"""Identities cost nothing: what many that come at once can do where strangers come in."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from exchange_kit import until
from gossip_kit import announce_of, decided
from identity_kit import identity
from simulated_swarm import Member, SimulatedSwarm, contributes, lengths, simulated_swarm
from toy_replica import RUN, ToyReplica

from gossip.plans.certificate import leader_order
from gossip.plans.rules import Rules
from gossip.rounds.trial import PATIENT, Trial
from protocols.bounds import MAX_ROSTER
from protocols.envelope import seal
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.messages import Certificate

ONES = [Identity.from_seed(bytes([40 + n]) * 32) for n in range(50)]


class Open(SimulatedSwarm):
    """A swarm that strangers may join."""

    def rules_of(self, replica: ToyReplica) -> Rules:
        return replace(self.rules, strangers=True)


async def announce(swarm: SimulatedSwarm, identities: Sequence[Identity], seconds: float) -> None:
    """They say that they are there and stand where each member stands, and do nothing else."""

    async def deaf(peer: PeerId, body: bytes) -> bytes:
        return b""

    sequence = 0
    for one in identities:
        swarm.network.join(one.peer_id).on_call("announce", deaf)
    end = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.5)
        sequence += 1
        for member in swarm.living():
            for one in identities:
                said = announce_of(one.peer_id, member.replica.place, ready=False)
                wall = member.swarm.presence.wall() + 60
                envelope = seal(
                    one, said, purpose="announce", run=RUN, expires=wall, sequence=sequence
                )
                member.swarm.presence.learn(envelope, one.peer_id)


def offices(member: Member) -> list[tuple[PeerId, ...]]:
    """Who was in office after each round."""
    return [certificate.outcome.next_roster for certificate in member.replica.certificates]


@pytest.mark.parametrize("count", [6, 50])
def test_who_only_announces_itself_stops_no_run(count: int) -> None:
    """Under however many names: those who take part are a majority of those in office."""

    async def main() -> None:
        async with simulated_swarm(4, made=Open, size=4000) as swarm:
            members = list(swarm.members.values())
            await announce(swarm, ONES[:count], 20.0)
            swarm.agree()
            assert min(lengths(members)) >= 10
            assert max(map(len, offices(members[0]))) == 7

    virtual_time.run(main())


def test_an_honest_newcomer_gets_in_among_them() -> None:
    async def main() -> None:
        async with simulated_swarm(4, made=Open, size=4000) as swarm:
            founders = list(swarm.members.values())
            asked = asyncio.create_task(announce(swarm, ONES[:6], 30.0))
            await asyncio.sleep(5.0)
            newcomer = swarm.start(identity(99), status="joining", new_identity=True)
            await asked
            swarm.agree()
            assert newcomer.peer in founders[0].replica.roster
            assert contributes(newcomer, founders[0], 0)

    virtual_time.run(main())


@pytest.mark.parametrize(("founders", "rounds"), [(1, 3), (4, 7)])
def test_twelve_honest_ones_are_soon_in_office(founders: int, rounds: int) -> None:
    async def main() -> None:
        async with simulated_swarm(founders, made=Open, size=4000) as swarm:
            first = next(iter(swarm.members.values()))
            await asyncio.sleep(3.0)
            newcomers = [swarm.start(one, status="joining", new_identity=True) for one in ONES[:12]]
            everybody = {*swarm.roster, *(one.peer for one in newcomers)}
            began = len(first.replica.history)
            await asyncio.sleep(12.0)
            swarm.agree()
            took = next(n for n, office in enumerate(offices(first)) if set(office) == everybody)
            assert took - began <= rounds
            assert all(contributes(newcomer, first, 0) for newcomer in newcomers)

    virtual_time.run(main())


@pytest.mark.parametrize("again", [1, 2])
def test_members_that_took_others_for_tried_stop_no_run(again: int, tmp_path: Path) -> None:
    """Some of four are started again, lead, and take in more than the rest ever votes for."""

    async def main() -> None:
        async with simulated_swarm(
            3, made=Open, size=4000, think=(3.0, 3.3), records=tmp_path
        ) as swarm:
            first, second, third = swarm.members.values()
            newcomer, *more = ONES[:4]
            office = tuple(sorted([*swarm.roster, newcomer.peer_id]))

            def leads_next() -> bool:
                next_ = first.replica.place.round + 1
                return next_ > 2 and leader_order(RUN, 0, next_, office)[0] == first.peer

            await until(leads_next, 60.0)
            untried = swarm.start(newcomer, status="joining", new_identity=True)
            everybody = [first, second, third, untried]
            await until(lambda: all(one.replica.roster == office for one in everybody), 20.0)
            stood_at = third.replica.place.round
            for one in (first, second)[:again]:
                await swarm.kill(one)
            await asyncio.sleep(0.3)
            for one in (first, second)[:again]:
                swarm.restart(one)
            for one in more:
                swarm.start(one, status="joining", new_identity=True)
            if again == 1:
                voted = swarm.members[first.peer].swarm.chains[0]
                await until(lambda: voted.round.agreement.voted is not None, 20.0)
                assert third.replica.place.round == stood_at
                await swarm.kill(untried)  # the rest are no majority without who has voted
            await until(lambda: third.replica.place.round >= stood_at + 5, 90.0)
            swarm.agree()

    virtual_time.run(main())


def test_who_has_missed_rounds_takes_everybody_for_tried() -> None:
    """They may have shown something in these."""
    ids = [one.peer_id for one in ONES]

    async def main() -> None:
        async with simulated_swarm(3, made=Open, size=4000) as swarm:
            chain = next(iter(swarm.members.values())).swarm.chains[0]
            assert chain.trial is not None
            chain.trial.note(certificate(0, range(4), range(7), range(4)))
            assert chain.trial.room(ids[:7]) == 0
            here = chain.replica.place
            further = replace(here, round=9, previous=bytes(32), work=2 * here.work + 1)

            async def jump() -> None:
                """Its state is replaced."""

            await chain.move(jump, further, None, chain.lineage)
            assert chain.trial.room(ids[:7]) == 6
            assert chain.round.trial is chain.trial

    virtual_time.run(main())


def certificate(
    round_: int, office: Sequence[int], then: Sequence[int], owners: Sequence[int]
) -> Certificate:
    """One of a round that some decide, whose parts some have merged: who is there by numbers."""
    ids = [one.peer_id for one in ONES]
    made = decided(ONES[:1])
    parts = tuple(replace(made.outcome.parts[0], owner=ids[n], counts=b"") for n in owners)
    outcome = replace(
        made.outcome,
        round=round_,
        parts=parts,
        next_roster=tuple(sorted(ids[n] for n in then)),
    )
    return replace(made, roster=tuple(sorted(ids[n] for n in office)), outcome=outcome)


def test_those_who_have_shown_something_are_a_majority() -> None:
    ids = [one.peer_id for one in ONES]
    trial, founders, many = Trial(), range(4), {one.peer_id for one in ONES[4:]}
    assert [trial.room(ids[:n]) for n in range(6)] == [MAX_ROSTER] * 2 + [1, 2, 3, 4]
    seats = trial.seated(set(ids[:4]), ids[4:], 0)
    assert seats == set(ids[:7]), "in the order in which they have come"
    trial.note(certificate(0, founders, range(7), founders))
    assert trial.room(ids[:7]) == 0
    trial.note(certificate(1, range(7), range(7), [0, 5]))
    assert trial.room(ids[:7]) == 5 - 1 - 2, "one of three has merged something"
    last = PATIENT + 1
    trial.note(certificate(last, range(7), range(7), [0]))
    assert trial.seated(set(ids[:7]), [], last) == set(ids[:7]), "nobody wants its place"
    seats = trial.seated(set(ids[:7]), ids[7:], last)
    assert seats == {*ids[:4], ids[5], *ids[7:11]}
    trial.note(certificate(last + 1, range(7), [0, 1, 2, 3, 5], [0]))
    assert ids[4] not in trial.seated(set(ids[:4]), [ids[4], *many], last + 2), "it comes last"


def test_who_of_a_round_is_forgotten_first_is_the_same_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """However each process happens to order its sets."""
    monkeypatch.setattr("gossip.rounds.trial.MAX_FAILED", 5)
    trial, founders = Trial(), range(4)
    trial.note(certificate(0, founders, range(16), founders))
    trial.note(certificate(1, range(16), founders, founders))
    lost = sorted(one.peer_id for one in ONES[4:16])
    assert trial._failed.keys() == set(lost[-5:])
