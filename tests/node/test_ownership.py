"""Whose the vectors are: one fragment after the other, and all of them at once."""

from __future__ import annotations

import asyncio

from node.island.ownership import VectorOwnership
from protocols.memory import virtual_time


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_fragment_is_taken_once_it_is_free() -> None:
    ownership = VectorOwnership(2, free=False)
    taking = asyncio.create_task(ownership.take(0))
    await soon()
    assert not taking.done()
    ownership.free(0)
    await taking
    assert not ownership.is_free(0)
    assert not ownership.is_free(1)
    ownership.free(1)
    await ownership.take(1)  # at the same time


async def test_who_reads_all_waits_for_writers_and_keeps_others_from_starting() -> None:
    ownership = VectorOwnership(3, free=True)
    await ownership.take(1)
    await ownership.take(0)
    ownership.written(0)
    reading = asyncio.create_task(ownership.all_to_read())
    taking = asyncio.create_task(ownership.take(2))
    await soon()
    assert not reading.done()
    assert not taking.done()
    ownership.written(1)
    await reading
    ownership.free(1)  # its own merge was read; the evaluation goes on
    await soon()
    assert not taking.done()
    ownership.free(0)
    await taking


async def test_two_who_want_the_same_fragment_have_it_in_turn() -> None:
    ownership = VectorOwnership(1, free=True)
    order: list[int] = []

    async def use(number: int) -> None:
        await ownership.take(0)
        order.append(number)
        await soon()
        order.append(number)
        ownership.written(0)
        ownership.free(0)

    await asyncio.gather(*(use(number) for number in range(3)))
    assert order in ([0, 0, 1, 1, 2, 2], [0, 0, 2, 2, 1, 1])


async def read(ownership: VectorOwnership, seconds: float, *, evaluates: bool = False) -> float:
    """Give fragment 0 to a trainer that takes so long; how late it was just before."""
    await ownership.take(0)
    ownership.written(0)
    if evaluates:
        await ownership.all_to_read()
    await asyncio.sleep(seconds)
    late = ownership.late_s(0)
    ownership.free(0)
    assert ownership.late_s(0) == 0
    return late


def test_who_takes_longer_to_read_than_it_ever_did_is_late() -> None:
    async def main() -> None:
        ownership = VectorOwnership(2, free=True)
        assert await read(ownership, 3.0) == 3.0
        assert await read(ownership, 2.0) == 0.0
        assert await read(ownership, 5.0) == 2.0
        assert ownership.late_s(1) == 0.0
        await ownership.take(0)
        await asyncio.sleep(60.0)  # the daemon writes
        assert ownership.late_s(0) == 0.0
        ownership.written(0)
        await asyncio.sleep(60.0)
        ownership.free()  # nobody is there who could
        assert ownership.late_s(0) == 0.0
        assert await read(ownership, 6.0) == 1.0

    virtual_time.run(main())


def test_what_another_fragment_took_to_read_is_no_time_of_an_evaluation() -> None:
    async def main() -> None:
        ownership = VectorOwnership(2, free=True)
        await ownership.take(1)
        ownership.written(1)
        await ownership.take(0)
        ownership.written(0)
        await ownership.all_to_read()
        await asyncio.sleep(3.0)
        ownership.free(1)  # read before the evaluation
        await asyncio.sleep(60.0)
        assert ownership.late_s(0) == 0.0

    virtual_time.run(main())


def test_who_evaluates_before_it_reads_is_late_once_such_a_time_is_known() -> None:
    async def main() -> None:
        ownership = VectorOwnership(1, free=True)
        assert await read(ownership, 1.0) == 1.0
        assert await read(ownership, 40.0, evaluates=True) == 0.0
        assert await read(ownership, 50.0, evaluates=True) == 10.0
        assert await read(ownership, 5.0) == 4.0
        ownership.begin()
        await asyncio.sleep(90.0)
        assert ownership.late_s(0) == 0.0

    virtual_time.run(main())
