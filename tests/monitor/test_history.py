"""The run so far: rows in bounded memory, downsampled, and back after a restart."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from history_kit import RUN, Kit, done, island, room_for
from hypothesis import given
from hypothesis import strategies as st

from node.monitor.curves import GONE_ROWS, MAX_ISLANDS
from node.monitor.events import Record, RoundFailed, Step
from node.monitor.history import MAX_POINTS, History
from node.monitor.history_columns import COLUMNS, PHASES
from node.monitor.merged_tokens import MAX_TOTALS, MAX_UNDONE


def test_a_row_is_what_the_round_was() -> None:
    kit = Kit()
    kit.log.emit(Step(step=1, round=0, loss=3.0, lr=1e-3, grad_norm=0.5, tokens_per_second=900.0))
    kit.log.emit(RoundFailed(round=0, reason="no quorum"))
    kit.rounds(
        0,
        outcome="degraded",
        members=2,
        live=3,
        agreeing=2,
        loss=2.5,
        tokens=100,
        consensus=0.04,
        consensus_after=0.01,
        sent_bytes=7,
        phases={"compute": 5.0, "exchange": 0.25},
        islands={"a": island(2.4, 60), "b": island(2.6, 40)},
    )
    kit.rounds(1, islands={"a": island(2.3, 50)})
    found = kit.history.columns()
    rows = found["columns"]
    assert rows["round"] == [0, 1]
    assert rows["time"] == [1010, 1020]
    assert rows["outcome"] == [1, 0]
    assert rows["failed"] == [1, 0]
    assert rows["loss"] == [2.5, None]
    assert rows["lr"] == [0.001, 0.001]
    assert rows["consensus"] == [0.04, None]
    assert rows["compute"] == [5, None]
    assert rows["exchange"] == [0.25, None]
    assert rows["validation_loss"] == [None, None]
    assert set(rows) == set(COLUMNS)
    assert found["islands"] == {"a": [2.4, 2.3], "b": [2.6, None]}
    assert kit.history.totals == {"a": 110, "b": 40}
    json.dumps(found, allow_nan=False)


def test_a_round_in_fragments_is_one_row_with_the_bytes_of_all() -> None:
    kit = Kit()
    for number in range(2):
        for fragment in (1, 2, 0):
            kit.rounds(
                number,
                fragment=fragment,
                fragments=3,
                sent_bytes=10 ** (fragment + 1),
                validation_loss=2.0 if fragment == 0 else None,
            )
    rows = kit.history.columns()["columns"]
    assert rows["round"] == [0, 1]
    assert rows["sent_bytes"] == [1110, 1110]
    assert rows["validation_loss"] == [2.0, 2.0]


@given(st.integers(0, 300), st.integers(2, 80))
def test_downsampling_keeps_means_ends_and_the_worst(rows: int, points: int) -> None:
    kit = Kit(max_rows=512)
    for number in range(rows):
        bad = number == rows // 2
        kit.rounds(number, outcome="degraded" if bad else "committed", loss=float(number))
    found = kit.history.columns(points)
    columns = found["columns"]
    count = len(columns["round"])
    assert count <= points
    assert count == math.ceil((rows - 1) / found["every"]) + 1 if rows else count == 0
    if rows:
        assert columns["round"][-1] == rows - 1
        assert columns["loss"][-1] == rows - 1, "the newest is a mean with no other"
        assert max(columns["outcome"]) == 1
        starts = range(0, rows - 1, found["every"])
        for start, mean in zip(starts, columns["loss"][:-1], strict=True):
            exact = np.mean(range(start, min(rows - 1, start + found["every"])))
            assert mean == pytest.approx(exact, rel=1e-4, abs=1e-4)


def test_what_is_not_known_does_not_weigh() -> None:
    kit = Kit()
    for number in range(8):
        kit.rounds(number, validation_loss=2.0 if number == 1 else None)
    columns = kit.history.columns(2)["columns"]
    assert columns["validation_loss"] == [2, None]


def test_only_the_newest_rounds() -> None:
    kit = Kit()
    kit.rounds(*range(20))
    columns = kit.history.columns(last=5)["columns"]
    assert columns["round"] == [15, 16, 17, 18, 19]
    assert kit.history.columns(last=1000)["columns"]["round"] == list(range(20))
    assert History().columns(last=5)["columns"]["round"] == []


def test_points_are_bounded() -> None:
    kit = Kit(max_rows=4096)
    kit.rounds(*range(MAX_POINTS + 10))
    assert len(kit.history.columns(10**9)["columns"]["round"]) <= MAX_POINTS
    assert len(kit.history.columns(0)["columns"]["round"]) == 2


def test_memory_is_bounded_and_the_start_stays() -> None:
    kit = Kit(max_rows=64)
    kit.rounds(*range(1000), loss=1.0, islands={"a": island(2.0, 3)})
    assert len(kit.history) <= 64
    columns = kit.history.columns(64)["columns"]
    assert columns["round"] == sorted(columns["round"])
    gaps = np.diff(columns["round"])
    assert columns["round"][0] <= max(gaps) <= 64, "the old part is as fine as there is room"
    assert columns["round"][-8:] == list(range(992, 1000))
    assert set(columns["loss"]) == {1}
    assert set(kit.history.columns(64)["islands"]["a"]) == {2}
    assert kit.history.totals == {"a": 3000}


def test_a_million_names_take_no_more_room() -> None:
    kit = Kit()
    for number in range(3):
        names = {f"{number}-{i}": island(1.0, 1) for i in range(1000)}
        kit.rounds(number, islands=names)
    assert len(kit.history.islands) == MAX_ISLANDS
    assert len(kit.history.totals) == MAX_TOTALS


def test_who_comes_after_a_thousand_others_is_counted_too() -> None:
    """Nodes without a directory that is kept have a new name at each start."""
    kit = Kit(max_rows=4096)
    for number in range(1500):
        names = {f"{number + n}": island(1.0, 5) for n in range(2)}
        kit.rounds(number, islands=names | {"me": island(1.0, 3)})
    totals = kit.history.totals
    assert len(totals) <= MAX_TOTALS
    assert (totals["me"], totals["1400"]) == (4500, 10)
    assert sum(totals.values()) == 1500 * 13
    kit.rounds(1400, islands={"back": island(1.0, 1)})  # a fork that lost
    assert sum(totals.values()) == 1400 * 13 + 1
    assert min(totals.values()) >= 0


@pytest.mark.parametrize("each_round", [40, 300])
def test_a_thousand_names_in_rounds_that_may_be_taken_back_hold_up_nobody(
    each_round: int, tmp_path: Path
) -> None:
    path = tmp_path / "history.jsonl"
    kit, rounds = Kit(path, max_rows=4096), MAX_UNDONE
    for number in range(rounds):
        names = {f"{number * each_round // 3 + n}": island(1.0, 5) for n in range(each_round)}
        kit.rounds(number, islands=names | {"me": island(1.0, 3)})
    a_round = 5 * each_round + 3
    for there in (kit, again := Kit(path, max_rows=4096)):
        totals = there.history.totals
        assert len(totals) <= MAX_TOTALS
        assert sum(totals.values()) == rounds * a_round
        assert totals["me"] == rounds * 3
        assert {name: totals[name] for name in names} == {
            name: 5 * (1 + min(2, (each_round - 1 - n) * 3 // each_round))
            for n, name in enumerate(names)
        }
    again.rounds(rounds // 2, islands={"back": island(1.0, 1)})
    for history in (again.history, Kit(path, max_rows=4096).history):
        assert sum(history.totals.values()) == rounds // 2 * a_round + 1
        assert min(history.totals.values()) >= 0


def curves(history: History) -> set[str]:
    """Whose losses the newest row has."""
    return {peer for peer, losses in history.columns()["islands"].items() if losses[-1] is not None}


def test_of_hundreds_of_islands_this_node_has_a_curve() -> None:
    kit = Kit(me="me")
    others = {f"peer{number:03d}": island(2.0) for number in range(299)}
    kit.rounds(0, islands=others | {"me": island(1.5)})  # itself last, as rounds are told
    assert "me" in curves(kit.history)
    late = Kit(me="me")
    late.rounds(0, 1, islands=others)
    late.rounds(2, islands=others | {"me": island(1.5)})
    assert late.history.columns()["islands"]["me"] == [None, None, 1.5]
    assert len(curves(late.history)) == len(late.history.islands) == MAX_ISLANDS


def test_a_newcomer_gets_the_curve_of_whoever_is_gone_and_nobody_else_s(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kit = Kit(path, max_rows=256)
    gone = {f"gone{number}": island(3.0) for number in range(24)}
    stay = {f"stay{number}": island(2.0) for number in range(40)}
    new = {f"new{number}": island(1.0) for number in range(40)}
    kit.rounds(0, 1, islands=stay | gone)
    kit.rounds(*range(2, 2 + GONE_ROWS), islands=stay | new)
    assert curves(kit.history) == set(stay), "who misses some rounds has its curve when it is back"
    kit.rounds(2 + GONE_ROWS, islands=stay | new)
    again = Kit(path, max_rows=256)
    for history in (kit.history, again.history):
        there = curves(history)
        assert there > set(stay)
        assert len(there) == MAX_ISLANDS
        losses = history.columns()["islands"]["new0"]
        assert losses == [None] * (2 + GONE_ROWS) + [1.0], "nothing of whose place it has"


def test_going_back_in_the_chain_takes_rows_back() -> None:
    kit = Kit()
    kit.rounds(0, 1, 2, 3, loss=1.0)
    kit.rounds(2, loss=5.0)
    columns = kit.history.columns()["columns"]
    assert columns["round"] == [0, 1, 2]
    assert columns["loss"] == [1, 1, 5]


def test_rounds_that_are_gone_through_again_count_once(tmp_path: Path) -> None:
    """As after a restart from a checkpoint: rounds since then come back by certificates."""
    path = tmp_path / "history.jsonl"
    kit = Kit(path)
    kit.rounds(*range(10), islands={"a": island(2.0, 5), "b": island(2.0, 7)})
    again = Kit(path)
    again.rounds(8, 9, islands={"a": island(2.0, 5)})  # and on another branch without b
    assert again.history.totals == {"a": 50, "b": 56}
    assert Kit(path).history.totals == {"a": 50, "b": 56}


def test_readers_get_what_is_new() -> None:
    kit = Kit()
    kit.rounds(0, 1)
    cursor = kit.history.added
    assert kit.history.since(cursor) == []
    kit.rounds(2, loss=2.5, islands={"a": island(2.25)})
    (row,) = kit.history.since(cursor) or []
    assert row["round"] == 2
    assert row["loss"] == 2.5
    assert row["islands"] == {"a": 2.25}
    assert kit.history.since(cursor + 5) is None
    kit.rounds(*range(3, 200))
    assert kit.history.since(cursor) is None, "more than is kept"


def test_a_restart_brings_it_back(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kit = Kit(path)
    phases = dict.fromkeys(PHASES, 0.125)
    kit.rounds(*range(40), loss=2.123456, islands={"a": island(2.5, 7)}, phases=phases)
    again = Kit(path)
    assert again.history.columns() == kit.history.columns()
    assert again.history.totals == kit.history.totals
    assert again.history.added == 40
    again.rounds(40, loss=2.0)
    assert Kit(path).history.columns()["columns"]["round"] == list(range(41))


def test_a_restart_after_thinning_counts_tokens_once(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kit = Kit(path, max_rows=32)
    kit.rounds(*range(200), islands={"a": island(2.0, 5)})
    again = Kit(path, max_rows=32)
    assert again.history.totals == {"a": 1000}
    assert again.history.columns() == kit.history.columns()
    assert len(path.read_text().splitlines()) <= 33


def test_another_run_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    Kit(path).rounds(0, 1, 2)
    other = History(path)
    other.begin("ffff")
    assert len(other) == 0
    assert json.loads(path.read_text())["run"] == "ffff"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]\n",
        '{"run": "8c41"}\n',
        "\x00" * 100,
        '{"run": "8c41", "schema": 9, "totals": {}}',
        json.dumps({"run": RUN, "schema": 1, "totals": {"p": math.inf}}),
    ],
)
def test_a_damaged_file_is_started_anew(tmp_path: Path, text: str) -> None:
    path = tmp_path / "history.jsonl"
    path.write_text(text)
    kit = Kit(path)
    kit.rounds(0)
    assert len(kit.history) == 1
    assert len(Kit(path).history) == 1


def test_damaged_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    Kit(path).rounds(0, 1)
    none = json.dumps([None] * len(COLUMNS))
    whole = json.dumps([2, 9] + [0] * (len(COLUMNS) - 2))
    with path.open("a") as file:
        file.write(f'[{none},{{}}]\n[{whole},{{"p":[1,Infinity]}}]\n{"[" * 100_000}\n')
        file.write('[[2,1],{}]\n[[1,"x"]]\nnull\n{"a":1}\n[[3,')
    assert Kit(path).history.first == 0
    assert Kit(path).history.columns()["columns"]["round"] == [0, 1]


def test_a_row_that_was_cut_short_costs_no_other_one(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    kit = Kit(path)
    kit.rounds(0)
    with room_for(path.stat().st_size + 10):
        kit.rounds(1)  # ten bytes of it
    kit.rounds(2)
    assert Kit(path).history.columns()["columns"]["round"] == [0, 2]
    with path.open("a") as file:
        file.write("[[3,10")  # and one of a process that was killed
    again = Kit(path)
    again.rounds(4)
    assert Kit(path).history.columns()["columns"]["round"] == [0, 2, 4]


def test_a_disk_that_was_full_at_the_start_gets_the_run_when_there_is_room(tmp_path: Path) -> None:
    """Rows without a head are read by nobody; and a draft would keep the disk full."""
    path = tmp_path / "history.jsonl"
    with room_for(20):
        kit = Kit(path)
        kit.rounds(0)
        assert list(tmp_path.iterdir()) == []
    kit.rounds(1, islands={"a": island(2.0, 5)})
    kit.rounds(2)
    again = Kit(path)
    assert again.history.columns()["columns"]["round"] == [0, 1, 2]
    assert again.history.totals == {"a": 5}


def test_the_first_row_that_is_lost_is_told_of(tmp_path: Path) -> None:
    told: list[OSError] = []
    history = History(tmp_path / "gone" / "history.jsonl", failed=told.append)
    history.begin(RUN)
    for number in range(3):
        history(Record(number, 1.0, done(number)))
    assert [type(error) for error in told] == [FileNotFoundError]


def test_a_full_disk_costs_rows_of_the_file_only(tmp_path: Path) -> None:
    kit = Kit(tmp_path / "gone" / "history.jsonl")
    kit.rounds(0, 1)
    assert len(kit.history) == 2
    assert kit.history.lost == 3  # its head and two rows
