"""What a benchmark does to results that a file has already. Nothing is measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allreduce, compression, far, layouts

RESULTS = Path(layouts.__file__).parent / "results"


@pytest.fixture(autouse=True)
def nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (allreduce, far, layouts):
        monkeypatch.setattr(module, "clean_up_at_any_end", lambda: None)
    monkeypatch.setattr(allreduce, "require", lambda: None)
    monkeypatch.setattr(allreduce, "lacking", lambda pieces: {})
    monkeypatch.setattr(allreduce, "PIECES", dict.fromkeys(allreduce.PIECES, _piece))
    monkeypatch.setattr(allreduce, "figures", lambda runs: {})
    monkeypatch.setattr(allreduce, "picture", lambda result, where: None)
    monkeypatch.setattr(allreduce, "shown", lambda found: "")
    monkeypatch.setattr(compression, "train", lambda settings, case: iter([1.0]))
    monkeypatch.setattr(far, "available", lambda: True)
    monkeypatch.setattr(far, "measure", lambda way, count: {"new": True})
    monkeypatch.setattr(far, "shown", lambda found: "")


def _piece(scale: allreduce.Scale) -> Any:
    return {"stub": [{"seconds": 1.0}]}


def call(
    module: Any, monkeypatch: pytest.MonkeyPatch, where: Path, *words: str
) -> dict[str, dict[str, Any]]:
    """What the file has after the benchmark was called with these words."""
    monkeypatch.setattr("sys.argv", ["benchmark", "--json", str(where), *words])
    module.main()
    found: dict[str, dict[str, Any]] = json.loads(where.read_text())
    return found


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    where = tmp_path / "kept.json"
    where.write_bytes((RESULTS / "allreduce.json").read_bytes())
    return where


def test_averaging_again_in_one_way_keeps_the_others(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.loads(kept.read_text())["runs"]
    before = {name: one for name, one in before.items() if name in allreduce.PIECES}
    assert len(before) >= 15
    after = call(allreduce, monkeypatch, kept, "--only", "int8")["runs"]
    assert after.pop("int8")["runs"] == _piece(allreduce.FULL)
    del before["int8"]
    assert after == before


def test_results_to_take_the_others_from_are_there(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = kept.read_bytes()
    with pytest.raises(SystemExit):
        call(allreduce, monkeypatch, kept, "--only", "int8", "--merge", str(tmp_path / "typo"))
    assert kept.read_bytes() == before


@pytest.mark.parametrize("words", [(), ("--only", "int8"), ("--only", "int8", "--merge")])
def test_quick_averages_do_not_come_among_others(
    words: tuple[str, ...], kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = kept.read_bytes()
    where = tmp_path / "new.json" if "--merge" in words else kept
    more = (str(kept),) if "--merge" in words else ()
    with pytest.raises(SystemExit, match="without --quick: give another file"):
        call(allreduce, monkeypatch, where, "--quick", *words, *more)
    assert kept.read_bytes() == before
    assert where == kept or not where.exists()
    found = call(allreduce, monkeypatch, tmp_path / "quick.json", "--quick")["runs"]
    assert all(piece["quick"] for piece in found.values())
    with pytest.raises(SystemExit, match="with --quick: give another file"):
        call(allreduce, monkeypatch, tmp_path / "quick.json", "--only", "int8")


def test_each_piece_tells_the_size_that_it_averaged(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = call(allreduce, monkeypatch, tmp_path / "new.json")["runs"]
    own = {"matchmaking": 100_000, "dark": 5_000_000}
    assert {name: one["size"] for name, one in found.items()} == dict.fromkeys(found, 25e6) | own
    results = json.loads((RESULTS / "allreduce.json").read_text())["runs"]
    for name in found.keys() & results.keys():  # what is new may not be measured yet
        assert results[name]["size"] == found[name]["size"]


def test_quick_rows_of_codecs_do_not_come_among_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where = tmp_path / "kept.json"
    where.write_bytes((RESULTS / "compression.json").read_bytes())
    before = where.read_bytes()
    with pytest.raises(SystemExit, match="without --quick: give another file"):
        call(compression, monkeypatch, where, "--quick")
    assert where.read_bytes() == before
    found = call(compression, monkeypatch, tmp_path / "quick.json", "--quick")
    assert all(row["quick"] for row in found.values())


def test_far_ways_stay_until_they_are_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where = tmp_path / "kept.json"
    where.write_text(json.dumps({name: {"new": False} for name in far.WAYS}))

    def broken_off(way: far.Way, count: int) -> dict[str, Any]:
        if way is not next(iter(far.WAYS.values()))[1]:
            raise KeyboardInterrupt
        return {"new": True}

    monkeypatch.setattr(far, "measure", broken_off)
    with pytest.raises(KeyboardInterrupt):
        call(far, monkeypatch, where)
    found = json.loads(where.read_text())
    assert list(found) == list(far.WAYS)
    assert sum(row["new"] for row in found.values()) == 1


def test_layouts_stay_until_they_are_compared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    where = tmp_path / "kept.json"
    where.write_bytes((RESULTS / "layouts.json").read_bytes())
    before = {row["name"]: row for row in json.loads(where.read_text())["layouts"]}
    first = layouts.CASES[0].name

    def broken_off(case: layouts.Case, *rest: Any) -> dict[str, Any]:
        if case.name != first:
            raise KeyboardInterrupt
        return {"name": case.name, "new": True}

    monkeypatch.setattr(layouts, "compare", broken_off)
    with pytest.raises(KeyboardInterrupt):
        call(layouts, monkeypatch, where)
    after = {row["name"]: row for row in json.loads(where.read_text())["layouts"]}
    assert after == before | {first: {"name": first, "new": True}}
    with pytest.raises(SystemExit, match="another kind of device"):
        call(layouts, monkeypatch, where, "--device", "cuda")
