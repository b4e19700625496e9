"""Marks of a stream: what stays of many, and that none is read twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from node.data.marks import SHARE, THIN_EVERY, Marks
from node.data.streamed import Mark


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "marks"


def of(round_: int) -> Mark:
    return Mark(examples=10 * round_, state={"rows": round_}, library="1")


def test_the_last_one_at_or_before_a_round_is_found(path: Path) -> None:
    one = Marks(path)
    assert one.nearest(7) == (0, Mark())
    for round_ in (3, 5, 4):
        one.note(round_, of(round_))
    for known in (one, Marks(path)):
        assert known.nearest(2) == (0, Mark())
        assert known.nearest(4) == (4, of(4))
        assert known.nearest(100) == (5, of(5))


def test_each_line_is_read_once_also_those_of_others(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    loads = json.loads

    def watched(line: bytes) -> Any:
        read.append(line)
        return loads(line)

    monkeypatch.setattr("node.data.marks.json.loads", watched)
    mine, other = Marks(path), Marks(path)
    for round_ in range(1, 101):
        mine.nearest(round_)
        mine.note(round_, of(round_))
    assert not read
    for _ in range(3):
        assert other.nearest(1000) == (100, of(100))
        other.note(100, of(100))
    assert sum(bool(line.strip()) for line in read) == 100
    other.note(101, of(101))
    assert mine.nearest(1000) == (101, of(101))
    assert sum(bool(line.strip()) for line in read) == 101


def test_one_that_was_cut_off_costs_itself_alone(path: Path) -> None:
    Marks(path).note(1, of(1))
    with path.open("a") as file:
        file.write('{"round": 2, "ma')
    again = Marks(path)
    assert again.nearest(9) == (1, of(1))
    again.note(3, of(3))
    assert Marks(path).nearest(9) == (3, of(3))


def test_of_many_few_old_ones_stay_and_all_new_ones(path: Path) -> None:
    count = 40 * THIN_EVERY
    beside, one = Marks(path), Marks(path)
    most = 0
    for round_ in range(1, count + 1):
        one.note(round_, of(round_))
        if round_ % 50 == 0:
            assert beside.nearest(round_) == (round_, of(round_))
        most = max(most, path.stat().st_size)
    assert most < 800 * 120
    again = Marks(path)
    for round_ in range(1, count + 1):
        assert again.nearest(round_) == one.nearest(round_) == beside.nearest(round_)
        found, mark = again.nearest(round_)
        assert round_ - found <= (count - found) // SHARE
        assert mark == (of(found) if found else Mark())


def test_where_the_file_is_gone_nothing_is_known(path: Path) -> None:
    one = Marks(path)
    one.note(1, of(1))
    path.unlink()
    assert one.nearest(5) == (0, Mark())
    one.note(1, of(1))
    assert Marks(path).nearest(5) == (1, of(1))
