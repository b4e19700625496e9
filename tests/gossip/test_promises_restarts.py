"""Whole swarms whose members are killed and come back with their promises on record."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from exchange_kit import until
from simulated_swarm import Member, simulated_swarm

from gossip.rounds.agreement import Agreement
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.messages import Vote

pytestmark = pytest.mark.usefixtures("remembered_signatures")


@pytest.mark.parametrize("seed", range(2))
def test_nobody_votes_twice_differently_killed_at_any_moment(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: defaultdict[tuple[Any, ...], set[bytes]] = defaultdict(set)
    counted = Agreement.on_vote

    def on_vote(self: Agreement, vote: Vote) -> Any:
        seen[vote.voter, vote.round, vote.epoch, vote.ballot].add(vote.outcome)
        return counted(self, vote)

    monkeypatch.setattr(Agreement, "on_vote", on_vote)

    async def main() -> int:
        rng = random.Random(seed)
        async with simulated_swarm(4, seed=seed, size=8000, records=tmp_path) as swarm:
            for _ in range(7):
                await asyncio.sleep(rng.uniform(0.1, 1.5))
                victim = rng.choice(swarm.living())
                await swarm.kill(victim)
                await asyncio.sleep(rng.choice([0.0, 0.05, 0.3, 2.0]))
                swarm.restart(victim)
                swarm.agree()
            await asyncio.sleep(10.0)
            swarm.agree()
            lengths = [len(m.replica.history) for m in swarm.members.values()]
            assert max(lengths) - min(lengths) <= 1
            assert {m.swarm.status.status for m in swarm.members.values()} == {"active"}
            return min(lengths)

    assert virtual_time.run(main()) > 8
    assert len(seen) > 30
    assert all(len(outcomes) == 1 for outcomes in seen.values())


def test_who_comes_by_replay_to_a_round_that_it_promised_in_keeps_out_of_it(tmp_path: Path) -> None:
    """The creator's checkpoint is of a time when it was alone. It has taken part in a later round,
    and may have decided it with another one that is cut off by now."""

    async def main() -> None:
        async with simulated_swarm(1, size=8000, records=tmp_path) as swarm:
            (creator,) = swarm.members.values()
            await swarm.committed(2)
            saved = swarm.saved(creator)
            names = [Identity.from_seed(seed * 32) for seed in (b"b", b"c")]
            other, third = [swarm.start(n, status="joining", new_identity=True) for n in names]
            await until(lambda: len(creator.replica.roster) == 3, 60.0)
            await swarm.committed(creator.replica.place.round + 3)

            await until(lambda: creator.swarm.chains[0].under_way, 60.0, every=0.001)
            round_ = creator.replica.place.round
            for member in (creator, other):
                await swarm.kill(member)
            await asyncio.sleep(1.0)
            assert third.replica.place.round == round_
            again = swarm.restart(creator, saved)
            assert again.replica.roster == (creator.peer,)
            await until(lambda: again.replica.place.round > round_ + 2, 60.0)
            assert not again.behind  # it was shown the rounds between
            decided = third.replica.certificates
            reformed = [decided[n].epoch > 0 for n in (round_ - 1, round_, round_ + 1)]
            assert reformed == [False, True, False]
            assert again.swarm.status.status == "active"
            swarm.restart(other)
            await until(lambda: len(again.replica.roster) == 3, 60.0)
            swarm.agree()

    virtual_time.run(main())


def test_a_swarm_whose_checkpoints_are_old_is_held_up_in_the_first_round_alone(
    tmp_path: Path,
) -> None:
    async def main() -> None:
        async with simulated_swarm(3, size=8000, records=tmp_path) as swarm:
            await swarm.committed(3)
            members = list(swarm.members.values())
            async with members[0].swarm.still(), members[1].swarm.still(), members[2].swarm.still():
                saved = [swarm.saved(member) for member in members]
            await swarm.committed(9)
            for member in members:
                await swarm.kill(member)
            first, *_ = again = [
                swarm.restart(member, replicas)
                for member, replicas in zip(members, saved, strict=True)
            ]
            begun = first.replica.place.round
            await swarm.committed(12)
            epochs = [one.epoch for one in first.replica.certificates]
            assert epochs[begun:12] == [1] + [0] * (11 - begun)
            assert {member.swarm.status.status for member in again} == {"active"}
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize("recorded", [True, False])
def test_who_restarts_in_a_long_round_is_in_it(recorded: bool, tmp_path: Path) -> None:
    """All train for 40 s; one is started again in the middle. With its record it takes part in that
    round, and its work is merged; without it is out of it."""

    async def main() -> tuple[bool, str]:
        records = tmp_path if recorded else None
        async with simulated_swarm(3, think=(1.0, 1.0), size=8000, records=records) as swarm:

            async def rounds(count: int) -> None:
                await until(lambda: len(first.replica.history) >= count, 200.0, every=0.1)

            first: Member = next(iter(swarm.members.values()))
            await rounds(3)
            swarm.think = (40.0, 40.0)
            await asyncio.sleep(3.0)
            here = len(first.replica.history)
            victim = list(swarm.members.values())[1]
            await swarm.kill(victim)
            await asyncio.sleep(1.0)
            swarm.think = (20.0, 20.0)
            again = swarm.restart(victim)
            await asyncio.sleep(10.0)
            status = again.swarm.status.status
            assert len(first.replica.history) == here  # the round is the same
            await rounds(here + 1)
            newest = first.swarm.chains[0].ledger.newest()
            assert newest is not None
            return victim.peer in {c.peer for c in newest.outcome.contributors}, status

    merged, status = virtual_time.run(main())
    assert status == ("active" if recorded else "joining")
    assert merged == recorded
