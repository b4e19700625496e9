"""The benchmark of averaging: what it compares, and what it does where a system fails.

Nothing is measured: all but one of the members here say at once that they are done.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allreduce, keys
from benchmarks.fleet import START_S, Fact, Fleet, Turn, Worker, WorkerFailed

RESULTS = Path(allreduce.__file__).parent / "results" / "allreduce.json"
TOOK: Fact = {
    "event": "took",
    "asked": 0.0,
    "start": 0.001,
    "end": 0.002,
    "sent": 1000,
    "received": 1000,
    "peak": 1000,
}


class Told:
    """A member without a process, which is done at once."""

    def settle(self) -> None:
        pass

    def go(self) -> None:
        pass

    def hear(self, *events: str, within: float) -> Fact:
        return TOOK if "took" in events else {"event": "stage", "stage": "sending"}


class ToldFleet:
    """A fleet of these; ``made`` has all in the order in which they were started."""

    made: list[ToldFleet]

    def __init__(self, system: str, count: int, options: Fact, net: Any = None) -> None:
        self.system, self.options, self.net = system, options, net
        self.workers = [Told() for _ in range(count)]
        self.made.append(self)

    def __enter__(self) -> ToldFleet:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def meet(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def turn(self, among: list[int] | None = None, within: float = math.inf) -> Turn:
        return Turn([TOOK for _ in among or self.workers])


class ToldNetwork:
    """Links of nobody."""

    def __init__(self, names: list[str], *, mbit: float) -> None:
        self.names, self.dark = names, list[str]()

    def __enter__(self) -> ToldNetwork:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def darken(self, name: str) -> None:
        self.dark.append(name)


@pytest.fixture
def fleets(monkeypatch: pytest.MonkeyPatch) -> list[ToldFleet]:
    """All that are started while nothing is measured."""
    monkeypatch.setattr(ToldFleet, "made", [], raising=False)
    monkeypatch.setattr(allreduce, "Fleet", ToldFleet)
    monkeypatch.setattr(allreduce, "Network", ToldNetwork)
    return ToldFleet.made


def measured(*pieces: str, scale: allreduce.Scale = allreduce.FULL) -> dict[str, Any]:
    """What these pieces, or all, leave in the file."""
    return {
        piece: {"size": scale.size_of(piece), "runs": allreduce.PIECES[piece](scale)}
        for piece in pieces or allreduce.PIECES
    }


@pytest.mark.usefixtures("fleets")
def test_each_key_comes_from_its_piece() -> None:
    pieces = measured()
    assert set(keys.figures(pieces)) == set(keys.KEYS)
    for name, key in keys.KEYS.items():
        assert name in keys.figures({key.piece: pieces[key.piece]})


def test_a_key_that_is_not_measured_yet_is_absent() -> None:
    """Also where its piece is, without one of its systems."""
    kept = json.loads(RESULTS.read_text())["runs"]
    for piece in kept.values():
        piece["runs"].pop("gloo", None)
    found = keys.figures(kept)
    assert not [name for name in found if "gloo" in name]
    assert "vs_hivemind_fp32" in found
    keys.shown(found)


@pytest.mark.parametrize("tcp", [False, True])
def test_ours_can_be_kept_from_unix_sockets(tcp: bool) -> None:
    """What it is compared with goes by TCP."""
    with Fleet("atoll", 1, {"size": 1000, "tcp": tcp}) as fleet:
        address = fleet.workers[0].hear("opened", within=START_S)["rendezvous"]
        listening = Path("/proc/net/unix").read_text()
    assert (f"@atoll/{address.rpartition(':')[2]}/" in listening) != tcp


@pytest.mark.parametrize("codec", ["fp32", "fp16"])
def test_ours_is_compared_by_tcp_as_well(codec: str, fleets: list[ToldFleet]) -> None:
    runs = measured(codec)[codec]["runs"]
    assert {f"atoll {codec}", f"atoll {codec} tcp", f"hivemind {codec}", "gloo"} <= set(runs)
    ours = [f.options for f in fleets if f.system == "atoll" and not f.options["tls"]]
    assert sorted(options["tcp"] for options in ours) == [False, True]


def test_links_go_dark_by_turns_with_the_same_members_and_vectors(fleets: list[ToldFleet]) -> None:
    runs = measured("dark")["dark"]["runs"]
    assert [fleet.system for fleet in fleets] == ["atoll", "torchft"] * 5
    assert {name: len(found) for name, found in runs.items()} == {"atoll fp32 tls": 5, "torchft": 5}
    for fleet in fleets:
        assert len(fleet.workers) == 4
        assert fleet.options["size"] == 5_000_000
        assert fleet.net.dark == [fleet.net.names[-1]]
    fleets.clear()
    measured("dark", scale=allreduce.QUICK)
    assert [fleet.system for fleet in fleets] == ["atoll", "torchft", "atoll", "atoll"]


def test_of_stalls_the_median_counts_and_the_longest_is_told() -> None:
    runs = [{"stall": stall} for stall in (1.0, 9.0, 1.5, 2.0, 1.25)]
    found = keys.figures({"dark": {"runs": {"atoll fp32 tls": runs}}})
    assert found == {"dark_link_stall_s": 1.5, "dark_link_stall_worst_s": 9.0}


def test_torchft_takes_turns_with_ours_in_fp32(fleets: list[ToldFleet]) -> None:
    runs = measured("torchft")["torchft"]["runs"]
    assert {"atoll fp32", "atoll fp32 tcp", "torchft"} <= set(runs)
    assert len({len(fleet.workers) for fleet in fleets}) == 1


@pytest.mark.usefixtures("fleets")
def test_hivemind_in_fp32_takes_a_few_turns_on_a_slow_link_with_ours() -> None:
    runs = measured("link100-fp32")["link100-fp32"]["runs"]
    assert {name: len(turns) for name, turns in runs.items()} == {
        "atoll fp32 tls": 5,
        "gloo": 5,
        "hivemind fp32": 5,
    }
    assert keys.KEYS["vs_hivemind_wan_fp32"].piece == "link100-fp32"


def test_what_is_missed_among_other_numbers_of_members_is_shown() -> None:
    def among(ours: float) -> dict[str, Any]:
        turns = {"atoll fp32": ours, "gloo": 1.0, "hivemind fp32": 7 * ours}
        runs = {name: [{"seconds": took, "whole": True}] for name, took in turns.items()}
        return {"size": 1000, "runs": runs}

    found = keys.figures({"two": among(1.3), "eight": among(1.2), "sixteen": among(1.7)})
    lines = keys.shown(found).splitlines()
    assert {line.split()[0] for line in lines if "MISSED" in line} >= {
        "vs_gloo_fp32_two",
        "vs_gloo_fp32_sixteen",
        "vs_hivemind_fp32_two",
        "vs_hivemind_fp32_eight",
    }
    (met,) = (line for line in lines if line.startswith("vs_gloo_fp32_eight "))
    assert "MISSED" not in met


def run(monkeypatch: pytest.MonkeyPatch, where: Path, *words: str) -> dict[str, Any]:
    """What the file has after the command; it may end with a status."""
    monkeypatch.setattr(allreduce, "clean_up_at_any_end", lambda: None)
    monkeypatch.setattr(allreduce, "require", lambda: None)
    monkeypatch.setattr("sys.argv", ["allreduce", "--json", str(where), *words])
    allreduce.main()
    found: dict[str, Any] = json.loads(where.read_text())
    return found


@pytest.mark.parametrize(
    "failure", [WorkerFailed("hivemind 3 has ended\nTraceback\nno group\n"), None]
)
def test_a_piece_with_a_system_that_fails_is_given_up_and_the_others_go_on(
    failure: Exception | None,
    fleets: list[ToldFleet],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    real = ToldFleet.turn

    def turn(fleet: ToldFleet, *arguments: Any, **options: Any) -> Turn:
        if fleet.system != "hivemind":
            return real(fleet, *arguments, **options)
        if failure is not None:
            raise failure
        return Turn([{**TOOK, "digest": digest} for digest in "ab"])

    monkeypatch.setattr(ToldFleet, "turn", turn)
    where = tmp_path / "new.json"
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, where, "--only", "fp32", "int8")
    assert ended.value.code == 1
    assert set(json.loads(where.read_text())["runs"]) == {"int8"}
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("  fp32 (vs_hivemind_fp32, ")
    assert ("hivemind 3 has ended; no group" if failure else "not all have the same") in last
    assert "vs_gloo_int8" in run(monkeypatch, where, "--only", "int8")  # ends as usual


def test_without_torchft_its_pieces_are_given_up_before_anything_is_measured(
    fleets: list[ToldFleet],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(allreduce, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        run(monkeypatch, tmp_path / "new.json", "--only", "int4", "dark", "torchft")
    assert ended.value.code == 1
    assert {fleet.system for fleet in fleets} == {"gloo", "atoll"}
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith(
        'dark is given up: torchft is not installed: pip install -e ".[bench]"'
    )
    assert said[1].startswith("torchft is given up")
    assert "torchft_dark_link_stall_s" in said[-2]


def test_the_pieces_with_torchft_are_known(fleets: list[ToldFleet]) -> None:
    for piece in allreduce.PIECES:
        fleets.clear()
        measured(piece)
        used = any(fleet.system == "torchft" for fleet in fleets)
        assert used == (piece in allreduce.WITH_TORCHFT), piece


def test_a_member_that_has_ended_fails_when_it_is_told_to_go(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    gone.write_text('#!/bin/sh\necho why >&2\necho \'{"event": "waiting"}\'\n')
    gone.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(gone))
    worker = Worker("hivemind", "hivemind 0", {}, None)
    try:
        worker.settle()
        worker.process.wait(10)
        with pytest.raises(WorkerFailed, match="hivemind 0 has ended\nwhy"):
            worker.go()
    finally:
        worker.close()


def test_the_picture_is_drawn_with_the_file(
    fleets: list[ToldFleet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    run(monkeypatch, tmp_path / "new.json", "--only", "int8", "link20")
    assert (tmp_path / "new.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_the_file_alone(
    fleets: list[ToldFleet],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.plot_allreduce", raising=False)
    monkeypatch.delattr("benchmarks.plot_allreduce", raising=False)
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    run(monkeypatch, tmp_path / "new.json", "--only", "int8")
    assert 'pip install -e ".[bench]"' in capsys.readouterr().out.splitlines()[-1]
    assert not (tmp_path / "new.png").exists()


def test_kept_results_can_be_drawn(tmp_path: Path) -> None:
    """Also where not all of it is measured."""
    pytest.importorskip("matplotlib")
    from benchmarks.plot_allreduce import draw

    draw(json.loads(RESULTS.read_text()), tmp_path / "kept.png")
    assert (tmp_path / "kept.png").exists()


def test_quick_has_five_turns_and_the_keys_of_up_to_four_members(
    fleets: list[ToldFleet], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(allreduce, "lacking", lambda pieces: {})
    found = run(monkeypatch, tmp_path / "quick.json", "--quick")
    assert keys.KEYS.keys() - found.keys() == {
        name for name in keys.KEYS if name.endswith(("_eight", "_sixteen"))
    }
    for piece, row in found["runs"].items():
        assert row["took_s"] >= 0
        if piece != "dark":
            assert min(map(len, row["runs"].values())) >= 5, piece
    sizes = {fleet.options["size"] for fleet in fleets if fleet.system == "hivemind"}
    assert sizes == {10_000_000, found["runs"]["link100-fp32"]["size"], 100_000}
