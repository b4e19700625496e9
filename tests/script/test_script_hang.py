"""A script whose node hangs: it is told so, and waits neither without a word nor without end."""

from __future__ import annotations

import asyncio
import logging
import socket
import subprocess
from pathlib import Path
from typing import cast

import pytest
from script_kit import TARGET, Played, silent

from node.script.attached import Script
from node.script.session import Joined
from node.script.standstill import GAP_S, SILENT_S, STILL_S
from node.trainer.channel import (
    REPORTS,
    ChannelClosedError,
    InnerSteps,
    Leaving,
    Snapshot,
    StepDone,
)
from node.trainer.framing import READ_BYTES, Unframer
from node.trainer.shared import BEAT_S, SharedVectors
from node.trainer.unhurried import MOST_UNSENT, Unhurried
from protocols.errors import OperatorError
from protocols.tasks import beside
from protocols.wire import decode_any

STEP = StepDone(0, 1, 2.0, None, 0.1, 8, 0.5)
SNAPSHOT = Snapshot(0, 3, 24, True)


class Process:
    """Of a node that hangs, in the kernel's hands too where it does not ``die``."""

    def __init__(self, *, dies: bool = True) -> None:
        self.dies, self.killed = dies, False

    def kill(self) -> None:
        self.killed = True

    def wait(self, timeout: float) -> int:
        if self.killed and self.dies:
            return -9
        raise subprocess.TimeoutExpired("node", timeout)


def resting() -> Played:
    """A script that has nothing to do until its node says so."""
    played = Played(silent)
    played.script.commands.append(InnerSteps(0))
    return played


@pytest.mark.parametrize("dies", [True, False])
def test_who_waits_for_a_node_that_hangs_is_told_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, dies: bool
) -> None:
    (tmp_path / "ckpt-00000003").mkdir()
    played, process = resting(), Process(dies=dies)
    joined = Joined(played.joined._progress, cast("subprocess.Popen[bytes]", process), tmp_path)
    with pytest.raises(OperatorError, match="does not answer") as caught, joined:
        joined.step(tokens=8)
    assert caught.value.code == "E405"
    assert "no sign of life for 36" in caught.value.why
    assert "a checkpoint of round 3, this script stands at round 0" in caught.value.why
    assert SILENT_S < played.script.waited < SILENT_S + 10.0
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "no sign of life for 125 s" in told.getMessage()
    assert process.killed
    assert joined.over


def test_who_trains_on_beside_a_node_that_hangs_is_told_and_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing of it is merged any more, and nobody else would say so."""
    played = Played(silent, overlap=10_000)

    def train_on() -> None:
        while played.script.now < 2 * SILENT_S:
            played.script.now += 30.0
            played.train()

    with pytest.raises(OperatorError, match="does not answer"):
        train_on()
    assert SILENT_S < played.script.now < SILENT_S + 60.0
    assert len(caplog.records) == 1


def test_a_node_that_lives_is_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As where there is no other island, or a round takes days."""
    played = resting()
    receive, script = played.script.receive, played.script

    def living(timeout: float) -> object:
        played.vectors.beat()
        if script.waited > 10 * SILENT_S and played.joined._progress.resting:
            script.commands.append(InnerSteps(TARGET))
        return receive(timeout)

    monkeypatch.setattr(script, "receive", living)
    assert played.train()
    assert script.waited > 10 * SILENT_S
    assert not caplog.records


def test_a_machine_that_was_suspended_is_no_node_that_hangs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever wakes first finds a clock that has gone on, and the other one not yet at work."""
    played = Played(silent, overlap=10_000)
    played.train()
    played.vectors.beat()
    played.train()
    played.script.now += 100_000.0
    played.train()
    assert played.joined._pulse.seconds == GAP_S
    played.vectors.beat()
    played.train()
    assert not played.joined._pulse.seconds
    assert not caplog.records


def test_a_node_that_goes_on_is_told_of_as_well(caplog: pytest.LogCaptureFixture) -> None:
    played = Played(silent, overlap=10_000)
    while played.script.now <= 2 * STILL_S:
        played.script.now += 30.0
        played.train()
    played.vectors.beat()
    played.train()
    assert [record.getMessage()[:45] for record in caplog.records] == [
        "the node of this script has shown no sign of ",
        "the node of this script goes on, after 270 s",
    ]


async def test_a_node_beats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.trainer.shared.BEAT_S", BEAT_S / 1000)
    vectors = SharedVectors.create(4)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        async with asyncio.timeout(10.0), beside(Script(ours, vectors, "").beat()):
            while vectors.beats < 3:  # noqa: ASYNC110 - memory that another process writes
                await asyncio.sleep(0)
    assert vectors.snapshot() is None


def test_no_report_waits_for_a_node_that_hangs() -> None:
    """It does not read. What people alone want to see is left out, and all else arrives whole."""
    ours, theirs = socket.socketpair()
    channel, unframer, read = Unhurried(ours), Unframer(), []
    said = 10_000
    for number in range(said):
        channel.send(SNAPSHOT if number % 100 == 0 else STEP)
    assert len(channel._unsent) < 2 * MOST_UNSENT
    channel.send(Leaving())
    theirs.settimeout(10.0)
    while Leaving() not in read:
        assert channel.receive(0.0) is None
        read += [decode_any(raw, *REPORTS) for raw in unframer.feed(theirs.recv(READ_BYTES))]
    assert read.count(SNAPSHOT) == said // 100
    assert 0 < read.count(STEP) < said - said // 100
    theirs.close()
    with pytest.raises(ChannelClosedError):
        channel.send(STEP)
    channel.close()
