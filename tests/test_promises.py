"""What members promised outlives them: nobody votes twice, and nobody keeps out for long."""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_kit import until
from simulated_swarm import Member, simulated_swarm

from gossip.rounds.agreement import Agreement
from gossip.rounds.forgetting import Forgetting
from gossip.rounds.promises import KEPT, At, Promised, Promises, Record
from gossip.rounds.proposer import Proposer
from protocols.errors import RemoteRefused
from protocols.identity import Identity
from protocols.memory import virtual_time
from protocols.messages import Promise, Vote

pytestmark = pytest.mark.usefixtures("remembered_signatures")

ME, OTHER = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2))
RUN = b"r" * 32
HEAD = b"h" * 32  # of the certificate that a round builds on
FORK = b"f" * 32  # of another one


def last(path: Path) -> int | None:
    """The last round on the record of this member."""
    promised = Record(path, RUN, ME).promised
    return None if promised is None else promised.last


# --- the record -------------------------------------------------------------------------------


def test_a_record_is_read_by_the_same_member_of_the_same_run_alone(tmp_path: Path) -> None:
    path = tmp_path / "promised"
    assert last(path) is None
    Record(path, RUN, ME).write(None)
    assert last(path) == -1
    for round_ in (0, 7, 10**12):
        Record(path, RUN, ME).write((round_, HEAD))
        assert last(path) == round_
    assert Record(path, RUN, OTHER).promised is None
    assert Record(path, b"s" * 32, ME).promised is None
    assert last(tmp_path) is None  # it cannot be read


def test_a_torn_record_counts_for_nothing(tmp_path: Path) -> None:
    path = tmp_path / "promised"
    Record(path, RUN, ME).write((7, HEAD))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert last(path) is None
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert last(path) is None
    Record(path, RUN, ME).write((8, HEAD))
    assert last(path) == 8


def test_a_record_and_its_name_are_on_the_disk_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "promised"
    record, sync, synced, failing = Record(path, RUN, ME), os.fsync, list[Path](), [tmp_path]

    def fsync(file: int) -> None:
        (which,) = [p for p in (path, tmp_path) if os.path.samestat(os.fstat(file), p.stat())]
        if which in failing:
            raise OSError("no space left on device")
        sync(file)
        if which == path:
            assert last(path) == writing, "before it is written"
        synced.append(which)

    monkeypatch.setattr(os, "fsync", fsync)
    writing = 3
    with pytest.raises(OSError, match="no space"):
        record.write((3, HEAD))
    assert record.promised is None
    failing.clear()
    synced.clear()
    record.write((3, HEAD))
    assert synced == [path, tmp_path], "its name was not on the disk the first time"
    writing = 4
    record.write((4, HEAD))
    assert synced == [path, tmp_path, path]


def test_rounds_behind_the_record_are_not_forgotten() -> None:
    def forgetting(**known: Any) -> Forgetting:
        given = {"joining": True, "new_identity": False, "among_others": True}
        return Forgetting(100.0, 5, **(given | known))

    lost, kept = forgetting(), forgetting(promised=Promised(6))
    for one in (lost, kept):
        one.heard(7)
    assert [lost.forgot(r, HEAD) for r in (5, 6, 7, 8)] == [True, True, True, False]
    assert [kept.forgot(r, HEAD) for r in (5, 6, 7, 8)] == [True, True, False, False]
    assert lost.abstains(101.0)
    assert not kept.abstains(101.0)
    newcomer = forgetting(promised=Promised(9), among_others=False)
    assert [newcomer.forgot(r, HEAD) for r in (8, 9, 10)] == [True, True, False]
    assert [newcomer.remembers(r, HEAD) for r in (8, 9, 10)] == [False, False, True]


def test_what_was_promised_binds_wherever_a_member_begins_and_not_on_another_side_of_a_fork(
    tmp_path: Path,
) -> None:
    path = tmp_path / "promised"
    record = Record(path, RUN, ME)
    record.write(None)
    for round_ in (3, 4, 6):  # it was not there for the fifth
        record.write((round_, HEAD))
    found = Record(path, RUN, ME).promised
    assert found is not None
    assert found == record.promised
    assert [found.binds(r, HEAD) for r in range(8)] == [False] * 3 + [
        True,
        True,
        False,
        True,
        False,
    ]
    assert not any(found.binds(r, FORK) for r in range(8))
    # started again from an older checkpoint it is bound there, and on the other side of it from now
    record.write((4, FORK))
    found = Record(path, RUN, ME).promised
    assert found is not None
    assert found.last == 6
    assert found.binds(4, HEAD)
    assert found.binds(4, FORK)
    assert found.and_in(4, FORK) is found
    assert not found.binds(6, FORK)
    # what is further back than marks are kept
    record.write((3 + KEPT, HEAD))
    found = Record(path, RUN, ME).promised
    assert found is not None
    assert [found.binds(r, FORK) for r in (2, 3, 4, 5)] == [True, True, True, False]
    record.write((10**9, HEAD))
    found = Record(path, RUN, ME).promised
    assert found is not None
    assert [found.binds(10**9 - n, HEAD) for n in (0, 1, KEPT - 1, KEPT)] == [
        True,
        False,
        False,
        True,
    ]


def test_a_record_that_was_lost_says_nothing_of_the_rounds_before(tmp_path: Path) -> None:
    record = Record(tmp_path / "promised", RUN, ME)
    record.write((7, HEAD))
    assert record.promised is not None
    assert all(record.promised.binds(r, FORK) for r in range(7))
    assert not record.promised.binds(7, FORK)


def test_what_was_promised_in_this_life_binds_who_loses_its_place() -> None:
    """A member that takes another state for the same round begins it once more."""
    for before in (None, Promised(4)):
        one = Forgetting(
            100.0, 5, joining=True, new_identity=False, among_others=True, promised=before
        )
        assert not one.forgot(6, HEAD)
        one.again(Promised(5).and_in(6, HEAD))
        assert one.forgot(6, HEAD)
        assert not one.forgot(6, FORK)


def test_who_claims_to_be_far_ahead_mutes_nobody_for_good() -> None:
    """A member can only have voted where most of those in office had come to the round before."""

    def listening(*claims: int) -> Forgetting:
        found = Forgetting(100.0, 5, joining=True, new_identity=False, among_others=True)
        for number, round_ in enumerate(claims):
            peer = Identity.from_seed(bytes([number]) * 32).peer_id
            found.claimed(peer, round_, len(claims) + 1)
        return found

    assert [listening(7, 2**62, 6).forgot(r, HEAD) for r in (7, 8, 9)] == [True, True, False]
    assert [listening(6, 7, 7).forgot(r, HEAD) for r in (7, 8)] == [True, False]
    assert [listening(6, 6, 7).forgot(r, HEAD) for r in (7, 8)] == [True, False]
    assert [listening(7).forgot(r, HEAD) for r in (7, 8)] == [True, False]  # no liar among two


# --- nothing leaves before it is written ------------------------------------------------------


class Slow(Record):
    """A disk that writes when it is told to, or never can."""

    def __init__(self, path: Path, *, broken: bool = False) -> None:
        super().__init__(path, RUN, ME)
        self.go, self.broken, self.asked = asyncio.Event(), broken, asyncio.Event()

    async def offload(self, work: Any) -> None:
        self.asked.set()
        await self.go.wait()
        work()

    def write(self, at: At | None) -> None:
        if self.broken:
            raise OSError("no space left on device")
        super().write(at)


async def test_what_is_said_waits_for_the_disk_and_keeps_its_order(tmp_path: Path) -> None:
    disk, said, failures = Slow(tmp_path / "promised"), [], []
    async with asyncio.TaskGroup() as group:
        wiring: Any = SimpleNamespace(offload=disk.offload, spawn=group.create_task)
        promises = Promises(disk, wiring, failures.append)
        promises.then(None, lambda: said.append("before"))
        assert said == ["before"]
        for at, word in (((3, HEAD), "vote"), (None, "news"), ((3, HEAD), "more")):
            promises.then(at, lambda word=word: said.append(word))  # type: ignore[misc]
        answering = group.create_task(promises.before_answer((3, HEAD)))
        await disk.asked.wait()
        assert said == ["before"]
        assert not answering.done()
        assert last(tmp_path / "promised") is None
        disk.go.set()
        await answering
    assert said == ["before", "vote", "news", "more"]
    assert last(tmp_path / "promised") == 3
    promises.then((3, HEAD), lambda: said.append("at once"))
    assert said[-1] == "at once"
    assert not failures


async def test_what_waits_for_a_disk_that_does_not_answer_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond that is as if it were lost on the way."""
    monkeypatch.setattr("gossip.rounds.promises.MOST_HELD", 3)
    disk, said, nothing = Slow(tmp_path / "promised"), [], lambda error: None
    async with asyncio.TaskGroup() as group:
        wiring: Any = SimpleNamespace(offload=disk.offload, spawn=group.create_task)
        promises = Promises(disk, wiring, nothing)
        for word in range(5):
            promises.then((3, HEAD), lambda word=word: said.append(word))  # type: ignore[misc]
        await disk.asked.wait()
        assert said == []
        disk.go.set()
    assert said == [0, 1, 2]
    promises.then((3, HEAD), lambda: said.append(5))
    assert said[-1] == 5, "there is room again"


@pytest.mark.parametrize("mended", [False, True])
def test_who_cannot_write_promises_nothing_until_it_can(mended: bool, tmp_path: Path) -> None:
    said, failures, over = [], [], []

    async def main() -> None:
        disk = Slow(tmp_path / "promised", broken=True)
        disk.go.set()
        async with asyncio.TaskGroup() as group:
            wiring: Any = SimpleNamespace(offload=disk.offload, spawn=group.create_task)
            promises = Promises(disk, wiring, failures.append, lambda round_: round_ in over)
            await promises.begin()
            promises.then((3, HEAD), lambda: said.append("vote"))
            promises.then(None, lambda: said.append("news"))
            with pytest.raises(RemoteRefused, match="no space"):
                await promises.before_answer((3, HEAD))
            await asyncio.sleep(100.0)
            assert said == []
            if mended:
                disk.broken = False
            else:
                over.append(3)

    virtual_time.run(main())
    assert said == (["vote", "news"] if mended else ["news"])
    assert last(tmp_path / "promised") == (3 if mended else None), (
        "what is not known is not made up"
    )
    assert len(failures) == 1
    assert "no space" in str(failures[0])


def test_no_answer_of_a_member_promises_what_is_not_on_its_disk(tmp_path: Path) -> None:
    async def slowly(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(2.0)
        return work()

    async def main() -> None:
        async with simulated_swarm(4, think=(30.0, 31.0), records=tmp_path) as swarm:
            await asyncio.sleep(0.5)
            asked, candidate, *_ = swarm.living()
            promises = asked.swarm.chains[0].promises
            promises._wiring = replace(promises._wiring, offload=slowly)
            agreement = candidate.swarm.chains[0].round.agreement
            prepare = Proposer(agreement).prepare(0, agreement.roster)
            assert promises.needed((prepare.round, prepare.previous))
            transport = candidate.swarm.wiring.transport
            answer = await transport.call(asked.peer, "round", prepare.encode(), timeout=10.0)
            promise: Promise = Promise.decode(answer)
            assert (promise.epoch, promise.ballot) == (0, prepare.ballot)
            kept = swarm.record_of(asked.peer, 0)
            assert kept is not None
            assert kept.promised is not None
            assert kept.promised.last == prepare.round

    virtual_time.run(main())


def test_who_is_alone_goes_on_when_its_disk_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated_swarm(1, size=8000, records=tmp_path) as swarm:
            (alone,) = swarm.members.values()

            async def rounds(more: int) -> None:
                goal = len(alone.replica.history) + more
                await until(lambda: len(alone.replica.history) >= goal, 60.0, every=0.1)

            await rounds(2)
            record = alone.swarm.chains[0].record
            assert record is not None
            place = record._path
            place.rename(tmp_path / "away")
            place.mkdir()
            await asyncio.sleep(60.0)
            before = len(alone.replica.history)
            await asyncio.sleep(60.0)
            assert len(alone.replica.history) == before
            place.rmdir()
            await rounds(2)

    virtual_time.run(main())


# --- whole swarms ------------------------------------------------------------------------------


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
