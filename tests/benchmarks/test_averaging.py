"""The benchmark of averaging: what it compares, and what it does where a system fails.

Nothing is measured: all but one of the members here say at once that they are done.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import allreduce, keys
from benchmarks.fleet import START_S, Fact, Fleet, Turn

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
        piece: {"size": scale.size, "runs": allreduce.PIECES[piece](scale)}
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
