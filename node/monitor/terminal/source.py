"""Where the terminal's pictures come from: a node's API, a log of events, or the swarm itself.

A picture is what the dashboard's page is drawn from (:meth:`node.monitor.dashboard.Feed.picture`).
The swarm itself: :mod:`node.monitor.observer`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, Protocol

from node.errors import operator_error
from node.monitor.dashboard import Feed
from node.monitor.event_log import EventLog
from node.monitor.events import Record, RoundDone, Started
from node.monitor.history import History
from node.monitor.reading import read_record
from node.monitor.state import NodeState
from node.monitor.views import NodeView, PeerView, RunView
from node.status import ask
from protocols.errors import OperatorError

Picture = dict[str, Any]
INTERVAL_S = 1.0
POINTS = 240
MAX_LINE = 1024 * 1024


class Source(Protocol):
    """Gives pictures until it is cancelled or there are no more."""

    title: str

    def pictures(self) -> AsyncGenerator[Picture, None]:
        """Each as soon as it is there; an OperatorError ends the monitor."""
        ...


class AttachedSource:
    """The node whose API is at ``HOST:PORT``. One that stops answering may come back."""

    def __init__(self, api: str, key: str, *, interval_s: float = INTERVAL_S) -> None:
        self.title = api
        self._api, self._key, self._interval_s = api, key, interval_s

    async def pictures(self) -> AsyncGenerator[Picture, None]:
        """Raises OperatorError E106 where nobody answers from the first."""
        last: Picture = await self._ask()
        yield last
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                last = await self._ask()
                yield last
            except OperatorError as error:
                yield last | {"problem": f"{error.what}: {error.why}"}

    async def _ask(self) -> Picture:
        path = f"/api/v1/dashboard?points={POINTS}"
        return await asyncio.to_thread(ask, self._api, self._key, path, "state")


class ReplaySource:
    """A log of events, ``speed`` times as fast as it happened (0: all at once)."""

    def __init__(self, path: Path, speed: float, *, interval_s: float = INTERVAL_S) -> None:
        self.title = f"replay of {path}"
        self._path, self._speed, self._interval_s = path, speed, interval_s

    async def pictures(self) -> AsyncGenerator[Picture, None]:
        """Raises OperatorError E204 for a file that is no log of events."""
        replay = Replay()
        shown: float | None = None
        for record in read_log(self._path):
            if self._speed and shown is not None and record.time - shown > self._speed:
                yield replay.picture()
                await asyncio.sleep(self._interval_s)
                shown = record.time
            shown = record.time if shown is None else shown
            replay.take(record)
        yield replay.picture() | {"problem": "the log ends here"}


class Replay:
    """A state and a history made from records, at the records' own time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = EventLog(clock=lambda: self.now)
        self.state = NodeState(NodeView(peer=""), log=self.log, clock=lambda: self.now)
        self.history = History()
        self.log.subscribe(self.history)
        self._peers: dict[str, PeerView] = {}
        self.state.providers.peers = lambda: list(self._peers.values())
        self._feed = Feed(self.state, self.log, self.history, clock=lambda: self.now)

    def take(self, record: Record) -> None:
        """Let it happen again."""
        self.now = record.time
        match record.event:
            case Started() as started:
                self.state.node = NodeView(
                    peer=started.peer,
                    role=started.role,
                    version=started.version,
                    device=started.device,
                    started=record.time,
                    join_address=started.join_address,
                )
                self.state.run = RunView(id="", label=started.run, total_rounds=0, manifest={})
            case RoundDone() as done:
                self.state.status = "active"
                if self.state.run is not None:
                    label = self.state.run.label
                    self.state.run = RunView(
                        id="", label=label, total_rounds=done.total_rounds, manifest={}
                    )
                self._peers = {
                    peer: PeerView(
                        peer=peer,
                        status="active",
                        round=done.round + 1,
                        loss=item.get("loss"),
                        distance=item.get("distance"),
                        link="self" if peer == self.state.node.peer else "none",
                    )
                    for peer, item in done.islands.items()
                }
            case _:
                pass
        self.log.emit(record.event)

    def picture(self) -> Picture:
        """How it stood then."""
        return self._feed.picture(POINTS)


def read_log(path: Path) -> Iterator[Record]:
    """The records of ``events.jsonl``, older files of it first; lines cut short are passed over.

    Raises OperatorError E204 where it cannot be read or there is no event in it.
    """
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda p: p.suffix, reverse=True)
    found = False
    try:
        for file in (*older, path):
            with file.open(encoding="utf-8", errors="replace") as lines:
                for line in iter(lambda: lines.readline(MAX_LINE), ""):
                    if (record := _record(line)) is not None:
                        found = True
                        yield record
    except OSError as error:
        raise _no_log(path, error.strerror or str(error)) from error
    if not found:
        raise _no_log(path, "no line of it is an event")


def _record(line: str) -> Record | None:
    try:
        return read_record(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _no_log(path: Path, why: str) -> OperatorError:
    fix = "give the events.jsonl of a node's state directory with --replay"
    return operator_error("E204", f"cannot replay {path}", why=why, fix=fix)
