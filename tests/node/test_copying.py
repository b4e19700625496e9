"""Checkpoints on their way to a second place that is slow, or hangs."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from checkpoint_kit import make
from saving_kit import inline, keeper_at

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.copying import STILL_S, Copying
from node.checkpoints.index import Facts, verify
from node.checkpoints.under_way import UnderWay, under_way
from node.monitor.events import Notice, Problem


async def test_who_waits_for_a_copy_sees_that_it_comes_further(tmp_path: Path) -> None:
    """As a script does for its node: the files are hard links, and stay as they are."""
    looks: list[UnderWay | None] = [under_way(tmp_path)]

    class Slow:
        url = "s3://bucket"

        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            os.utime(checkpoint.parent, (1, 1))
            looks.append(under_way(tmp_path))
            moved()
            looks.append(under_way(tmp_path))

    keeper, store = keeper_at(tmp_path, []), CheckpointStore(tmp_path)
    copying = Copying(cast(CheckpointCopy, Slow()), store, keeper.events, inline)
    await copying.soon(make(store, 1).path)
    await copying.done()
    nothing, began, later = looks
    assert nothing is under_way(tmp_path) is None
    assert began is not None
    assert later is not None
    assert later.size == began.size > 0
    assert later.moved > began.moved


async def test_a_second_place_that_hangs_holds_up_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, began = threading.Event(), threading.Event()
    copied: list[tuple[str, int]] = []

    class Hanging:
        url = "s3://bucket"

        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            began.set()
            assert goes_on.wait(10)
            copied.append((checkpoint.name, verify(checkpoint).round))

    keeper, store = keeper_at(tmp_path, []), CheckpointStore(tmp_path, keep=1)
    keeper.store = store
    second = cast(CheckpointCopy, Hanging())
    keeper.copying = Copying(second, store, keeper.events, inline)
    rounds = iter(range(4))

    async def fill(draft: Path, last: object, alone: bool) -> Facts:
        return Facts(run="r", round=next(rounds), step=0, tokens=0)

    monkeypatch.setattr(keeper, "_fill", fill)
    try:
        assert await keeper.save()
        assert await asyncio.to_thread(began.wait, 10)
        for _ in range(2):
            assert await keeper.save(), "the copy of the first one is still on its way"
        threading.Timer(0.2, goes_on.set).start()
        assert await keeper.save(wait=True)
    finally:
        goes_on.set()
    # the first one was pushed out of the store while it was copied, and of the others one is enough
    assert copied == [("ckpt-00000000", 0), ("ckpt-00000003", 3)]
    assert os.listdir(tmp_path) == ["ckpt-00000003"]


async def test_the_best_one_is_copied_though_a_newer_one_came_before_its_turn(
    tmp_path: Path,
) -> None:
    copied = list[str]()

    class Place:
        url = "s3://bucket"

        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            copied.append(checkpoint.name)

        put_best = put

    keeper, store = keeper_at(tmp_path, []), CheckpointStore(tmp_path, keep=1)
    copying = Copying(cast(CheckpointCopy, Place()), store, keeper.events, inline)
    for round, loss in enumerate((2.0, 1.5, 1.7), start=1):
        await copying.soon(make(store, round, loss=loss).path)
    await nothing_aside(store)
    assert copied == ["ckpt-00000003", "ckpt-00000002"]
    assert sorted(os.listdir(tmp_path)) == ["ckpt-00000002", "ckpt-00000003"]


async def nothing_aside(store: CheckpointStore) -> None:
    """Wait until all is copied, the best too."""
    async with asyncio.timeout(10):
        while under_way(store.directory):  # noqa: ASYNC110 - what is aside is files
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("begun", [False, True])
async def test_who_leaves_does_not_wait_for_the_copy_of_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """It would be a second upload as long as that of the newest, which is there."""
    now = [0.0]
    monkeypatch.setattr("node.checkpoints.copying.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("node.checkpoints.copying.LOOK_S", 0.01)
    goes_on, began, copied, events = threading.Event(), threading.Event(), list[str](), list[Any]()

    class Hanging:
        url = "s3://bucket"

        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            copied.append(checkpoint.name)

        def put_best(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            began.set()
            now[0] += 1000.0
            goes_on.wait(10)

    keeper, store = keeper_at(tmp_path, events), CheckpointStore(tmp_path)
    copying = Copying(cast(CheckpointCopy, Hanging()), store, keeper.events, inline)
    make(store, 1, loss=1.5)
    await copying.soon(make(store, 2, loss=1.7).path)
    try:
        async with asyncio.timeout(8):
            if begun:
                assert await asyncio.to_thread(began.wait, 5)
            await copying.done()
            assert copied == ["ckpt-00000002"]
            if not begun:
                await nothing_aside(store)
    finally:
        goes_on.set()
    assert began.is_set() == begun
    assert not [one for one in events if isinstance(one, Problem)]


@pytest.mark.parametrize("moves", [False, True])
async def test_who_leaves_waits_for_a_copy_as_long_as_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    now = [0.0]
    monkeypatch.setattr("node.checkpoints.copying.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("node.checkpoints.copying.LOOK_S", 0.01)
    goes_on, events = threading.Event(), list[Any]()

    class Slow:
        url = "s3://user:secret@bucket"

        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            for _ in range(10):
                now[0] += 0.9 * STILL_S if moves else 1000.0
                if goes_on.wait(0.03 if moves else 10.0):
                    return
                moved()

    keeper = keeper_at(tmp_path, events)
    keeper.copying = Copying(cast(CheckpointCopy, Slow()), keeper.store, keeper.events, inline)

    async def fill(draft: Path, last: object, alone: bool) -> Facts:
        return Facts(run="r", round=1, step=0, tokens=0)

    monkeypatch.setattr(keeper, "_fill", fill)
    try:
        async with asyncio.timeout(8):
            assert await keeper.save(wait=True)
    finally:
        goes_on.set()
    said = [(one.code, one.what) for one in events if isinstance(one, Problem)]
    waits = [one.text for one in events if isinstance(one, Notice)]
    assert any("copied to s3://bucket (" in text for text in waits)
    assert not any("secret" in text for text in waits)
    assert said == (
        [] if moves else [("E407", "the newest checkpoint is not copied to s3://bucket")]
    )


async def test_a_copy_that_hangs_while_the_node_runs_is_told_once_and_is_an_alarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hang for days before anybody would leave and be told."""
    now = [0.0]
    monkeypatch.setattr("node.checkpoints.copying.time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr("node.checkpoints.copying.LOOK_S", 0.0)
    hangs, goes_on, events = threading.Event(), threading.Event(), list[Any]()

    class Hanging:
        url = "s3://user:secret@bucket"

        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            hangs.set()
            goes_on.wait(10)

        put_best = put

    keeper, store = keeper_at(tmp_path, events), CheckpointStore(tmp_path)
    copying = Copying(cast(CheckpointCopy, Hanging()), store, keeper.events, inline)

    def hung() -> float | None:
        return copying.still

    try:
        async with asyncio.timeout(8):
            await copying.soon(make(store, 1).path)
            assert await asyncio.to_thread(hangs.wait, 5)
            assert hung() is None
            now[0] += STILL_S + 1.0
            while not events:  # noqa: ASYNC110 - a look at the clock
                await asyncio.sleep(0.01)
            await copying.soon(make(store, 2).path)
            now[0] += STILL_S
            for _ in range(20):  # looks
                await asyncio.sleep(0)
            assert hung() == 2 * STILL_S + 1.0
            goes_on.set()
            await nothing_aside(store)
            while hung() is not None:  # noqa: ASYNC110 - as its task ends
                await asyncio.sleep(0)
    finally:
        goes_on.set()
    (said,) = events
    assert (said.code, said.what) == (
        "E407",
        "checkpoint ckpt-00000001 is not copied to s3://bucket",
    )


def test_a_second_place_that_hangs_keeps_no_node_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, began = threading.Event(), threading.Event()

    class Hanging:
        def put(self, checkpoint: Path, moved: Callable[[], None]) -> None:
            began.set()
            goes_on.wait(10)

    async def fails() -> None:
        keeper = keeper_at(tmp_path, [])
        second = cast(CheckpointCopy, Hanging())
        keeper.copying = Copying(second, keeper.store, keeper.events, inline)

        async def fill(draft: Path, last: object, alone: bool) -> Facts:
            return Facts(run="r", round=1, step=0, tokens=0)

        monkeypatch.setattr(keeper, "_fill", fill)
        assert await keeper.save()
        while not began.is_set():  # noqa: ASYNC110 - an event of another thread
            await asyncio.sleep(0.01)
        raise ValueError("the trainer died")

    since = time.monotonic()
    with pytest.raises(ValueError, match="died"):
        asyncio.run(fails())
    took = time.monotonic() - since
    goes_on.set()
    assert took < 5


async def test_the_best_here_is_not_copied_where_a_better_one_is_there(tmp_path: Path) -> None:
    """As after a disk was lost: the next copy would remove it, and it would be sent again."""
    place, copied = str(tmp_path / "copy"), list[tuple[str, bool]]()
    events = keeper_at(tmp_path, []).events

    class Watched(CheckpointCopy):
        def put(self, checkpoint: Path, moved: Callable[[], None] = lambda: None) -> None:
            sent: list[bool] = []
            super().put(checkpoint, lambda: sent.append(True))
            copied.append((checkpoint.name, bool(sent)))

    async def copies(island: str, losses: dict[int, float]) -> None:
        store = CheckpointStore(tmp_path / island, keep=1)
        copying = Copying(Watched(place, keep=1), store, events, inline)
        for round_, loss in losses.items():
            await copying.soon(make(store, round_, loss=loss).path)
            await nothing_aside(store)

    await copies("before", {1: 2.0, 2: 2.5})
    await copies("after", {3: 2.2, 4: 2.3, 5: 2.4})
    assert copied == [(f"ckpt-0000000{round_}", True) for round_ in (1, 2, 3, 4, 5)]
    assert sorted(os.listdir(place)) == ["ckpt-00000001", "ckpt-00000005"]
    (tmp_path / "copy" / "ckpt-00000001" / "outer.safetensors").unlink()
    del copied[:]
    await copies("after", {6: 2.6})
    assert copied == [("ckpt-00000006", True), ("ckpt-00000003", True)]
    assert sorted(os.listdir(place)) == ["ckpt-00000003", "ckpt-00000006"]
