"""Rounds that a download passes over: noted, asked for until somebody tells, and counted once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from past_kit import (
    ALPS,
    MESA,
    OTHERS,
    RUN,
    ask,
    history,
    play,
    rounds_of,
    sums,
    through,
    told,
)

from node.entry.past import (
    MOST_TOLD,
    ask_past,
    tell_past,
)
from node.monitor import history_file
from node.monitor.events import Record, RoundDone
from node.monitor.history import History
from node.monitor.lines import replace_lines
from node.monitor.merged_tokens import MAX_TOTALS, MAX_UNDONE
from protocols.identity import PeerId
from protocols.memory.transport import MemoryTransport
from protocols.messages import Past


@pytest.mark.parametrize("asked", ["before the next round", "after it", "later", "restarted"])
def test_rounds_that_a_download_passes_over_are_asked_for(asked: str, tmp_path: Path) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(40)))
        path = tmp_path / "history.jsonl"
        here = history(range(10), path)
        if asked == "restarted":
            here = history(range(0), path)
        elif asked != "before the next round":
            through(here, range(15, 18 if asked == "later" else 16))
            assert here.gaps.open == [(9, 15)]
        assert await ask(mine, [ALPS], here, before=15) == 5
        assert here.gaps.open == []
        through(here, range(here.newest + 1, 20))
        assert rounds_of(here) == list(range(20))
        assert here.totals == sums(20)
        again = history(range(0), path)
        assert (again.columns(), again.totals) == (here.columns(), here.totals)
        assert again.gaps.open == []

    play(main)


def test_a_round_counts_once_that_a_newcomer_and_its_teller_go_through() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        teller, here = history(range(13)), history(range(0))
        tell_past(others[0], teller)
        through(here, range(10, 11))
        assert await ask(mine, [ALPS], here, before=10) == 10
        through(here, range(11, 15))
        through(teller, range(13, 15))
        assert here.totals == teller.totals == sums(15)

    play(main)


def test_sums_that_cannot_be_told_for_a_round_so_long_ago_are_not_told() -> None:
    """Else all rounds since, which this node has counted itself, would be in them."""

    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(20 + MAX_UNDONE)))
        tell_past(others[1], history(range(14 + MAX_UNDONE)))
        for peer, total in ((ALPS, 20), (MESA, 25)):
            here = history(range(10))
            through(here, range(15, 25))
            assert await ask(mine, [peer], here, before=15) == 5
            assert rounds_of(here) == list(range(25))
            assert here.totals == sums(total)

    play(main)


def test_who_has_no_sum_of_its_own_any_more_is_not_counted_twice() -> None:
    """Others may have it apart still: those who came later, and have had fewer."""
    here = history(range(0))
    names = [f"{number}" for number in range(MAX_TOTALS + 500)]
    for number, name in enumerate(names):
        islands: Any = {name: {"tokens": 10}, ALPS: {"tokens": 5}}
        here(Record(number, 1.7e9, RoundDone(round=number, islands=islands)))
    end = len(names) + 4
    through(here, range(end, end + 1))
    before = sum(here.totals.values())
    told = dict.fromkeys(names[:400], 10) | {names[-1]: 12, ALPS: 5 * end, MESA: 8}
    assert here.learn([{"round": end - 1, "time": 1.0}], told, end) == 1
    more = {names[-1]: 2, ALPS: 4 * 5, MESA: 8}
    assert sum(here.totals.values()) - before == sum(more.values())
    assert (here.totals[names[-1]], here.totals[ALPS]) == (12, 5 * end + 10)


# --- room, and the file --------------------------------------------------------------------------


def test_a_full_history_has_room_for_a_gap() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(80)))
        here = history(range(50), max_rows=64)
        through(here, range(60, 74))
        assert len(here) == 64
        assert await ask(mine, [ALPS], here, before=60) == 10
        assert len(here) <= 64
        assert rounds_of(here)[-24:] == list(range(50, 74))
        assert here.totals == sums(74)
        assert here.gaps.open == []

    play(main)


def test_one_asking_writes_the_file_once_and_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """However many peers have told something; rounds that come meanwhile come after it."""
    path, written, away = tmp_path / "history.jsonl", list[bool](), [False]

    def write(where: Path, all_of_it: Any) -> None:
        written.append(away[0])
        replace(where, all_of_it)

    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for number, other in enumerate(others):
            tell_past(other, history(range(26 + number)))
        here = history(range(25), path, max_rows=32)
        through(here, range(40, 44))

        async def offload(work: Callable[[], Any]) -> Any:
            through(here, range(44, 45))
            assert here.newest == 43
            away[0] = True
            work()
            away[0] = False
            through(here, range(45, 46))

        written.clear()
        assert await ask_past(mine, OTHERS, here, offload, before=40) == MOST_TOLD
        assert written == [True], "though there was no room before"
        assert here.newest == 45
        again = history(range(0), path, max_rows=32)
        assert (again.columns(), again.totals) == (here.columns(), here.totals)

    replace = replace_lines
    monkeypatch.setattr(history_file, "replace_lines", write)
    play(main)


# --- going back in the chain ---------------------------------------------------------------------


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("back", [5, 10, 12, 15, 17])
def test_rounds_that_were_told_and_are_gone_through_after_all_count_once(
    back: int, restarted: bool, tmp_path: Path
) -> None:
    """As by a node that resumes from a checkpoint from before its download."""

    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(40)))
        path = tmp_path / "history.jsonl"
        here = history(range(10), path)
        through(here, range(15, 18))
        assert await ask(mine, [ALPS], here, before=15) == 5
        if restarted:
            here = history(range(0), path)
        through(here, range(back, 20))
        assert rounds_of(here) == list(range(20))
        assert here.totals == history(range(0), path).totals == sums(20)
        assert here.gaps.open == []

    play(main)


def test_where_a_row_of_several_rounds_is_gone_back_into_the_rest_of_it_is_a_gap() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(40)))
        here = history(range(10))
        through(here, range(16, 17))
        told = {"time": 1.0}
        assert here.learn([told | {"round": 12}, told | {"round": 15}], sums(16), 16) == 2
        assert here.totals == sums(17)
        through(here, range(14, 18))
        assert here.gaps.open == [(12, 14)]
        assert here.totals == sums(17)
        assert await ask(mine, [ALPS], here, before=14) == 1
        assert rounds_of(here) == [*range(10), *range(12, 18)]
        assert here.totals == sums(18)

    play(main)


def test_what_is_told_of_a_gap_that_is_gone_by_then_is_dropped() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        here = history(range(10))
        through(here, range(15, 17))

        async def past(peer: PeerId, body: bytes) -> bytes:
            through(here, range(12, 13))
            return Past((told(11), told(13)), ()).encode()

        others[0].on_call("past", past)
        assert await ask(mine, [ALPS], here, before=15) == 0
        assert rounds_of(here) == [*range(10), 12]
        assert here.gaps.open == [(9, 12)]

    play(main)


_steps = st.tuples(
    st.sampled_from(["on", "leap", "back", "restart", "ask"]), st.integers(min_value=1, max_value=9)
)


@settings(max_examples=40, deadline=None)
@given(steps=st.lists(_steps, max_size=15), first=st.integers(0, 9), full=st.booleans())
def test_whatever_way_a_node_goes_each_round_counts_once(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[tuple[str, int]],
    first: int,
    full: bool,
) -> None:
    path = tmp_path_factory.mktemp("way") / "history.jsonl"
    most, teller = 64 if full else 512, History()
    teller.begin(RUN)
    through(teller, range(200))

    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], teller)
        here = history(range(0), path, max_rows=most)
        through(here, range(first, first + 30))
        for kind, number in steps:
            head = here.newest + 1
            if kind == "on":
                through(here, range(head, head + number))
            elif kind == "leap":
                through(here, range(head + number, head + number + 1))
            elif kind == "back":
                through(here, range(head - number, head - number + 1))
            elif kind == "restart":
                gaps = here.gaps.open
                here = history(range(0), path, max_rows=most)
                assert here.gaps.open == gaps
            elif here.gaps.open:
                await ask(mine, [ALPS], here, before=here.gaps.open[-1][1])
        if here.gaps.open:
            assert await ask(mine, [ALPS], here, before=here.gaps.open[-1][1])
        assert here.totals == history(range(0), path, max_rows=most).totals == sums(here.newest + 1)
        if not full:
            assert rounds_of(here) == list(range(here.newest + 1))

    play(main)
