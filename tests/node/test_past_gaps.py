"""Rounds that a download passes over: noted, asked for until somebody tells, and counted once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from past_kit import (
    ALPS,
    MESA,
    OTHERS,
    RUN,
    ask,
    at_once,
    history,
    play,
    rounds_of,
    sums,
    through,
)

import node.entry.past
from gossip.chain.swarm import Swarm
from gossip.pairs.swarm import Pairs
from node.entry.past import (
    AGAIN_S,
    LAST_AGAIN_S,
    LOOK_S,
    MOST_TOLD,
    LookingBack,
    ask_past,
    tell_past,
)
from node.monitor import history_file
from node.monitor.events import Record, RoundDone
from node.monitor.history import History
from node.monitor.lines import replace_lines
from node.monitor.merged_tokens import MAX_TOTALS, MAX_UNDONE
from protocols.bounds import ENDLESS_ROUNDS
from protocols.identity import PeerId
from protocols.memory.transport import MemoryTransport
from protocols.messages import Past, PastRequest, PastRound
from protocols.tasks import beside


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


# --- who is asked, and when ----------------------------------------------------------------------


def told(round_: int) -> PastRound:
    return PastRound(round_, 1.7e9, 1.0, 1.0, 1.0, None, None, None)


def test_who_has_not_come_as_far_is_not_the_only_one_to_be_asked() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(8)))
        tell_past(others[1], history(range(12)))
        here = history(range(0))
        assert await ask(mine, [ALPS, MESA], here, before=10) == 10
        assert rounds_of(here) == list(range(10))
        assert here.totals == sums(10)

    play(main)


def test_peers_that_know_nothing_hide_nobody_who_knows() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for other in others:
            tell_past(other, history(range(0)))
        tell_past(others[-1], history(range(20)))
        here = history(range(10, 11))
        assert len(others) > MOST_TOLD + 1
        assert await ask(mine, OTHERS, here, before=10) == 10

    play(main)


def test_of_those_who_know_a_part_only_some_are_asked() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for number, other in enumerate(others):
            tell_past(other, history(range(1 + number)))
        here = history(range(50, 51))
        assert await ask(mine, OTHERS, here, before=50) == MOST_TOLD
        assert here.gaps.open == []

    play(main)


@pytest.mark.parametrize("before", [50, ENDLESS_ROUNDS])
@pytest.mark.parametrize("first", [0, 10])
def test_who_came_back_a_round_before_is_not_the_only_one_to_be_asked(
    first: int, before: int
) -> None:
    """As after an outage of a whole site: it has nearly the same gap, and knows the end of it."""

    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for other in others[:-1]:
            back = history(range(first))
            through(back, range(48, 51))
            tell_past(other, back)
        tell_past(others[-1], history(range(50)))
        here = history(range(first))
        assert len(others) > MOST_TOLD + 1
        assert await ask(mine, OTHERS, here, before=before) >= 50 - first
        through(here, range(50, 53))
        assert rounds_of(here) == list(range(53))
        if before == 50:
            assert here.totals == sums(53)

    play(main)


@pytest.mark.parametrize("parts", [(range(60), range(40, 100)), (range(40, 100), range(60))])
def test_of_those_who_know_parts_each_tells_its_own(parts: tuple[range, range]) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for other, part in zip(others, parts, strict=False):
            tell_past(other, history(part))
        here = history(range(0))
        assert await ask(mine, [ALPS, MESA], here, before=100) == 100

    play(main)


def test_where_all_know_the_same_part_only_some_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        asked = list[PeerId]()

        async def past(peer: PeerId, body: bytes) -> bytes:
            asked.append(peer)
            return Past((told(8), told(9)), ()).encode()

        for other in others:
            other.on_call("past", past)
        assert await ask(mine, OTHERS, history(range(0)), before=10) == 2
        assert len(asked) == 5

    monkeypatch.setattr(node.entry.past, "MOST_KNOWING", 5)
    play(main)


def test_a_small_gap_of_a_long_run_is_told_round_by_round() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(3000)))
        here = history(range(2000, 2900))
        here.gaps.close(2000)
        through(here, range(2905, 2910))
        assert await ask(mine, [ALPS], here, before=2905) == 5
        assert rounds_of(here) == list(range(2000, 2910))

    play(main)


def knowing(kind: type[Swarm | Pairs], *peers: PeerId) -> Any:
    swarm = MagicMock(spec=kind)
    swarm.now = lambda: 0.0
    swarm.membership = MagicMock()
    swarm.membership.alive.return_value = list(peers)
    return swarm


def test_a_gap_is_asked_for_again_until_somebody_has_told_what_it_has() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        asked, has = list[PastRequest](), list[int]()

        async def past(peer: PeerId, body: bytes) -> bytes:
            asked.append(PastRequest.decode(body))
            return Past(tuple(map(told, has)), ()).encode()

        others[0].on_call("past", past)
        here = history(range(10))
        back = LookingBack(mine, here, at_once, knowing(Swarm, ALPS), [])
        async with beside(back.run(15)):
            await asyncio.sleep(1.0)
            assert [(one.since, one.before) for one in asked] == [(10, 15)]
            await asyncio.sleep(3 * AGAIN_S + LOOK_S)
            assert 2 <= len(asked) <= 4
            await asyncio.sleep(86_400.0)
            assert 24 <= len(asked) <= 60, "ever less often"
            asked.clear()
            through(here, range(15, 17))
            has.append(12)  # it has not been there for all of it itself
            await asyncio.sleep(LAST_AGAIN_S + LOOK_S)
            assert rounds_of(here) == [*range(10), 12, 15, 16]
            assert len(asked) == 1
            await asyncio.sleep(86_400.0)
            assert len(asked) == 1
            through(here, range(18, 19))
            has.append(17)
            await asyncio.sleep(2 * LOOK_S)
            assert [(one.since, one.before) for one in asked[1:]] == [(17, 18)]

    play(main)


@pytest.mark.parametrize("kind", [Swarm, Pairs])
def test_in_pairs_a_count_that_leaps_has_passed_nothing_over(kind: type[Swarm | Pairs]) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(40)))
        here = history(range(0))
        back = LookingBack(mine, here, at_once, knowing(kind), [ALPS])
        async with beside(back.run(10)):
            await asyncio.sleep(1.0)
            through(here, range(10, 12))
            through(here, range(15, 16))
            await asyncio.sleep(10 * LOOK_S)
        assert rounds_of(here) == [*range(12), *([] if kind is Pairs else range(12, 15)), 15]

    play(main)


def test_a_history_of_no_run_asks_for_nothing() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        here = History()
        here.begin(RUN)
        assert await ask(mine, [ALPS], here, before=0) == 0

    play(main)
