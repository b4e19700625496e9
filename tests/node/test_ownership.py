"""Whose the vectors are: one fragment after the other, and all of them at once."""

from __future__ import annotations

import asyncio

from node.island.ownership import VectorOwnership


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
