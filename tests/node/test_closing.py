"""What a node says last, and what it does when it is asked to end."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import time
from pathlib import Path
from typing import Any, TextIO, cast

import pytest
from signals_kit import signals_kept

from node.checkpoints.checkpoint import CheckpointStore
from node.closing import MORE_ROUNDS, last_words, newest_round
from node.config import NodeConfig
from node.daemon import Daemon
from node.interrupts import Echoes, catch
from node.monitor.console import Console
from node.monitor.event_log import EventLog

HOME = Path("/my runs/a")


def _said(reason: str, **facts: Any) -> str:
    """The last words of a node of which only these facts are out of the ordinary."""
    ordinary = {"over": False, "home": None, "saved": None, "script": False, "again": MORE_ROUNDS}
    return last_words(reason, **ordinary | facts)


def test_a_run_that_goes_on_can_be_gone_on_with() -> None:
    assert _said("2 rounds done, as --rounds says", rounds=7, home=HOME) == (
        "ended: 2 rounds done, as --rounds says; the run stands at round 7; "
        "to go on: node start --resume --dir '/my runs/a'; "
        "its model: node export FOLDER --from '/my runs/a'"
    )


def test_what_the_newest_checkpoint_does_not_have_is_told(tmp_path: Path) -> None:
    assert newest_round(tmp_path / "checkpoints") is None
    for name in ("ckpt-00000002", "ckpt-00000010", "ckpt-odd", ".draft-7"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    saved = newest_round(tmp_path / "checkpoints")
    assert saved == 10
    told = "; the newest checkpoint is of round 10; "
    said = _said("SIGINT", rounds=12, home=HOME, saved=saved)
    assert said.startswith(f"ended: SIGINT; the run stands at round 12{told}to go on: ")
    assert told in _said("it is over", rounds=12, over=True, home=HOME, saved=saved)
    assert told not in _said("SIGINT", rounds=10, home=HOME, saved=saved)


def test_the_newest_checkpoint_is_the_one_that_was_made_last(tmp_path: Path) -> None:
    """As for who goes on from it: the round may be an earlier one, of another side of a split."""
    for number, made in ((9, 100.0), (4, 200.0)):
        (tmp_path / f"ckpt-{number:08d}").mkdir()
        os.utime(tmp_path / f"ckpt-{number:08d}", (made, made))
    newest = CheckpointStore(tmp_path, owns=False).paths()[0]
    assert newest.name == "ckpt-00000004"
    assert newest_round(tmp_path) == 4


def test_one_that_is_over_can_be_exported() -> None:
    said = _said("the run is over after 9 rounds", rounds=9, over=True, home=HOME)
    assert said.startswith("ended: the run is over after 9 rounds; its model: node export")
    assert "--resume" not in said
    assert said.endswith("--init-from FOLDER --dir ANOTHER --set rounds.total_rounds=N")
    assert "--init-from" not in _said("SIGINT", rounds=9, home=HOME)
    again = ["--data", "/my text", "--preset", "small", "--set", "rounds.total_rounds=N"]
    said = _said("it is over", rounds=9, over=True, home=HOME, again=again)
    shown = "--data '/my text' --preset small --set rounds.total_rounds=N"
    assert said.endswith(f"--init-from FOLDER --dir ANOTHER {shown}")
    unknown = _said("it is over", rounds=9, over=True, home=HOME, again=None)
    assert unknown.endswith("total_rounds=N, with the other settings and --data that this one had")


def test_without_a_checkpoint_nothing_is_promised() -> None:
    said = _said("3 s are over", rounds=None)
    assert said == "ended: 3 s are over, before it took part in a run"
    said = _said("SIGINT", rounds=0)
    assert said == "ended: SIGINT; the run stands at round 0"


def test_a_script_s_model_is_the_script_s() -> None:
    said = _said("SIGTERM", rounds=3, home=HOME, script=True)
    assert said == "ended: SIGTERM; the run stands at round 3; to go on: resume=True"


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize("name", ["bootstrap", "start"])
def test_whoever_ends_says_so(command, name: str) -> None:
    """A seed that no run was brought to, and an island that is still on its way in."""
    ports = ("--listen", "127.0.0.1:0", "--api", "127.0.0.1:0")
    status, out, _ = command(name, *ports, "--seconds", "0.01")
    assert status == 0
    assert out.splitlines()[-1] == "ended: 0.01 s are over, before it took part in a run"


class AskedToEnd:
    """A daemon that hears signals and says what it makes of them."""

    def __init__(
        self, home: Path, monkeypatch: pytest.MonkeyPatch, out: TextIO | None = None
    ) -> None:
        loop = asyncio.get_running_loop()
        self.daemon = Daemon(NodeConfig(dir=home), None)
        self.daemon.stop_reason = loop.create_future()
        self.events = EventLog()
        self.statuses: list[int] = []
        monkeypatch.setattr("node.daemon.os._exit", self.statuses.append)
        console = Console(out or io.StringIO())
        self.events.subscribe(console)
        self.daemon._catch_signals(loop, self.events, console)

    async def hears(self, *numbers: signal.Signals, apart: float = 0.0) -> str:
        """What it says to signals that come while the event loop stands still."""
        for number in numbers:
            signal.raise_signal(number)
            after = time.monotonic() + apart
            while time.monotonic() < after:
                pass
        await asyncio.sleep(0.05)
        event = cast(Any, self.events.recent[-1].event)
        return str(event.reason if event.kind == "stopping" else event.text)


async def test_asked_once_it_leaves_and_asked_twice_it_ends_with_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = AskedToEnd(tmp_path, monkeypatch)
    (tmp_path / "checkpoints" / "ckpt-00000004").mkdir(parents=True)
    assert await asked.hears(signal.SIGTERM) == "SIGTERM"
    assert asked.daemon.stop_reason.result() == "SIGTERM"
    assert not asked.statuses
    said = await asked.hears(signal.SIGINT)
    assert said == "SIGINT again: ended at once; the newest checkpoint is of round 4"
    assert asked.statuses == [130]


async def test_asked_twice_it_says_so_before_it_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lines go to a descriptor by a thread, which does not outlive the process."""
    monkeypatch.setattr("node.interrupts.ECHO_S", 0.0)
    monkeypatch.setattr("node.daemon.AT_ONCE_S", 60.0)  # the machine may be busy
    with (tmp_path / "out").open("w") as out:
        asked = AskedToEnd(tmp_path, monkeypatch, out)
        for _ in range(2):
            await asked.hears(signal.SIGTERM)
        assert asked.statuses == [130]
        assert (tmp_path / "out").read_text().splitlines()[-1] == "SIGTERM again: ended at once"


async def test_who_asks_a_node_that_leaves_by_itself_costs_it_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first Ctrl-C: it may be writing its last checkpoint."""
    monkeypatch.setattr("node.interrupts.ECHO_S", 0.0)
    asked = AskedToEnd(tmp_path, monkeypatch)
    asked.daemon.stop("the run is over after 9 rounds")
    said = await asked.hears(signal.SIGINT)
    assert said.startswith("SIGINT: is leaving already, as the run is over after 9 rounds (")
    assert not asked.statuses
    assert await asked.hears(signal.SIGINT) == "SIGINT again: ended at once"
    assert asked.statuses == [130]


async def test_a_signal_that_a_wrapper_sends_on_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``timeout`` and ``uv run`` send it to the node, and its process group has it as well."""
    asked = AskedToEnd(tmp_path, monkeypatch)
    assert await asked.hears(signal.SIGTERM) == "SIGTERM"
    assert await asked.hears(signal.SIGTERM) == "SIGTERM"
    assert len(asked.events.recent) == 1
    assert not asked.statuses


async def test_signals_count_by_when_they_come_and_not_by_when_the_loop_gets_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice = signal.SIGINT, signal.SIGINT
    monkeypatch.setattr("node.interrupts.ECHO_S", 60.0)  # the machine may be busy
    asked = AskedToEnd(tmp_path, monkeypatch)
    assert await asked.hears(*twice, apart=0.05) == "SIGINT"
    assert not asked.statuses
    monkeypatch.setattr("node.interrupts.ECHO_S", 0.05)
    asked = AskedToEnd(tmp_path, monkeypatch)
    assert await asked.hears(*twice, apart=0.05) == "SIGINT again: ended at once"
    assert asked.statuses == [130]


def test_a_process_has_its_signals_back_after_the_loop() -> None:
    async def caught() -> None:
        catch(asyncio.get_running_loop(), str)
        assert callable(signal.getsignal(signal.SIGTERM))

    with signals_kept():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        asyncio.run(caught())
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == -1


def test_the_same_signal_after_a_while_is_no_echo() -> None:
    echoes = Echoes()
    assert not echoes.echo("SIGINT", 5.0)
    assert echoes.echo("SIGINT", 5.2)
    assert not echoes.echo("SIGTERM", 5.2)
    assert not echoes.echo("SIGINT", 5.25)  # counted from the one that was none
