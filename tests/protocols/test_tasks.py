"""Who owns a task: what ends when, and where errors come out."""

from __future__ import annotations

import asyncio

import pytest

from protocols.memory import virtual_time
from protocols.tasks import Background, Tasks, Together, beside, every, first, in_turn

FOREVER = 3600.0


class Broken(Exception):
    pass


class Work:
    """Something that runs until it is told to end, and notes how it ended."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ended = ""

    async def run(self) -> str:
        try:
            await asyncio.sleep(0)  # from Python 3.12 on who waits for what is there does not pause
            await asyncio.wait_for(self.go.wait(), FOREVER)
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it takes a moment to clean up
            self.ended = "cancelled"
            raise
        self.ended = "done"
        return "result"


async def fail() -> None:
    raise Broken


async def test_what_runs_beside_a_block_ends_with_it() -> None:
    work = Work()
    async with beside(work.run()) as task:
        await asyncio.sleep(0)
        assert not task.done()
    assert work.ended == "cancelled"


async def test_the_error_of_what_runs_beside_a_block_comes_out_as_it_is() -> None:
    with pytest.raises(Broken):
        async with beside(fail()):
            await asyncio.sleep(0)
    with pytest.raises(Broken):  # also where the block had no time to see it
        async with beside(fail()) as task:
            await asyncio.wait([task])


async def test_a_blocks_own_error_comes_first() -> None:
    work = Work()

    async def block() -> None:
        async with beside(work.run()):
            await asyncio.sleep(0)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await block()
    assert work.ended == "cancelled"


async def test_a_block_that_is_cancelled_takes_what_runs_beside_it_along() -> None:
    work = Work()

    async def block() -> None:
        async with beside(work.run()):
            await asyncio.sleep(FOREVER)

    task = asyncio.create_task(block())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.ended == "cancelled"


async def test_the_first_to_end_says_how_and_the_others_are_cancelled() -> None:
    quick, slow = Work(), Work()
    quick.go.set()
    assert await first(slow.run(), quick.run()) == "result"
    assert (quick.ended, slow.ended) == ("done", "cancelled")
    slow = Work()
    with pytest.raises(Broken):
        await first(slow.run(), fail())
    assert slow.ended == "cancelled"


async def test_who_waits_for_the_first_may_be_cancelled() -> None:
    works = [Work(), Work()]
    task = asyncio.create_task(first(*(work.run() for work in works)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [work.ended for work in works] == ["cancelled"] * 2


async def test_the_background_ends_when_it_is_closed() -> None:
    background, works = Background(), [Work(), Work()]
    tasks = [background.spawn(work.run()) for work in works]
    await asyncio.sleep(0)
    works[0].go.set()
    assert await tasks[0] == "result"
    await background.aclose()
    assert [work.ended for work in works] == ["done", "cancelled"]
    await background.aclose()  # once more does no harm


async def test_the_background_may_be_waited_for() -> None:
    background, work = Background(), Work()

    async def begins_more() -> None:
        background.spawn(work.run())

    background.spawn(begins_more())
    asyncio.get_running_loop().call_soon(work.go.set)
    await asyncio.wait_for(background.join(), 5)
    assert work.ended == "done"


async def test_what_is_spawned_in_a_group_that_has_ended_does_not_begin() -> None:
    async with asyncio.TaskGroup() as group:
        tasks = Tasks(group)
        work = Work()
        tasks.spawn(work.run())  # its result is of no interest
        await asyncio.sleep(0)
        tasks.cancel()
    assert work.ended == "cancelled"
    late = Work()
    task = tasks.spawn(late.run())
    await asyncio.wait([task])
    assert task.cancelled()
    assert late.ended == ""


async def test_work_that_several_want_is_done_once() -> None:
    together: Together[str, int] = Together()
    begun: list[str] = []
    go = asyncio.Event()

    async def work(key: str) -> int:
        begun.append(key)
        await go.wait()
        return len(begun)

    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(together.do(key, lambda k=key: work(k))) for key in "aaba"]
        await asyncio.sleep(0)
        go.set()
    assert [task.result() for task in asking] == [2] * 4
    assert begun == ["a", "b"]
    assert await together.do("a", lambda: work("a")) == 3  # nothing is kept


async def test_if_who_does_it_is_cancelled_the_next_does_it() -> None:
    together: Together[str, str] = Together()
    works = [Work(), Work()]
    turns = iter(works)
    tasks = [asyncio.create_task(together.do("key", lambda: next(turns).run())) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()
    works[1].go.set()
    assert await asyncio.wait_for(asyncio.gather(*tasks[1:]), 5) == ["result"] * 2
    assert tasks[0].cancelled()
    assert [work.ended for work in works] == ["cancelled", "done"]


async def test_an_error_is_everybodys() -> None:
    together: Together[str, None] = Together()
    outcomes = await asyncio.gather(
        *(together.do("key", fail) for _ in range(3)), return_exceptions=True
    )
    assert [type(outcome) for outcome in outcomes] == [Broken] * 3


async def test_the_first_error_of_several_is_raised_as_it_is_and_ends_the_others() -> None:
    work = Work()
    with pytest.raises(Broken):
        await every((work.run(), fail()))
    assert work.ended == "cancelled"


async def test_who_is_cancelled_in_the_moment_of_an_error_ends_and_does_not_go_on() -> None:
    went_on = []
    failing = asyncio.get_running_loop().create_future()

    async def fails() -> None:
        await failing

    async def work() -> None:
        try:
            await every((fails(), fails()))
        except Broken:
            went_on.append("as if nobody had cancelled it")

    task = asyncio.create_task(work())
    await asyncio.sleep(0.01)
    failing.set_exception(Broken())
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()
    assert not went_on


# --- one after another ----------------------------------------------------------------------------


class Sources:
    """Each of which answers after so many seconds of a virtual clock, or never."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds
        self.asked: dict[str, float] = {}
        self.answered: list[str] = []
        self.cancelled: list[str] = []

    async def ask(self, name: str) -> None:
        self.asked[name] = asyncio.get_running_loop().time()
        try:
            await asyncio.sleep(self.seconds[name])
        except asyncio.CancelledError:
            self.cancelled.append(name)
            raise
        self.answered.append(name)

    def run(self, *, wanted: int = 99, within: float = 60.0) -> float:
        """Seconds until so many have answered."""

        async def main() -> None:
            enough = lambda: len(self.answered) >= wanted  # noqa: E731
            await in_turn(self.seconds, self.ask, apart=1.0, within=within, enough=enough)
            self.took = asyncio.get_running_loop().time() - next(iter(self.asked.values()))

        virtual_time.run(main())
        return self.took


def test_the_next_is_asked_once_one_has_answered() -> None:
    sources = Sources(a=0.2, b=0.3, c=0.1)
    assert sources.run() == pytest.approx(0.6)
    assert sources.answered == ["a", "b", "c"]


def test_who_is_silent_holds_up_the_others_for_a_moment() -> None:
    sources = Sources(a=FOREVER, b=0.2, c=FOREVER, d=0.2, e=0.2)
    assert sources.run(wanted=2) == pytest.approx(1.0 + 0.2 + 1.0 + 0.2)
    assert sources.answered == ["b", "d"]
    assert sorted(sources.cancelled) == ["a", "c"]
    assert "e" not in sources.asked


def test_who_is_late_counts_too() -> None:
    sources = Sources(a=1.5, b=FOREVER)
    assert sources.run(wanted=1) == pytest.approx(1.5)


def test_after_a_time_nobody_more_is_asked_but_answers_are_waited_for() -> None:
    sources = Sources(a=5.0, b=5.0, c=5.0, d=5.0)
    assert sources.run(within=1.5) == pytest.approx(6.0)
    assert sources.answered == ["a", "b"]


async def test_an_error_of_one_ends_all_and_comes_out_as_it_is() -> None:
    work = Work()

    async def ask(name: str) -> None:
        await (work.run() if name == "works" else fail())

    with pytest.raises(Broken):
        await in_turn(["works", "fails"], ask, apart=0.001, within=FOREVER, enough=lambda: False)
    assert work.ended == "cancelled"
