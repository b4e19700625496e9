"""A node whose script is gone, silent, or says what cannot be read: it ends, and says why."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from trainer_kit import tiny_manifest

from node.interrupts import SCRIPT_GONE
from node.island.island import Event
from node.island.rank_ends import TrainerDied
from node.island.restarts import Restarts
from node.script.attached import Attached, Script
from node.trainer.channel import COMMANDS, Ended, InnerSteps, Leaving, Report, Stop, Stopped
from node.trainer.framing import Unframer, frame
from node.trainer.shared import SharedVectors
from protocols.errors import OperatorError
from protocols.wire import decode_any


@dataclass
class Here:
    """The daemon's side of a script that the test plays."""

    attached: Attached
    script: socket.socket
    reasons: list[str] = field(default_factory=list)  # for which the node was to leave

    async def event(self) -> Event:
        async with asyncio.timeout(10.0):
            return await self.attached.next_event()


@pytest.fixture
async def here(tmp_path: Path) -> AsyncIterator[Here]:
    ours, theirs = socket.socketpair()
    script, reasons = Script(ours, SharedVectors.create(4), ""), list[str]()
    attached = Attached(script, tiny_manifest(), tmp_path, 7.5, reasons.append)
    with theirs:
        await attached.start()
        yield Here(attached, theirs, reasons)
        await attached.stop()


def check_ends_the_node(died: Event, here: Here, says: str) -> None:
    """With E999, whose traceback is in the log, and never by starting ranks in its place.

    The script is told before the node leaves, which takes a checkpoint's time.
    """
    assert isinstance(died, TrainerDied)
    assert isinstance(died.error, OperatorError)
    assert died.error.code == "E999"
    assert says in died.error.why
    assert str(died.log) in died.error.why
    assert "Traceback" in died.log.read_text()
    assert Restarts(()).died(died, here.attached.settings, begun=True) is None
    assert not here.attached.alive
    here.script.settimeout(10.0)
    commands = [decode_any(one, *COMMANDS) for one in Unframer().feed(here.script.recv(2**16))]
    assert isinstance(commands[-1], Ended)
    assert (commands[-1].code, commands[-1].why) == (died.error.code, died.error.why)


async def test_a_script_that_is_gone_is_left_for_good(here: Here) -> None:
    here.script.close()
    assert await here.event() == Stopped()
    assert here.reasons == [SCRIPT_GONE]
    assert not here.attached.alive


async def test_who_says_what_cannot_be_read_ends_the_node(here: Here) -> None:
    """It passed for a script that is gone, and the script trained on alone."""
    here.script.sendall(frame(Stop()))  # which is a command
    check_ends_the_node(await here.event(), here, "what is no report")
    assert not here.reasons


async def test_a_defect_beside_the_script_ends_the_node(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody heard of it: the node stayed, and followed rounds of which its script knew nothing."""

    def fails(report: Report) -> None:
        raise LookupError("of nothing that anybody expected")

    monkeypatch.setattr(here.attached, "_take", fails)
    here.script.sendall(frame(Leaving()))
    check_ends_the_node(await here.event(), here, "LookupError: of nothing that anybody expected")


async def test_a_script_that_hears_nothing_holds_up_no_end(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.script.attached.STOP_GRACE_S", 0.1)

    async def say_much() -> None:
        while True:
            await here.attached.send(InnerSteps(4))

    with pytest.raises(TimeoutError):
        await asyncio.wait_for(say_much(), 2.0)  # until it no longer can
    async with asyncio.timeout(10.0):
        await here.attached.stop()
    assert not here.attached.alive
    assert not here.reasons
