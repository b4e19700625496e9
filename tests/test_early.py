"""Data that take long to come keep no rank from its collective calls."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from island_kit import LONG, WAIT_S, island, until
from torch import Tensor
from trainer_kit import begin, tiny_settings

from node.data.ahead import Place
from node.trainer.channel import Checkpoint, Ready, Saved, StepDone
from node.trainer.early import Early, may_take_long
from node.trainer.loop import _training_data

PROGRAM = Path(__file__).with_name("slow_rank.py")
COLLECTIVE_S = 4.0
FIRST, SECOND = Place(0, 0, 1, 0), Place(0, 0, 1, 1)


class Held:
    """Batches of a step come once it is let go; those of a step below 0 never do."""

    def __init__(self) -> None:
        self.gates = [threading.Event() for _ in range(3)]
        self.asked: list[tuple[int, range | None]] = []

    def batch(
        self, round: int, slot: int, slots: int, step: int, rows: range | None = None
    ) -> tuple[Tensor, Tensor]:
        self.asked.append((step, rows))
        if step < 0:
            raise OSError("the disk is gone")
        assert self.gates[step].wait(WAIT_S)
        return torch.tensor([step]), torch.tensor([0])


def at_last(early: Early, place: Place, rows: list[range]) -> None:
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


def test_what_reading_has_met_is_raised_to_who_takes_the_rows() -> None:
    early, place = Early(Held(), 0.01), Place(0, 0, 1, -1)
    at_last(early, place, [range(2)])
    with pytest.raises(OSError, match="the disk is gone"):
        early.batch(place, range(2))


def test_tokens_in_a_file_are_read_at_once(tmp_path: Path) -> None:
    assert not may_take_long(_training_data(tiny_settings(tmp_path)))


async def test_an_island_waits_for_data_for_longer_than_for_a_collective_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"  # is called with: -P -m node.trainer.rank …
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {PROGRAM} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    held, saved = tmp_path / "held", tmp_path / "saved"
    monkeypatch.setenv("HELD", str(held))
    saved.mkdir()
    async with island(tmp_path, ranks=2, collective_s=COLLECTIVE_S) as running:
        await until(running, Ready)
        await running.send(begin(target_steps=LONG))
        assert (await until(running, StepDone)).step == 1
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5 * COLLECTIVE_S):
                await until(running, StepDone)
        await running.send(Checkpoint(str(saved)))  # what the daemon says is done meanwhile
        assert (await until(running, Saved)).problem == ""
        held.touch()
        done = await until(running, StepDone)
        assert done.step == 2
        assert done.seconds > done.data_s > COLLECTIVE_S
        assert (await until(running, StepDone)).data_s < COLLECTIVE_S
