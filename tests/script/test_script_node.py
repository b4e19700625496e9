"""The node that a script starts: how each is told of the other's end, and what it cannot use."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import cast

import pytest
import torch
from script_kit import Interrupted, Played, silent
from torch import nn
from trainer_kit import tiny_manifest

from node.checkpoints.checkpoint import CheckpointStore
from node.script.attached import Attached
from node.script.attached import Script as Parent
from node.script.joining import _lasting, _log, join
from node.script.session import Joined
from node.script.standstill import STILL_S
from node.trainer.channel import (
    Channel,
    ChannelClosedError,
    Command,
    Report,
    Stop,
    Stopped,
    Terms,
)
from node.trainer.shared import SharedVectors
from protocols.errors import OperatorError


class Dead:
    """A channel whose other end was killed."""

    def send(self, report: Report) -> None:
        raise ChannelClosedError("broken pipe")

    def receive(self, timeout: float) -> Command | None:
        raise ChannelClosedError("end of file")

    def close(self) -> None:
        pass


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """In the daemon's place: it ends when it is killed, or asked to."""
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running
        running.kill()


def test_a_node_that_was_killed_is_an_error_with_a_code(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    played = Played(silent)
    joined = Joined(played.joined._progress, process)
    assert played.joined._progress.leader is not None
    monkeypatch.setattr(played.joined._progress.leader, "channel", Dead())
    process.kill()
    with pytest.raises(OperatorError, match="node of this script has ended") as caught, joined:
        joined.step(tokens=8)
    assert caught.value.code == "E405"
    assert joined.over
    assert process.returncode is not None  # reaped


@pytest.mark.parametrize("own", [ValueError, None])
def test_a_node_that_was_killed_is_met_at_the_end_too(
    process: subprocess.Popen[bytes],
    monkeypatch: pytest.MonkeyPatch,
    own: type[Exception] | None,
) -> None:
    """What the script has raised itself is not hidden by it."""
    played = Played(silent)
    joined = Joined(played.joined._progress, process)
    assert played.joined._progress.leader is not None
    monkeypatch.setattr(played.joined._progress.leader, "channel", Dead())
    monkeypatch.setattr("node.script.session.LEAVE_S", 0.01)
    with contextlib.ExitStack() as stack:
        stack.enter_context(pytest.raises(own or OperatorError))
        stack.enter_context(joined)
        if own is not None:
            raise own
    assert process.returncode is not None


class Slow:
    """A daemon that has a farewell to say, and a checkpoint to write that takes ``waits`` times.

    After ``hangs`` of them it writes nothing more.
    """

    def __init__(self, store: CheckpointStore, waits: int, hangs: int = 99) -> None:
        self.store, self.waits, self.hangs = store, waits, hangs
        self.waited, self.killed = 0, False
        self.draft = contextlib.ExitStack()
        self.path = self.draft.enter_context(store.draft())

    def wait(self, timeout: float | None = None) -> int:
        self.waited += 1
        if timeout is None or self.killed:
            return -9
        if self.waited == self.waits:
            self.draft.close()
        elif self.waited < min(self.waits, self.hangs):
            (self.path / str(self.waited)).write_bytes(b"w")
        if self.waited > self.waits + 1:
            raise AssertionError("waited on")
        raise subprocess.TimeoutExpired("node", timeout)

    def kill(self) -> None:
        self.killed = True


def test_a_node_that_saves_when_its_script_is_gone_is_waited_for(tmp_path: Path) -> None:
    """As after a second Ctrl-C: it saves alone, and what it has of a large model takes minutes."""
    played = Played(silent)
    daemon = Slow(CheckpointStore(tmp_path), waits=3)
    process = cast("subprocess.Popen[bytes]", daemon)
    joined = Joined(played.joined._progress, process, tmp_path)
    joined._part()
    joined.leave()
    assert daemon.waited == daemon.waits + 1  # the last one: that it is gone
    assert daemon.killed  # it had nothing to save, and did not end


def test_a_node_that_hangs_while_it_saves_is_waited_for_as_long_as_a_disk_may_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung file system may never answer, and only Ctrl-C ended the wait."""
    played = Played(silent)
    monkeypatch.setattr("node.script.standstill.STILL_S", 0.0)
    monkeypatch.setattr("node.script.standstill.SLOWEST", 0.5)  # bytes a second: of two bytes 4 s
    monkeypatch.setattr("node.script.session.LEAVE_S", 1.0)  # each wait
    daemon = Slow(CheckpointStore(tmp_path), waits=99, hangs=3)
    joined = Joined(played.joined._progress, cast("subprocess.Popen[bytes]", daemon), tmp_path)
    joined._part()
    joined.leave()
    assert daemon.killed
    assert daemon.waited == 2 + 5 + 1  # it still wrote, it did not, and it is gone


def test_a_node_that_hangs_is_not_waited_for_without_end(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was stopped, or whose file system does not answer; also as Python ends."""
    monkeypatch.setattr("node.script.session.LEAVE_S", 0.01)
    (tmp_path / "ckpt-00000003").mkdir()
    played = Played(silent)
    joined = Joined(played.joined._progress, process, tmp_path)
    with pytest.raises(OperatorError, match="does not answer") as caught:
        joined.leave()
    assert caught.value.code == "E405"
    assert "a checkpoint of round 3, this script stands at round 0" in caught.value.why
    assert STILL_S < played.script.waited < STILL_S + 10.0
    assert played.script.closed
    assert process.returncode is not None


def test_a_node_that_leaves_is_waited_for_while_it_writes(
    process: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.script.session.LEAVE_S", 0.01)
    played = Played(silent)
    receive, script = played.script.receive, played.script

    def writing(timeout: float) -> Command | None:
        (draft / "outer").write_bytes(bytes(int(script.waited)))
        if script.waited > 5 * STILL_S:
            script.commands.append(Stop())
            process.terminate()  # its last word: it ends
        return receive(timeout)

    monkeypatch.setattr(script, "receive", writing)
    with CheckpointStore(tmp_path).draft() as draft:
        Joined(played.joined._progress, process, tmp_path).leave()
    assert script.waited > 5 * STILL_S
    assert script.of(Stopped)


def test_a_daemon_does_not_outlive_a_join_that_was_interrupted(
    process: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a notebook the script's process goes on, and the state directory would stay locked."""
    ours, theirs = socket.socketpair()
    monkeypatch.setattr("node.script.joining._start_node", lambda *_: (process, ours))
    monkeypatch.setattr(Joined, "begin", Interrupted(lambda *_: None))
    model = nn.Linear(4, 3)
    with theirs, pytest.raises(KeyboardInterrupt):
        join(model, torch.optim.SGD(model.parameters()))
    assert process.returncode is not None
    assert ours.fileno() == -1


DIES_WITH_ITS_PARENT = """
import os, signal, time
from node.trainer.rank import die_with
print(die_with(os.getppid(), signal.SIGHUP), flush=True)
time.sleep(60)
"""


def test_a_node_outlives_the_thread_that_has_joined() -> None:
    """A notebook's, an actor's or a pool's; to Linux the parent of a process is a thread."""
    started: list[subprocess.Popen[bytes]] = []

    def join_and_end() -> None:
        command = [sys.executable, "-c", DIES_WITH_ITS_PARENT]
        started.append(_lasting(command, stdout=subprocess.PIPE))
        assert started[0].stdout is not None
        assert started[0].stdout.readline() == b"True\n"

    thread = threading.Thread(target=join_and_end)
    thread.start()
    thread.join()
    (node,) = started
    with node:
        with pytest.raises(subprocess.TimeoutExpired):
            node.wait(0.5)
        node.kill()


async def test_a_script_is_told_how_long_its_run_waits(tmp_path: Path) -> None:
    ours, theirs = socket.socketpair()
    manifest = tiny_manifest(overlap_steps=3)
    vectors = SharedVectors.create(4)
    attached = Attached(Parent(ours, vectors, ""), manifest, tmp_path, 7.5, lambda reason: None)
    await attached.start()
    told = await asyncio.to_thread(Channel(theirs).receive, 10.0)
    assert told == Terms(3, 7.5)
    theirs.close()
    await attached.stop()


def test_the_log_of_a_quiet_node_lies_where_only_its_user_can_read(tmp_path: Path) -> None:
    with _log(tmp_path / "state"):
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "state" / "logs" / "node.log").exists()


@pytest.mark.parametrize("name", ["state", "state/logs/node.log"])
def test_a_state_directory_that_cannot_be_used_is_told_to_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr("node.script.joining._lasting", lambda *_, **__: pytest.fail("started"))
    if name == "state":
        (tmp_path / name).write_text("a file")
    else:
        (tmp_path / name).mkdir(parents=True)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OperatorError, match="cannot use the state directory") as caught:
        join(model, optimizer, dir=tmp_path / "state", quiet=True)
    assert caught.value.code == "E105"


def test_a_setting_that_cannot_be_told_is_refused_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.script.joining._lasting", lambda *_, **__: pytest.fail("started"))
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(OperatorError, match="cannot be told to the node") as caught:
        join(model, optimizer, dir=tmp_path / "state", quiet=True, wait_s=Decimal("1.5"))
    assert caught.value.code == "E204"
    assert not (tmp_path / "state").exists()
