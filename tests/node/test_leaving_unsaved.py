"""How a node leaves whose last checkpoint cannot be written: what is tried, and what is told."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from leaving_kit import Leaver

from node.checkpoints.checkpoint import DiskFullError
from node.leaving import ELSE_S, leave
from node.outermost import report
from node.runtime import Node
from node.templates import stop_s
from protocols.memory import virtual_time
from protocols.tasks import Tasks


class Unwritten:
    """A keeper that cannot write, the first ``times`` or for ever."""

    def __init__(
        self, folder: Path, failed: Exception, did: list[str], times: float, takes_s: float = 0.0
    ) -> None:
        self.took, self._takes_s = 0.0, takes_s
        self.room: Iterator[bool] = itertools.repeat(True)
        self.store = SimpleNamespace(directory=folder)
        self.failed: Exception | None = failed
        self._did, self._left = did, times

    async def save(self, *, wait: bool, last: AsyncExitStack | None) -> bool:
        await asyncio.sleep(self._takes_s)
        self._did.append("fails" if self._left > 0 else "save")
        if self._left <= 0:
            self.failed = None
        self._left -= 1
        return self.failed is None

    def fits(self) -> bool:
        return next(self.room)


@pytest.mark.parametrize(
    ("saved", "lacks"),
    [
        (0, "there is none, and the run stands at round 24: what came since is lost"),
        (2, "the newest is of round 2, and the run stands at round 24: what came since is lost"),
        (24, "No space; the newest is of round 24: what came since is lost"),
    ],
)
async def test_what_is_lost_without_the_last_checkpoint_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, lacks: str
) -> None:
    monkeypatch.setattr("node.leaving.PAUSE_S", 0.0)
    if saved:
        (tmp_path / f"ckpt-{saved:08d}").mkdir()
    leaver: Any = Leaver()
    leaver.reporter = SimpleNamespace(round=24)
    full = DiskFullError(tmp_path, "No space")
    leaver.keeper = Unwritten(tmp_path, full, leaver.did, math.inf)
    told = await leave(leaver, AsyncExitStack())
    assert leaver.did == ["farewell", "fails", "says so", "fails", "fails", "fails", "stop"]
    assert told is not None
    assert (told.code, told.exit_code, told.fix) == ("E402", 1, full.fix)
    assert lacks in told.why


@pytest.mark.parametrize("finishing", [False, True])
async def test_nothing_is_trained_while_it_waits_for_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finishing: bool
) -> None:
    """Nobody merges it any more: who resumes would bring it as the work of a single round."""
    monkeypatch.setattr("node.leaving.PAUSE_S", 0.0)
    leaver: Any = Leaver(finishing=finishing)
    full = DiskFullError(tmp_path, "No space")
    leaver.keeper = Unwritten(tmp_path, full, leaver.did, 1)
    assert await leave(leaver, AsyncExitStack()) is None
    assert leaver.rests == ["farewell"] * (not finishing)


async def test_space_that_is_freed_while_it_leaves_is_soon_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.leaving.PAUSE_S", 0.0)
    leaver: Any = Leaver()
    full = DiskFullError(tmp_path, "No space")
    leaver.keeper = Unwritten(tmp_path, full, leaver.did, 2)
    assert await leave(leaver, AsyncExitStack()) is None
    assert leaver.did == ["farewell", "fails", "says so", "fails", "save", "stop"]


@pytest.mark.parametrize("took", [0.0, 40.0, 1000.0])  # the newest, which was whole
@pytest.mark.parametrize("takes", [1.0, 20.0, 50.0, 100.0, 900.0])
def test_who_leaves_is_not_killed_while_it_tries_for_space(
    tmp_path: Path, takes: float, took: float
) -> None:
    took = max(took, takes) if took else 0.0

    async def main() -> float:
        leaver: Any = Leaver()
        full = DiskFullError(tmp_path, "No space")
        leaver.keeper = Unwritten(tmp_path, full, leaver.did, math.inf, takes)
        leaver.keeper.took = took
        began = asyncio.get_running_loop().time()
        assert await leave(leaver, AsyncExitStack()) is not None
        return asyncio.get_running_loop().time() - began

    assert virtual_time.run(main()) <= max(stop_s(took) - ELSE_S, takes)


def test_nothing_is_written_before_there_is_room_for_it(tmp_path: Path) -> None:
    async def main() -> None:
        leaver: Any = Leaver()
        leaver.keeper = Unwritten(tmp_path, DiskFullError(tmp_path, "No space"), leaver.did, 1)
        leaver.keeper.room = iter([False, False, True])
        assert await leave(leaver, AsyncExitStack()) is None
        assert leaver.did == ["farewell", "fails", "says so", "save", "stop"]

    virtual_time.run(main())


async def test_what_no_space_helps_is_not_waited_for(tmp_path: Path) -> None:
    leaver: Any = Leaver()
    leaver.keeper = Unwritten(tmp_path, TimeoutError("stuck"), leaver.did, math.inf)
    told = await leave(leaver, AsyncExitStack())
    assert leaver.did == ["farewell", "fails", "stop"]
    assert told is not None
    assert told.code == "E404"
    assert told.why.startswith("stuck; ")


@pytest.mark.parametrize("unsaved", [None, DiskFullError(Path("x"), "No space")])
async def test_a_lost_checkpoint_is_in_the_process_s_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsaved: DiskFullError | None
) -> None:
    did: list[str] = []

    async def nothing(*_: object) -> None:
        pass

    async def left(*_: object) -> DiskFullError | None:
        return unsaved

    part: Any = SimpleNamespace(enter=nothing)
    monkeypatch.setattr("node.participation.Participation", lambda *_: part)
    monkeypatch.setattr("node.leaving.leave", left)
    monkeypatch.setattr("node.runtime.Entrance", lambda *_: None)
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path))
    api = SimpleNamespace(start=nothing, aclose=nothing, address="")
    node: Any = SimpleNamespace(
        offload=nothing,
        transport=SimpleNamespace(own_end=None),
        place=SimpleNamespace(publish=lambda: None, seen=None),
        api=api,
        home=SimpleNamespace(publish_api=lambda *_: None, withdraw_api=lambda: None),
        dashboard=None,
        config=SimpleNamespace(api_key="", seconds=0.0, map_port=False),
        state=SimpleNamespace(alarms_now=tuple, peers=None),
        daemon=SimpleNamespace(until_stopped=nothing),
        timekeeper=SimpleNamespace(run=nothing),
        _say_ended=lambda part: did.append("says last words"),
    )
    for name in ("whereabouts", "cache", "clocks", "events", "outbound"):
        setattr(node, name, None)

    async def live() -> None:
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as group:
            tasks = Tasks(group)
            node.tasks = tasks
            try:
                await Node.live(node, stack)
            finally:
                tasks.cancel()

    if unsaved is None:
        await live()
    else:
        with pytest.raises(ExceptionGroup) as caught:
            await live()
        assert report(caught.value) == 1
    assert did == ["says last words"]
