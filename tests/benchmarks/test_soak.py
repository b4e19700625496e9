"""The hour of trouble: what it tells of who was in trouble, and of what it did not mean to end."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any, cast

import pytest
from swarm_kit import Islands

from benchmarks import soak
from benchmarks.soak import Soak


class Played:
    """An island without a process."""

    def __init__(self, name: str) -> None:
        self.name, self.starts, self.running = name, 1, True
        self.process = self.dir = None
        self.rounds: list[dict[str, Any]] = []

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return {"round": self.rounds, "started": [{"peer": self.name}]}.get(kind, [])

    def last_round(self) -> int:
        return len(self.rounds) - 1

    def merge(self, at: float, **tokens: int) -> None:
        told = {"time": at, "round": len(self.rounds), "state": "s"}
        self.rounds.append(told | {"islands": {k: {"tokens": v} for k, v in tokens.items()}})

    def start(self, *arguments: str) -> None:
        self.starts, self.running = self.starts + 1, True

    def kill(self) -> None:
        self.running = False

    def tail(self) -> str:
        return "last words"

    def since_start(self, kind: str) -> list[dict[str, Any]]:
        return []


@pytest.fixture
def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Soak:
    one = Soak(Islands(tmp_path), 60.0, 2, random.Random(0))
    one.began, one.samples = time.monotonic(), [{"s": 0.0}]
    one.swarm.all = cast("list[Any]", [Played("first"), Played("second")])
    one.first = one.swarm.all[0]
    monkeypatch.setattr(soak, "_ranks", lambda island: [7] if island.running else [])
    monkeypatch.setattr(soak.os, "kill", lambda pid, number: None)
    return one


def test_the_time_counts_from_the_kill_of_a_trainer(played: Soak) -> None:
    """To the first round that can have work of the ranks that were started then."""
    first = cast(Played, played.first)
    first.merge(time.time() - 1, second=9)
    trouble = played._begin("trainer killed")
    ((island, since),) = played._trainer_killed()
    assert time.time() - since < 10
    first.merge(since + 0.5, second=9)  # was under way: what the dead one had given
    assert played._merged(trouble, island, since) is None
    for after, tokens in ((5, 0), (8, 9), (11, 9)):
        first.merge(since + after, second=tokens)
    played._await_back(trouble, island, since)
    assert [one["back_s"] for one in played.course] == [8]


def test_who_ends_uncalled_is_told_of_and_started_again_each_time(played: Soak) -> None:
    second = played.swarm.all[1]
    played._trainer_killed()  # its node outlives that
    for time_ in (1, 2):
        second.kill()
        played._look()
        assert len(played.uncalled) == time_
        assert (second.running, second.starts) == (True, 1 + time_)
        assert [island for _, island, _ in played.again] == [second] * time_
    played._kill(second)
    played._look()
    assert len(played.uncalled) == 2
    assert not second.running


def test_what_there_is_is_written_where_something_breaks_it_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: Any = Played("first")
    first.await_up = lambda: "here"

    def trouble(played: Soak) -> None:
        first.merge(1.0, first=9)
        first.merge(3.0, first=9)
        played.samples.append({"s": 1.0, "daemon": {}, "trainer": {}})
        played.course.append({"kind": "killed", "back_s": 2.0})
        raise AssertionError("not within 90 s")

    monkeypatch.setattr(Soak, "_new", lambda played, *arguments: first)
    monkeypatch.setattr(Soak, "_trouble", trouble)
    monkeypatch.setattr(Islands, "await_office", lambda *given: None)
    found = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["soak", "--json", str(found), "--dir", str(tmp_path)])
    with pytest.raises(AssertionError):
        soak.main()
    result = json.loads(found.read_text())
    assert result["broke_off"] == "AssertionError('not within 90 s')"
    assert (result["rounds"], result["troubles"]["killed"]["median_s"]) == (2, 2.0)
