"""What the demonstration says of itself, and what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from node_process import wait_until
from places import ROOT
from typer import Exit

from node.demo.run import MIN_ROUNDS, START_S, TOO_LONG, Demo, _directory, main
from node.demo.summary import as_text, summary_of, went_well
from protocols.errors import OperatorError

ROUND = {
    "state": "ab",
    "validation_loss": None,
    "consensus": None,
    "sent_bytes": 500,
    "utilisation": 0.5,
}


def demo(members: int, failed: int = 0, loss: float | None = None) -> Demo:
    """One that is over: two islands have applied two rounds of ``members`` each.

    Each has worked in vain ``failed`` times.
    """
    ended = {**ROUND, "members": members, "validation_loss": loss}
    events = {
        "round": [{**ended, "round": number} for number in range(2)],
        "round_failed": [{}] * failed,
    }
    island: Any = SimpleNamespace(
        name="island",
        events=lambda kind: events.get(kind, []),
        last_round=lambda: 1,
        starts=1,
    )
    made: Any = SimpleNamespace(
        islands=[island, island],
        joined=True,
        killed=False,
        left=False,
        cut=False,
        leaver=lambda: None,
    )
    return cast(Demo, made)


@pytest.mark.parametrize("members", [1, 2])
def test_rounds_of_one_island_alone_are_no_merging(members: int) -> None:
    summary = summary_of(demo(members), 12.0)
    text = as_text(summary)
    assert summary.state_digests_equal
    assert summary.rounds_merged == (2 if members > 1 else 0)
    assert ("bytes a parameter" in text) == (members > 1)
    assert ("bit for bit" in text) == (members > 1)
    assert ("no round merged more than one island" in text) == (members == 1)


def test_an_attempt_that_failed_is_told_of_and_the_rounds_that_came_count() -> None:
    """It kills an island: the others' round may have to be planned anew."""
    summary = summary_of(demo(2, failed=1, loss=2.0), 12.0)
    assert summary.rounds_failed == 2
    assert "attempts that failed 2" in as_text(summary)
    assert went_well(summary)
    assert not went_well(summary_of(demo(2, failed=1), 12.0)), "nothing was measured"


@pytest.mark.parametrize("end", [None, KeyboardInterrupt, RuntimeError], ids=str)
def test_only_what_explains_a_failure_is_left_behind(end: type[BaseException] | None) -> None:
    with contextlib.suppress(KeyboardInterrupt, RuntimeError), _directory() as root:
        (root / "island-1").mkdir()
        if end is not None:
            raise end
    assert root.exists() == (end is RuntimeError)
    shutil.rmtree(root, ignore_errors=True)


DEMONSTRATION = """
import signal, time
from node.demo import run as demo
from node.interrupts import clean_up_at_any_end

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
clean_up_at_any_end()
demo.step_seconds = lambda: 0.02
if {idle}:
    demo.DemoIsland.program = ("-c", "import time; time.sleep(300)")
with demo._directory() as root:
    print(root, flush=True)
    demo.Demo(90, 3, 0, root, time.monotonic(), quiet=True).run()
"""


def running_in(root: Path) -> list[str]:
    """Processes that were given a place in ``root`` and are no zombies."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{root}/".encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
    return found


@contextlib.contextmanager
def demonstration(*, idle: bool) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """One that runs, and its folder; its islands do nothing where they are ``idle``."""
    packages = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", DEMONSTRATION.format(idle=idle)],
        stdout=subprocess.PIPE,
        text=True,
        env=packages,
    ) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_no_island_outlives_it(end: signal.Signals) -> None:
    """They have sessions of their own, and would train on for all of their rounds."""
    with demonstration(idle=True) as (process, root):
        wait_until(lambda: running_in(root), "the first island")
        process.send_signal(end)
        assert process.wait(60) != 0
    assert not running_in(root)
    assert not root.exists()


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_no_island_outlives_it_where_it_is_killed() -> None:
    with demonstration(idle=False) as (process, root):
        wait_until(lambda: list(root.glob("*/events.jsonl")), "the first island to run")
        process.kill()
    wait_until(lambda: not running_in(root), "the island to leave")
    shutil.rmtree(root)


class Played:
    """An island on a virtual clock: a second to start, then a round every ``round_s``."""

    process = None

    def __init__(self, name: str, clock: Clock, round_s: float) -> None:
        self.name, self.clock, self.round_s = name, clock, round_s
        self.lives: list[float] = []
        self.signals: list[signal.Signals] = []

    def start(self, *arguments: str) -> None:
        self.lives.append(self.clock.now)

    @property
    def starts(self) -> int:
        return len(self.lives)

    @property
    def running(self) -> bool:
        return True

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for began, end in pairwise([*self.lives, self.clock.now]):
            rounds = max(0, int((end - began - 1.0) / self.round_s))
            found.append({"kind": "started"})
            found += [{"kind": "round", "round": number} for number in range(rounds)]
        return [event for event in found if not kind or event["kind"] == kind]

    def last_round(self) -> int:
        return int(self.clock.now / self.round_s) - 1

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def wait(self, timeout: float) -> bool:
        return True


class Clock:
    """In place of :mod:`time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def played(demo: Demo, clock: Clock, round_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its islands become ones that are :class:`Played`; the first three are there."""

    def new(*arguments: str) -> Any:
        island: Any = Played(f"island-{len(demo.islands) + 1}", clock, round_s)
        island.start()
        demo.islands.append(island)
        return island

    monkeypatch.setattr(demo, "_new", new)
    monkeypatch.setattr(demo, "_check_alive", lambda leaver: None)
    demo.address = ""
    demo.bar = demo.progress.add_task("", total=demo.rounds, loss="")
    for _ in range(3):
        new()


def by_a_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, step_s: float
) -> tuple[Demo, Clock]:
    """One of 90 seconds and three islands, by a clock that tests set, on two cores."""
    clock = Clock()
    monkeypatch.setattr("node.demo.run.step_seconds", lambda: step_s)
    monkeypatch.setattr("node.demo.run.time", clock)
    monkeypatch.setattr("node.demo.run.usable_cores", lambda: 2)
    return Demo(90, 3, 0, tmp_path, 0.0, quiet=True), clock


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_a_machine_that_gets_busier_makes_fewer_rounds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slower: float
) -> None:
    """It took as much longer as the machine was slower than in its first seconds."""
    demo, clock = by_a_clock(tmp_path, monkeypatch, step_s=0.02)
    round_s = slower * (demo.takes_s - START_S) / demo.rounds

    played(demo, clock, round_s, monkeypatch)
    with demo.progress:
        demo._train()
        demo._finish()
    assert demo.joined
    assert demo.killed
    assert demo.left
    assert demo.cut is (slower > 1)
    assert clock.now < 1.1 * 90
    stopped = [signal.SIGINT in cast(Any, island).signals for island in demo.islands]
    assert stopped == ([True] * 4 if demo.cut else [False, False, True, False])
    assert cast(Any, demo.islands[2]).signals == [signal.SIGINT]  # twice would end it at once


@pytest.mark.parametrize("stuck", [False, True])
def test_a_slow_machine_is_not_one_that_makes_no_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stuck: bool
) -> None:
    """The least rounds take it longer than three times the seconds that were asked for."""
    demo, clock = by_a_clock(tmp_path, monkeypatch, step_s=0.8)
    assert demo.rounds == MIN_ROUNDS
    assert demo.takes_s > 5 * 90
    round_s = float("inf") if stuck else (demo.takes_s - START_S) / demo.rounds
    played(demo, clock, round_s, monkeypatch)
    if not stuck:
        demo._train()
        assert demo.joined
        assert not demo.cut
        return
    with pytest.raises(OperatorError, match="makes no progress") as error:
        demo._train()
    assert error.value.code == "E405"
    assert error.value.why == f"round 0 of {MIN_ROUNDS} after {clock.now:.0f} s"
    assert clock.now > 3 * demo.takes_s


def planned(seconds: float, already: float, root: Path) -> Demo:
    """One that began ``already`` seconds ago."""
    return Demo(seconds, 3, 0, root, time.monotonic() - already, quiet=True)


def test_rounds_are_planned_for_what_is_left_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.demo.run.step_seconds", lambda: 0.02)
    monkeypatch.setattr("node.demo.run.usable_cores", lambda: 2)
    whole, late = planned(90, 0, tmp_path), planned(90, 30, tmp_path)
    assert MIN_ROUNDS < late.rounds < whole.rounds
    round_s = 90 / whole.rounds
    for demo in (whole, late):
        assert 90 - round_s < demo.takes_s <= 90 + 1
    least = planned(5, 0, tmp_path)
    assert MIN_ROUNDS < least.rounds < late.rounds
    assert 2 * START_S <= least.takes_s - START_S < 2 * START_S + round_s + 1
    assert least.takes_s > TOO_LONG * 5, "who comes half-way has to start before it is over"
    monkeypatch.setattr("node.demo.run.step_seconds", lambda: 0.2)
    assert planned(5, 0, tmp_path).rounds == MIN_ROUNDS


@pytest.mark.parametrize("well", [True, False])
def test_what_an_end_that_is_not_good_came_from_is_kept(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    well: bool,
) -> None:
    members = demo(2)
    first: Any = members.islands[0]
    rounds = first.events("round")

    def ended(state: str) -> Any:
        done = [{**one, "validation_loss": 2.0, "state": state} for one in rounds]
        changed = {"events": lambda kind: done if kind == "round" else []}
        return SimpleNamespace(**(vars(first) | changed))

    members.islands = [ended("ab"), ended("ab" if well else "cd")]
    roots: list[Path] = []

    def over(seconds: float, count: int, seed: int, root: Path, *_: Any, **__: Any) -> Any:
        roots.append(root)
        return SimpleNamespace(run=lambda: summary_of(members, 12.0))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("node.demo.run.Demo", over)
    monkeypatch.setattr("node.trainer.corpus.collect", lambda data: None)
    with contextlib.nullcontext() if well else pytest.raises(Exit) as ending:
        main(seconds=90, islands=3, seed=0, as_json=False)
    assert well or ending.value.exit_code == 1
    told = capsys.readouterr()
    assert ("NOT equal" in told.out) == (not well)
    assert roots[0].exists() == (not well)
    assert (str(roots[0]) in told.err) == (not well)
