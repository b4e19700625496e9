"""Commands that look at a node of another version, as after an upgrade under one that goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from node.monitor.events import Record, RoundDone
from node.monitor.terminal.app import Monitor
from node.monitor.terminal.source import AttachedSource, Picture, Replay


def picture() -> Picture:
    replay = Replay()
    replay.take(Record(1, 1.0, RoundDone(round=0)))
    found = replay.picture() | {"links": {"peers": [], "links": []}}
    found["state"]["node"]["version"] = "0.0.9"
    return found


def without(*path: str) -> Callable[[Picture], Any]:
    def take(whole: Any) -> None:
        for key in path[:-1]:
            whole = whole[key]
        del whole[path[-1]]

    return take


@pytest.mark.parametrize(
    "change",
    [
        without("state", "training"),
        without("history", "columns", "consensus"),
        without("rounds"),
        lambda whole: whole.update(events=[None]),
    ],
)
async def test_the_monitor_ends_with_the_code_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Picture], Any]
) -> None:
    other = picture()
    change(other)

    async def ask(source: AttachedSource, links: Any = None) -> Picture:
        return other

    monkeypatch.setattr(AttachedSource, "_ask", ask)
    app = Monitor(AttachedSource("127.0.0.1:1", "", interval_s=0.0))
    async with app.run_test() as pilot:
        async with asyncio.timeout(30):
            while app.failure is None:
                await pilot.pause(0.02)
        await pilot.pause()
    assert app.failure is not None
    assert app.failure.code == "E202"
    assert "Atoll 0.0.9" in app.failure.why
    assert app.return_code == app.failure.exit_code


async def test_a_picture_of_this_version_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would say nothing."""

    async def ask(source: AttachedSource, links: Any = None) -> Picture:
        return picture()

    monkeypatch.setattr(AttachedSource, "_ask", ask)
    app = Monitor(AttachedSource("127.0.0.1:1", "", interval_s=0.0))
    async with app.run_test() as pilot:
        async with asyncio.timeout(30):
            while app.shown < 2:
                await pilot.pause(0.02)
        app.exit()
    assert app.failure is None
