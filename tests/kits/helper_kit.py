"""A host of an island that is not host 0, in the test's process; its ranks do nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hub_kit import WAIT_S, hub, place, until
from trainer_kit import tiny_manifest, tiny_settings

from node.config import resolve
from node.hosts.helper import Helper
from node.hosts.hub import Hub
from node.hosts.remote import RemoteRank
from node.hosts.tokens import fingerprint
from node.hosts.wire import Job
from node.island.rank_process import RankProcess


def helper(tmp_path: Path, port: int, **changes: Any) -> Helper:
    config = resolve({"dir": str(tmp_path), "device": "cpu"}, {})
    return Helper(config, place(port, host=1, **changes))


@asynccontextmanager
async def following(tmp_path: Path, port: int, **changes: Any) -> AsyncIterator[asyncio.Task[int]]:
    """A helper that follows host 0 until the block ends."""
    running = asyncio.ensure_future(helper(tmp_path, port, **changes).main())
    yield running
    running.cancel()
    await asyncio.wait((running,), timeout=WAIT_S)
    assert running.done()


class Training(NamedTuple):
    """Host 0, a helper, the one rank that host 0 has asked it for, and those that it started."""

    hub: Hub
    running: asyncio.Task[int]
    rank: RemoteRank
    started: list[RankProcess]


@asynccontextmanager
async def training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failures: Sequence[OSError] = (),
    store: str = "x:1",
) -> AsyncIterator[Training]:
    """Ranks are processes that do nothing; the first starts fail. They are to meet at ``store``."""
    started: list[RankProcess] = []
    left = iter(failures)

    async def spawn(number: int, directory: Path, *_: Any) -> RankProcess:
        if (failure := next(left, None)) is not None:
            raise failure
        process = await asyncio.create_subprocess_exec("sleep", "600", start_new_session=True)
        started.append(RankProcess(number, process, directory / "log", 0))
        return started[-1]

    monkeypatch.setattr(RankProcess, "spawn", spawn)
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 100)
    monkeypatch.setattr("node.data.supply.tokens_for", lambda *given, cache: str(text))
    shown = fingerprint(str(text), 256)
    job = Job(tiny_manifest().model_dump_json().encode(), b"", b"", str(text), shown)
    async with hub() as (made, _):
        made.offer(job)
        async with following(tmp_path, made.port) as running:
            (host,) = await asyncio.wait_for(made.muster(again=False), WAIT_S)
            given = tiny_settings(tmp_path).model_dump_json()
            (rank,) = made.launch(host, 1, given, range(1, 2), store)
            await until(lambda: started or running.done())
            yield Training(made, running, rank, started)
    for process in started:  # the helper has killed them
        await asyncio.wait_for(process.wait(), WAIT_S)
