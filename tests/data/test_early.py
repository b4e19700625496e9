"""Data that take long to come keep no rank from its collective calls."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from island_kit import LONG, WAIT_S, island, until
from places import KITS
from torch import Tensor
from trainer_kit import Bench, begin, tiny_settings

from node.data.ahead import ReadPosition
from node.island.rank_ends import TrainerDied
from node.trainer.channel import Awaited, Ready, Save, Saved, StepDone, Stop, Stopped
from node.trainer.early import (
    FIRST_S,
    GAP_S,
    HERE,
    STILL_S,
    Early,
    Wait,
    may_take_long,
    named,
)
from node.trainer.loop import _training_data
from protocols.errors import OperatorError

PROGRAM = KITS / "slow_rank.py"
COLLECTIVE_S = 4.0
FIRST, SECOND = ReadPosition(0, 0, 1, 0), ReadPosition(0, 0, 1, 1)


class Held:
    """Batches of a step come once it is let go; those of a step below 0 never do."""

    numbered, headway = False, 0

    def __init__(self) -> None:
        self.gates = [threading.Event() for _ in range(3)]
        self.asked: list[tuple[int, range | None]] = []

    def expect(self, stretches: tuple[int, ...]) -> None:
        pass

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[Tensor, Tensor]:
        self.asked.append((step, rows))
        if step < 0:
            raise OSError("the disk is gone")
        assert self.gates[step].wait(WAIT_S)
        return torch.tensor([step]), torch.tensor([0])


def at_last(early: Early, place: ReadPosition, rows: list[range]) -> None:
    end = time.monotonic() + WAIT_S
    while not early.here(place, rows):
        assert time.monotonic() < end


def test_rows_are_here_once_a_thread_has_read_them_and_are_read_once() -> None:
    data, rows = Held(), [range(2), range(2, 4), range(0)]
    early = Early(data, 0.01)
    assert not early.here(FIRST, rows)
    assert not early.here(FIRST, rows)
    data.gates[0].set()
    at_last(early, FIRST, rows)
    assert [int(early.batch(FIRST, part)[0]) for part in rows[:2]] == [0, 0]
    assert data.asked == [(0, range(2)), (0, range(2, 4))]
    data.gates[1].set()
    assert int(early.batch(SECOND, range(2))[0]) == 1  # that nobody has asked for before
    at_last(early, SECOND, rows)
    assert int(early.batch(SECOND, range(2))[0]) == 1


def test_one_thread_reads_at_a_time() -> None:
    data, rows = Held(), [range(2)]
    early = Early(data, 0.01)
    assert not early.here(FIRST, rows)
    data.gates[1].set()
    assert not early.here(SECOND, rows)  # the island has another place by now
    assert data.asked == [(0, range(2))]
    data.gates[0].set()
    at_last(early, SECOND, rows)
    assert data.asked == [(0, range(2)), (1, range(2))]


def test_what_reading_has_met_is_raised_at_once_and_to_who_takes_the_rows() -> None:
    """At once, since the other ranks may have to wait for theirs for long."""
    early, place = Early(Held(), 0.01), ReadPosition(0, 0, 1, -1)
    with pytest.raises(OSError, match="the disk is gone"):
        at_last(early, place, [range(2)])
    with pytest.raises(OSError, match="the disk is gone"):
        early.batch(place, range(2))


class Clock:
    now = 5.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(Clock, "now", 5.0)
    return Clock()


def test_the_daemon_is_told_once_who_is_waited_for_and_once_that_all_is_there(clock: Clock) -> None:
    wait = Wait(clock)

    def after(seconds: float, *signs: int) -> Awaited | None:
        clock.now += seconds
        return wait.look(7, signs)

    assert after(0) is None
    assert after(1, HERE, 0, 3) is None
    assert after(FIRST_S - 1, HERE, 1, 3) is None
    assert after(1, HERE, 2, 3) == Awaited(7, FIRST_S, (1, 2))
    assert after(1, HERE, HERE, 3) is None
    assert after(1) == Awaited(7, FIRST_S + 2)
    assert after(1) is None
    assert after(1, 0, 0) is None  # and the next one from the beginning
    assert after(FIRST_S, 0, 0) == Awaited(7, FIRST_S, (0, 1))


def test_ranks_wait_for_what_moves_and_no_longer_than_an_hour_for_what_does_not(
    clock: Clock,
) -> None:
    wait, pause = Wait(clock), GAP_S / 2

    def through(seconds: float, moves: int = 0) -> None:
        for number in range(int(seconds / pause)):
            clock.now += pause
            wait.look(7, (HERE, 1 + number * moves))

    through(3 * STILL_S, moves=1)
    wait.look(7, ())
    through(STILL_S)
    clock.now += STILL_S  # they have done something else
    through(STILL_S)
    with pytest.raises(OperatorError, match="step 7 do not come") as caught:
        through(2 * pause)
    assert caught.value.code == "E406"
    assert "rank 1 waits" in caught.value.why


def test_of_many_ranks_some_are_named() -> None:
    assert named([3]) == "rank 3"
    assert named(range(64)) == "rank 0, 1, 2, 3, 4, 5, 6, 7, … (64 ranks)"


def test_a_single_rank_does_what_it_is_told_while_it_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.trainer.loop.may_take_long", lambda data: True)
    monkeypatch.setattr("node.trainer.early.FIRST_S", 0.0)
    bench = Bench(tmp_path, lambda _, report: [Stop()] if isinstance(report, Awaited) else [])
    assert bench.trainer.early is not None
    data = Held()
    bench.trainer.early = Early(data, 0.01)
    script = bench.run(begin())
    data.gates[0].set()
    assert [awaited.ranks for awaited in script.of(Awaited)] == [(0,)]
    assert [len(script.of(kind)) for kind in (StepDone, Stopped)] == [0, 1]


def test_tokens_in_a_file_are_read_at_once(tmp_path: Path) -> None:
    assert not may_take_long(_training_data(tiny_settings(tmp_path)))


@pytest.fixture
def let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Ranks are slow ones until this is called."""
    python = tmp_path / "python"  # is called with: -P -m node.trainer.rank …
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {PROGRAM} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("HELD", str(tmp_path / "held"))
    return (tmp_path / "held").touch


async def test_a_rank_that_cannot_read_says_so_while_another_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_go: Callable[[], None]
) -> None:
    monkeypatch.setenv("FAILS", "1")
    async with island(tmp_path, ranks=2) as running:
        await until(running, Ready)
        await running.send(begin(target_steps=LONG))
        async with asyncio.timeout(WAIT_S):
            while not isinstance(event := await running.next_event(), TrainerDied):
                pass
    assert (event.rank, event.code) == (0, "E601")


async def test_an_island_waits_for_data_for_longer_than_for_a_collective_call(
    tmp_path: Path, let_go: Callable[[], None]
) -> None:
    saved = tmp_path / "saved"
    saved.mkdir()
    async with island(tmp_path, ranks=2, collective_s=COLLECTIVE_S) as running:
        await until(running, Ready)
        await running.send(begin(target_steps=LONG))
        assert (await until(running, StepDone)).step == 1
        awaited = await until(running, Awaited)
        assert (awaited.step, awaited.ranks) == (2, (1,))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5 * COLLECTIVE_S):
                await until(running, StepDone)
        await running.send(Save(str(saved)))  # what the daemon says is done meanwhile
        assert (await until(running, Saved)).problem == ""
        let_go()
        assert (await until(running, Awaited)).ranks == ()
        done = await until(running, StepDone)
        assert done.step == 2
        assert done.seconds > done.data_s > COLLECTIVE_S
        assert (await until(running, StepDone)).data_s < COLLECTIVE_S
