"""The virtual clock: it jumps, keeps order, repeats itself and notices a deadlock."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from protocols.memory.virtual_time import DeadlockError, VirtualLoop, run


def now() -> float:
    return asyncio.get_running_loop().time()


def test_an_hour_passes_in_no_time() -> None:
    async def main() -> float:
        await asyncio.sleep(3600)
        return now()

    began = time.monotonic()
    assert run(main()) == 3600.0
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("start", [0.0, 5.5, 1.7e9])
def test_the_clock_starts_where_it_is_told(start: float) -> None:
    async def main() -> list[float]:
        seen = [now()]
        for _ in range(3):
            await asyncio.sleep(0.25)
            seen.append(now())
        return seen

    assert run(main(), start=start) == [start + 0.25 * i for i in range(4)]


def test_timers_fire_in_order_at_their_own_time() -> None:
    async def main() -> list[tuple[float, str]]:
        seen: list[tuple[float, str]] = []

        async def sleeper(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((now(), name))

        async with asyncio.TaskGroup() as group:
            group.create_task(sleeper("late", 3.0))
            group.create_task(sleeper("early", 1.0))
            group.create_task(sleeper("middle", 2.0))
        return seen

    assert run(main()) == [(1.0, "early"), (2.0, "middle"), (3.0, "late")]


def test_a_time_out_fires_at_its_virtual_moment() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.sleep(100)
        return now()

    assert run(main()) == 7.0


def test_waits_longer_than_a_selector_may_sleep() -> None:
    async def main() -> float:
        await asyncio.sleep(30 * 86400)  # asyncio caps one select at a day
        return now()

    assert run(main()) == pytest.approx(30 * 86400)


def test_the_same_program_gives_the_same_history() -> None:
    async def main() -> list[tuple[float, int]]:
        rng = random.Random(7)
        history: list[tuple[float, int]] = []

        async def worker(name: int) -> None:
            for _ in range(20):
                await asyncio.sleep(rng.expovariate(1.0))
                history.append((now(), name))

        async with asyncio.TaskGroup() as group:
            for name in range(16):
                group.create_task(worker(name))
        return history

    first, second = run(main()), run(main())
    assert first == second
    assert len(first) == 320
    assert [t for t, _ in first] == sorted(t for t, _ in first)


def test_a_deadlock_is_an_error_that_names_who_waits() -> None:
    async def main() -> None:
        asyncio.current_task().set_name("stuck-main")  # type: ignore[union-attr]
        await asyncio.Event().wait()

    with pytest.raises(
        DeadlockError, match=r"deadlock at 0\.0+ s: nothing scheduled, 1 tasks wait"
    ) as e:
        run(main())
    assert "stuck-main at " in str(e.value)
    assert "locks.py" in str(e.value) or "test_virtual_time.py" in str(e.value)


def test_a_deadlock_cancels_the_tasks_it_leaves() -> None:
    cleaned: list[str] = []

    async def main() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append("yes")

    with pytest.raises(DeadlockError):
        run(main())
    assert cleaned == ["yes"]


def test_thread_work_runs_inline_and_keeps_its_errors() -> None:
    async def main() -> None:
        assert await asyncio.to_thread(lambda: 40 + 2) == 42
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)
        assert now() == 0.0

    run(main())


def test_errors_of_the_program_come_out() -> None:
    async def main() -> None:
        await asyncio.sleep(1)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        run(main())


def test_many_sleepers_all_wake() -> None:
    async def main() -> float:
        async def worker(step: float) -> None:
            for _ in range(int(700 / step) + 1):
                await asyncio.sleep(step)

        async with asyncio.TaskGroup() as group:
            for i in range(64):
                group.create_task(worker(10 + i / 10))
        return now()

    assert run(main()) >= 700


def test_the_loop_closes_like_any_other() -> None:
    loop = VirtualLoop(start=3.0)
    try:
        assert loop.time() == 3.0
        assert loop.run_until_complete(asyncio.sleep(2, "done")) == "done"
        assert loop.time() == 5.0
    finally:
        loop.close()
    assert loop.is_closed()
