"""The file of the run's history: small among hundreds of islands, whole whatever becomes of it."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from history_kit import RUN, Kit, island, room_for
from hypothesis import given
from hypothesis import strategies as st
from past_kit import at_once
from trainer_kit import tiny_manifest

from node.monitor import merged_tokens
from node.monitor.curves import MAX_ISLANDS
from node.monitor.event_log import EventLog
from node.monitor.events import Record, RoundDone
from node.monitor.history import History
from node.monitor.history_columns import COLUMNS
from node.monitor.history_rows import MAX_NUMBER, Numbers
from node.monitor.state import NodeState
from node.monitor.views import NodeView
from node.runtime import Node

NAMES = [f"12D3KooW{n:044}" for n in range(300)]


def same(one: History, other: History) -> bool:
    return one.columns() == other.columns() and one.totals == other.totals


def test_hundreds_of_islands_take_a_few_kilobytes_a_round(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kit = Kit(path, me=NAMES[-1])
    for number in range(40):
        there = [name for n, name in enumerate(NAMES) if (n + number) % 7]  # some are not merged
        islands = {name: island(2.0 + n / 7, 1000 + n) for n, name in enumerate(there)}
        kit.rounds(number, islands=islands)
    assert path.stat().st_size < len(NAMES) * 80 + 40 * 4000
    again = Kit(path, me=NAMES[-1])
    assert same(again.history, kit.history)
    assert len(again.history.islands) == MAX_ISLANDS
    again.rounds(38, islands={NAMES[0]: island(1.0, 5)})  # two rounds are gone through again
    kit.rounds(38, islands={NAMES[0]: island(1.0, 5)})
    assert again.history.totals == kit.history.totals


@given(st.lists(st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 3)), max_size=20))
def test_rows_are_read_as_they_were_written(rows: list[dict[str, int]]) -> None:
    writes, reads = Numbers("ab"), Numbers("ab")
    for tokens in rows:
        losses = dict.fromkeys(tokens, 0.5) | {"z": 1.0}  # one whose tokens nobody counts
        values, found, merged = reads.read(writes.line([1.0, None], losses, tokens))
        assert (values, found) == ([1.0, None], losses)
        assert {name: count for name, count in merged.items() if count} == {
            name: count for name, count in tokens.items() if count
        }


@pytest.mark.parametrize("seed", range(4))
def test_a_restarted_node_has_the_same_islands_put_together(
    seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever way it went, and though some were merged with no tokens, or only told of."""
    monkeypatch.setattr(merged_tokens, "MAX_TOTALS", 30)
    rng, path = random.Random(seed), tmp_path / "history.jsonl"
    kit = Kit(path, max_rows=512)
    for step in range(60):
        begin = kit.history.newest + 1
        if step % 6 == 5:
            begin -= rng.randrange(8)
        elif step % 11 == 10:  # rounds are passed over
            begin += 4
            kit.history.expect(begin)
            told = {name: count + 7 for name, count in kit.history.totals.items() if count % 2}
            rows: list[dict[str, float | None]] = [
                {"round": begin - n, "time": 1.0} for n in (3, 1)
            ]
            assert kit.history.learn(rows, told, begin) == 2
            asyncio.run(kit.history.save(at_once))
        for number in range(begin, begin + rng.randrange(1, 6)):
            names = [str(rng.randrange(max(0, 2 * number - 40), 2 * number + 5)) for _ in range(3)]
            kit.rounds(number, islands={name: island(1.0, rng.randrange(4)) for name in names})
        if step % 10 == 9:
            totals = {name: count for name, count in kit.history.totals.items() if count}
            again = Kit(path, max_rows=512).history.totals
            assert {name: count for name, count in again.items() if count} == totals
            asyncio.run(kit.history.save(at_once))
    assert totals[merged_tokens.OTHERS] > 0


def test_who_was_merged_longest_ago_is_the_same_after_a_fork_that_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(merged_tokens, "MAX_TOTALS", 5)
    path = tmp_path / "history.jsonl"
    kit = Kit(path)
    for number, name in [*enumerate("acda"), (3, "e")]:
        kit.rounds(number, islands={name: island(1.0, 5)})
    asyncio.run(kit.history.save(at_once))
    again = Kit(path)
    for there in (kit, again):
        there.rounds(4, islands={"f": island(1.0, 5)})
        assert there.history.totals == dict.fromkeys([merged_tokens.OTHERS, *"cdef"], 5)


@pytest.mark.parametrize("written_anew", ["", "by a thinning", "by what was before", "as cut"])
def test_rounds_that_a_restarted_node_goes_through_again_count_once(
    tmp_path: Path, written_anew: str
) -> None:
    path, begun = tmp_path / "history.jsonl", 100
    islands = {"a": island(2.0, 5), "b": island(2.0, 7)}
    kit = Kit(path)
    kit.rounds(*range(begun, 164), islands=islands)
    if written_anew == "by a thinning":
        kit.rounds(164, islands=islands)
        assert len(kit.history) < 64
    elif written_anew == "by what was before":
        kit.history._max_rows = 256
        assert kit.history.learn([{"round": 9.0, "time": 1.0}], {"a": 1000, "c": 3}, begun)
        asyncio.run(kit.history.save(asyncio.to_thread))
    elif written_anew:
        os.truncate(path, 300)
        kit.rounds(164, islands=islands)
    again = Kit(path, max_rows=kit.history._max_rows)
    assert same(again.history, kit.history)
    for one in (kit, again):
        one.rounds(*range(155, 170), islands=islands)
    assert again.history.totals == kit.history.totals
    if written_anew != "by what was before":
        assert kit.history.totals == {"a": 5 * 70, "b": 7 * 70}
    assert Kit(path, max_rows=kit.history._max_rows).history.totals == kit.history.totals


def test_a_file_of_an_earlier_version_is_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    rest = [0.0] * (len(COLUMNS) - 2)
    head = {"run": RUN, "schema": 1, "totals": {"a": 5}}
    old = [[[0, 9.0, *rest], {"a": [2.5, 5], "b": [None, 7]}], [[1, 9.0, *rest], {"b": [2.0, 7]}]]
    path.write_text("".join(json.dumps(line) + "\n" for line in [head, *old]))
    kit = Kit(path)
    assert kit.history.totals == {"a": 10, "b": 14}
    kit.rounds(2, islands={"c": island(1.0, 3), "b": island(1.5, 1)})
    again = Kit(path).history
    assert same(again, kit.history)
    assert again.totals == {"a": 10, "b": 15, "c": 3}
    assert again.columns()["islands"] == {
        "a": [2.5, None, None],
        "b": [None, 2, 1.5],
        "c": [None, None, 1],
    }


def test_a_line_that_is_lost_gives_nobody_another_s_figures(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kit = Kit(path)
    kit.rounds(0, islands={"a": island(1.0, 1)})
    with room_for(path.stat().st_size + 10):
        kit.rounds(1, islands={"b": island(2.0, 2)})  # whom it would have named
    kit.rounds(2, islands={"b": island(2.5, 2), "c": island(3.0, 3)})
    assert Kit(path).history.totals == {"a": 1, "b": 2, "c": 3}
    kit.rounds(3, islands={"d": island(4.0, 4)})
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"c"' not in line))
    again = Kit(path)
    again.rounds(4, islands={"c": island(5.0, 5), "d": island(6.0, 6)})
    assert Kit(path).history.totals == {"a": 1, "c": 5, "d": 10}


@pytest.mark.parametrize(
    "rest",
    [
        [[], [1, MAX_NUMBER + 1], {}],
        [[], [1, -1], {}],
        [[], [1], {}],
        [[0], [], {}],
        [[], [], {"a": MAX_NUMBER}],
        [[], [], {"a": "x"}],
        [[], {}],
    ],
)
def test_rows_that_cannot_be_are_refused(rest: list[Any]) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        Numbers("a").read(json.dumps([[1.0], *rest]))


async def test_rounds_that_are_made_while_it_is_read_come_after_it(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    Kit(path).rounds(0, 1, islands={"a": island(2.0, 5)})
    history, log = History(path), EventLog()
    log.subscribe(history)
    reading, go_on = asyncio.Event(), asyncio.Event()

    async def offload(work: Callable[[], Any]) -> Any:
        reading.set()
        await go_on.wait()
        return await asyncio.to_thread(work)

    loading = asyncio.ensure_future(history.load(RUN, offload))
    await reading.wait()
    log.emit(RoundDone(round=2, islands={"a": island(1.5, 5)}))
    assert len(history) == 0
    go_on.set()
    await loading
    assert history.columns()["columns"]["round"] == [0, 1, 2]
    assert history.totals == {"a": 15}
    log.emit(RoundDone(round=3))
    assert same(Kit(path).history, history)


async def test_a_file_that_cannot_be_written_at_the_start_is_told_of(tmp_path: Path) -> None:
    told: list[OSError] = []
    history = History(tmp_path / "gone" / "history.jsonl", failed=told.append)
    await history.load(RUN, asyncio.to_thread)
    assert [type(error) for error in told] == [FileNotFoundError]
    assert history.run == RUN


@pytest.mark.parametrize("cut", [0, 300, None])
def test_a_file_that_somebody_cuts_or_removes_is_written_anew(
    tmp_path: Path, cut: int | None
) -> None:
    path = tmp_path / "history.jsonl"
    kit = Kit(path)
    kit.rounds(*range(20), islands={"a": island(2.0, 5)})
    if cut is None:
        path.unlink()
    else:
        os.truncate(path, cut)
    kit.rounds(20, 21, islands={"a": island(2.0, 5)})
    again = Kit(path).history
    assert same(again, kit.history)
    assert again.totals == {"a": 110}
    assert kit.history.lost == 0


async def test_a_restart_does_not_forget_how_low_the_loss_was(tmp_path: Path) -> None:
    """So that it is an alarm when it rises; what strangers have told of is no measure."""
    path = tmp_path / "history.jsonl"
    kit = Kit(path)
    for number, loss in enumerate((2.5, 2.0, 4.0, math.nan), 10):
        kit.rounds(number, validation_loss=loss)
    told = dict.fromkeys(("members", "live", "loss"), 1.0) | {"validation_loss": 0.001}
    assert kit.history.learn([{"round": 3, "time": 1.0, **told}], {}, 10)
    await kit.history.save(asyncio.to_thread)
    log, history = EventLog(), History(path)
    node: Any = SimpleNamespace(
        daemon=SimpleNamespace(run_id=b""),
        state=NodeState(NodeView(peer="me", started=0), log=log),
        history=history,
        offload_files=asyncio.to_thread,
    )
    node.state.status = "active"
    log.subscribe(history)
    run: Any = SimpleNamespace(
        signed=SimpleNamespace(run_id=bytes.fromhex(RUN)), manifest=tiny_manifest()
    )
    await Node.welcome_others(node, run)
    assert node.state.rounds.lowest == (11, 2.0)
    for number in range(14, 18):
        log.emit(RoundDone(round=number, validation_loss=4.0 + number / 10))
    (alarm,) = node.state.alarms_now()
    assert "2.000 after round 11" in alarm.what
    small = History(max_rows=16)
    small.begin(RUN)
    small.expect(9)
    assert small.learn([{"round": n, "time": 1.0, **told} for n in range(0, 9, 2)], {}, 9)
    for number in range(9, 40):
        small(Record(number, 1.0, RoundDone(round=number, validation_loss=3.0)))
    assert len(small) < 5 + 31, "what was told shares rows with what was not"
    assert (small.lowest() or (0, 0.0))[1] == 3.0
    assert History(None).lowest() is None
