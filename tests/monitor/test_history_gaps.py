"""What a history lacks: noted as the next row comes, and known after a restart."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from past_kit import ALPS, ask, at_once, history, play, rounds_of, sums, through

from node.entry.past import tell_past
from node.monitor.history_gaps import KEPT
from protocols.memory.transport import MemoryTransport
from protocols.messages import MAX_PAST
from protocols.tasks import beside


@pytest.mark.parametrize("written", ["row by row", "anew", "by a thinning"])
def test_a_restart_leaves_gaps_open(written: str, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    here = history(range(3, 10), path, max_rows=64)
    through(here, range(15, 17))
    if written == "anew":
        asyncio.run(here.save(at_once))
    elif written == "by a thinning":
        through(here, range(17, 117))
        assert len(here) < 64
    through(here, range(120, 121))
    again = history(range(0), path, max_rows=64)
    assert again.gaps.open == here.gaps.open
    assert [gap for gap in here.gaps.open if gap[1] <= 15] == [(-1, 3), (9, 15)]
    assert here.gaps.open[-1][1] == 120
    assert len(here.gaps.open) == 3


@pytest.mark.parametrize("restarted", [False, True])
def test_rows_of_several_rounds_are_no_gap(restarted: bool, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    here = history(range(100), path, max_rows=16)
    assert len(here) <= 16
    if restarted:
        here = history(range(0), path, max_rows=16)
    assert here.gaps.open == []
    here.expect(100)
    assert here.gaps.open == []


def test_what_was_told_in_few_rows_is_no_gap() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(3 * MAX_PAST)))
        here = history(range(3 * MAX_PAST, 3 * MAX_PAST + 3))
        assert await ask(mine, [ALPS], here, before=3 * MAX_PAST) == MAX_PAST
        assert here.gaps.open == []

    play(main)


def test_a_file_of_an_earlier_version_has_gaps_from_now_on(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    here = history(range(5, 8), path)
    through(here, range(12, 13))
    head, *rows = path.read_text().splitlines(keepends=True)
    old = {name: value for name, value in json.loads(head).items() if name not in ("rows", "gaps")}
    path.write_text("".join([json.dumps(old) + "\n", *rows]))
    again = history(range(0), path)
    assert again.gaps.open == [(-1, 5)], "the others may be rows of several rounds"
    through(again, range(20, 21))
    assert history(range(0), path).gaps.open == [(-1, 5), (12, 20)]


def test_a_line_that_is_lost_leaves_a_gap(tmp_path: Path) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(12)))
        here = history(range(0), path)
        assert here.gaps.open == [(4, 6)]
        assert await ask(mine, [ALPS], here, before=6) == 1
        assert here.totals == sums(9)

    path = tmp_path / "history.jsonl"
    history(range(9), path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:6] + lines[7:]))
    play(main)


@pytest.mark.parametrize("gaps", ["x", 5, [3], [[1, 2, 3]], [["a", 2]], {"a": 1}])
def test_a_damaged_head_is_started_anew(gaps: Any, tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    history(range(3), path)
    head, *rows = path.read_text().splitlines(keepends=True)
    path.write_text("".join([json.dumps(json.loads(head) | {"gaps": gaps}) + "\n", *rows]))
    again = history(range(0), path)
    assert (len(again), again.totals) == (0, {})


def test_gaps_are_bounded() -> None:
    here = history(range(1))
    through(here, range(2, 1000, 2))
    assert len(here.gaps.open) == KEPT
    assert here.gaps.open[-1] == (996, 998)


async def test_a_node_that_leaves_while_the_file_is_written_spoils_nothing(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    here = history(range(9), path)
    begun = asyncio.get_running_loop().create_future()

    async def offload(work: Callable[[], Any]) -> Any:
        begun.set_result(work)
        await asyncio.Event().wait()

    async with beside(here.save(offload)):
        work = await begun
    through(here, range(9, 11))
    work()  # the thread comes to its end all the same
    again = history(range(0), path)
    assert rounds_of(again) == list(range(9))
    assert again.totals == sums(9)
