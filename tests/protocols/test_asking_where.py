"""How those are asked who have named a peer, and what of their answers counts."""

from __future__ import annotations

import asyncio

import pytest
from identity_kit import identity
from roads_kit import Resident, Roads

from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.messages import Found, Where
from protocols.whereabouts import ASK_TIMEOUT, MAX_ASKED, VerifiedRecord


class Informant(Resident):
    """Knows the record of one peer; ``after``: seconds until it says so."""

    def __init__(self, roads: Roads, number: int, record: bytes, after: float) -> None:
        super().__init__(roads, number)
        self.record, self.after, self.cancelled = record, after, False
        self.asked = 0
        self.transport.on_call("where", self.answer)

    async def answer(self, peer: PeerId, body: bytes) -> bytes:
        self.asked += 1
        try:
            await asyncio.sleep(self.after)
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        return Found((self.record,) if self.record else ()).encode()


def asked(*answers: tuple[bytes, float]) -> tuple[VerifiedRecord | None, float, list[bool]]:
    """What one learns who asks those that answer so, in what time, and who was not waited for."""

    async def main() -> tuple[VerifiedRecord | None, float, list[bool]]:
        roads = Roads()
        asker = Resident(roads, 1)
        informants = [Informant(roads, 10 + n, *answer) for n, answer in enumerate(answers)]
        for one in informants:
            asker.whereabouts.learn(one.whereabouts.publish([one.address]))
            asker.whereabouts.mention(identity(2).peer_id, by=one.peer)
        clock = asyncio.get_running_loop().time
        began = clock()
        known = await asker.whereabouts.ask(identity(2).peer_id)
        took = clock() - began
        await asyncio.sleep(0)
        return known, took, [one.cancelled for one in informants]

    return virtual_time.run(main())


def wanted(*addresses: str) -> list[bytes]:
    """What the one that is asked for has signed, from the first to the last."""
    whereabouts = Resident(Roads(), 2).whereabouts
    return [whereabouts.publish([address]) for address in addresses]


def test_an_informant_that_says_nothing_holds_up_no_other() -> None:
    (record,) = wanted("192.0.2.2:1")
    known, took, cancelled = asked((b"", 3600), (record, 0.05), (b"", 3600))
    assert known is not None
    assert known.data == record
    assert took < 0.5
    assert cancelled == [True, False, True]


def test_who_has_nothing_to_say_ends_no_question() -> None:
    (record,) = wanted("192.0.2.2:1")
    known, took, _ = asked((b"", 0.01), (record, 2.0), (b"", 0.02))
    assert known is not None
    assert known.data == record
    assert took == pytest.approx(2.0, abs=0.05)


def test_of_answers_that_come_close_together_the_newest_counts() -> None:
    """The first may be from before a move, and lead nowhere."""
    old, new = wanted("192.0.2.2:1", "192.0.2.2:2")
    known, took, _ = asked((old, 0.05), (new, 0.2))
    assert known is not None
    assert known.data == new
    assert took == pytest.approx(0.2, abs=0.05)


def test_where_nobody_says_anything_a_question_ends() -> None:
    known, took, cancelled = asked((b"", 3600), (b"", 3600))
    assert known is None
    assert took == pytest.approx(ASK_TIMEOUT, abs=0.05)
    assert cancelled == [True, True]


class Witness(Resident):
    """Answers with what it is given to say; notes what it was asked."""

    def __init__(self, roads: Roads, number: int, *says: bytes) -> None:
        super().__init__(roads, number)
        self.says = says
        self.questions: list[tuple[PeerId, ...]] = []
        self.transport.on_call("where", self.answer)

    async def answer(self, peer: PeerId, body: bytes) -> bytes:
        self.questions.append(Where.decode(body).peers)
        return Found(self.says).encode()


async def met(asker: Resident, witness: Resident, *about: PeerId) -> None:
    """The witness, whose address is known, has named these."""
    asker.whereabouts.learn(witness.whereabouts.publish([witness.address]))
    for peer in about:
        asker.whereabouts.mention(peer, by=witness.peer)


async def test_what_one_is_asked_at_one_time_is_one_question() -> None:
    """Each has a call, and so a connection of its own, else."""
    roads = Roads()
    asker, them = Resident(roads, 1), [Resident(Roads(), n) for n in range(10, 50)]
    witness = Witness(
        roads, 2, *[one.whereabouts.publish([one.address]) for one in them[:MAX_ASKED]]
    )
    await met(asker, witness, *[one.peer for one in them])
    known = await asyncio.gather(*[asker.whereabouts.ask(one.peer) for one in them])
    assert [one is not None for one in known] == [True] * MAX_ASKED + [False] * 8
    assert [len(question) for question in witness.questions] == [MAX_ASKED, 8]
    assert [peer for question in witness.questions for peer in question] == [o.peer for o in them]
    assert await asker.whereabouts.ask(them[-1].peer) is None
    assert witness.questions[2:] == [(them[-1].peer,)]
    assert not asker.whereabouts._questions


async def test_a_record_that_does_not_hold_spoils_no_other_of_an_answer() -> None:
    """Nor is one kept that nobody has asked for."""
    roads = Roads()
    asker, one, other, third = (Resident(roads, n) for n in (1, 3, 4, 5))
    records = [peer.whereabouts.publish([peer.address]) for peer in (one, other, third)]
    broken = records[0][:-1] + bytes([records[0][-1] ^ 1])
    await met(asker, Witness(roads, 2, broken, records[2], records[1]), one.peer, other.peer)
    known = await asyncio.gather(*[asker.whereabouts.ask(peer.peer) for peer in (one, other)])
    assert [found is not None for found in known] == [False, True]
    assert asker.whereabouts.get(third.peer) is None


async def test_who_leaves_while_a_question_is_under_way_takes_it_from_nobody() -> None:
    roads = Roads()
    asker, one, other = (Resident(roads, n) for n in (1, 3, 4))
    witness = Witness(roads, 2, other.whereabouts.publish([other.address]))
    await met(asker, witness, one.peer, other.peer)
    async with asyncio.timeout(5), asyncio.TaskGroup() as group:
        leaves = group.create_task(asker.whereabouts.ask(one.peer))
        stays = group.create_task(asker.whereabouts.ask(other.peer))
        await asyncio.sleep(0)
        leaves.cancel()
    found = stays.result()
    assert found is not None
    assert found.record.peer == other.peer
    assert not asker.whereabouts._questions


def test_who_has_its_answer_from_another_has_no_question_asked_anew() -> None:
    """Else those who share one wait from its beginning each time that the first of them leaves."""

    async def main() -> tuple[VerifiedRecord | None, float, int]:
        roads = Roads()
        asker, last = Resident(roads, 1), Resident(Roads(), 2)
        slow = Informant(roads, 10, last.whereabouts.publish([last.address]), 2.0)
        await met(asker, slow, last.peer)
        others = [Resident(Roads(), 20 + n) for n in range(5)]
        for n, other in enumerate(others):
            quick = Informant(
                roads, 40 + n, other.whereabouts.publish([other.address]), 0.3 * (n + 1)
            )
            for one in (quick, slow):
                await met(asker, one, other.peer)
        clock = asyncio.get_running_loop().time
        began = clock()
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(asker.whereabouts.ask(one.peer)) for one in (*others, last)]
        assert all(task.result() is not None for task in tasks)
        return tasks[-1].result(), clock() - began, slow.asked

    known, took, asked = virtual_time.run(main())
    assert known is not None
    assert took == pytest.approx(2.0, abs=0.05)
    assert asked == 1
