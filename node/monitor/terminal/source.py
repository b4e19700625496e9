"""Where the terminal's pictures come from: a node's API, a log of events, or the swarm itself.

A picture is what the dashboard's page is drawn from (:meth:`node.monitor.dashboard.Feed.picture`),
with the links of all islands beside it where they are known (``/api/v1/links``).
The swarm itself: :mod:`node.monitor.observer`.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Protocol, TextIO

from node.errors import operator_error
from node.monitor.dashboard import Feed
from node.monitor.event_log import EventLog
from node.monitor.events import (
    AlarmEnded,
    AlarmRaised,
    PeerJoined,
    PeerLeft,
    PeerSuspected,
    Record,
    RoundDone,
    Started,
)
from node.monitor.history import History
from node.monitor.plain import table
from node.monitor.reading import read_record
from node.monitor.state import NodeState
from node.monitor.views import NodeView, PeerView, RunView
from node.status import ask
from protocols.bounds import MAX_PEERS
from protocols.errors import OperatorError, reason

Picture = dict[str, Any]
INTERVAL_S = 1.0
POINTS = 240
LINKS_EVERY = 5  # pictures: the whole swarm's links change slowly, and there are many
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
        for number in count(1):
            await asyncio.sleep(self._interval_s)
            try:
                links = last["links"] if number % LINKS_EVERY else None
                last = await self._ask(links)
                yield last
            except OperatorError as error:
                yield last | {"problem": f"{error.what}: {error.why}"}

    async def _ask(self, links: Mapping[str, Any] | None = None) -> Picture:
        path = f"/api/v1/dashboard?points={POINTS}"
        picture = await asyncio.to_thread(ask, self._api, self._key, path, "state")
        if links is None:
            links = await asyncio.to_thread(ask, self._api, self._key, "/api/v1/links", "links")
        return picture | {"links": links}


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
            if shown is None or record.time < shown:  # it begins, or the clock was set back
                shown = record.time
            replay.take(record)
        yield replay.picture() | {"problem": "the log ends here"}


class Replay:
    """A state and a history made from records, at the records' own time."""

    def __init__(self) -> None:
        self.now = 0.0
        self.log = EventLog(clock=lambda: self.now)
        self.history = History()
        self.log.subscribe(self.history)
        self._seq = 0
        self._begin(NodeView(peer=""), None)

    def _begin(self, node: NodeView, run: RunView | None) -> None:
        """A process that knows of nobody yet; what was before it stays in the history."""
        self.state = NodeState(node, log=self.log, run=run, clock=lambda: self.now)
        self.state.providers.peers = lambda: list(self._peers.values())
        self._peers: dict[str, PeerView] = {}
        self._joined: dict[str, PeerJoined] = {}
        self._alarms: dict[str, AlarmRaised] = {}  # that stood then, the newest of each kind
        self._feed = Feed(self.state, self.log, self.history, clock=lambda: self.now)

    def take(self, record: Record) -> None:
        """Let it happen again."""
        self.now = record.time
        if record.seq <= self._seq:  # each process numbers its events from 1
            self.log.unsubscribe(self.state)
            self._begin(self.state.node, self.state.run)
        self._seq = record.seq
        match record.event:
            case Started() as started:
                self._on_started(started)
            case RoundDone() as done:
                self._on_round(done)
            case PeerJoined(peer=peer) as joined:
                if len(self._joined) < MAX_PEERS or peer in self._joined:
                    self._joined[peer] = joined
                    self._peers[peer] = replace(self._view(peer), status="active")
            case PeerSuspected(peer=peer) | PeerLeft(peer=peer) as gone if peer in self._peers:
                status = "suspect" if isinstance(gone, PeerSuspected) else "left"
                self._peers[peer] = replace(self._peers[peer], status=status)
            case AlarmRaised(alarm=kind) as alarm:
                self._alarms[kind] = alarm
            case AlarmEnded(alarm=kind):
                self._alarms.pop(kind, None)
            case _:
                pass
        self.log.emit(record.event)
        if isinstance(event := record.event, RoundDone):
            stood = [one.round for _, one in self.state.rounds.fragments.values()]
            # that all have come through; of one that has had none here yet, those before these
            self.state.round = min(stood) + (len(stood) == event.fragments)

    def _on_started(self, started: Started) -> None:
        """A process says who it is, and in which run."""
        self.state.node = NodeView(
            peer=started.peer,
            role=started.role,
            version=started.version,
            device=started.device,
            started=self.now,
            listen=started.listen,
            public_addr=started.public_addr,
            join_address=started.join_address,
            invitation_needed=started.invitation_needed,
        )
        if self.state.run is not None and self.state.run.label != started.run:
            self.history.begin(started.run)
        self.state.run = RunView(id="", label=started.run, total_rounds=0, manifest={})

    def _on_round(self, done: RoundDone) -> None:
        """A round tells how long the run is, and of the islands in it."""
        self.state.status = "active"
        if self.state.run is not None:
            self.state.run = replace(self.state.run, total_rounds=done.total_rounds)
        self._peers |= {
            peer: replace(
                self._view(peer),
                status="active",
                round=done.round + 1,
                loss=item.get("loss"),
                distance=item.get("distance"),
            )
            for peer, item in done.islands.items()
        }

    def _view(self, peer: str) -> PeerView:
        """What is known of a peer by now."""
        said, was = self._joined.get(peer), self._peers.get(peer) or PeerView(peer=peer)
        mine = peer == self.state.node.peer
        if said is None:
            return replace(was, link="self" if mine else "none")
        return replace(
            was, name=said.name, role=said.role, region=said.region, version=said.version
        )

    def picture(self) -> Picture:
        """How it stood then; alarms of what no log has, as others' states, as they were said."""
        picture = self._feed.picture(POINTS)
        alarms = picture["state"]["alarms"]
        seen = {alarm["kind"] for alarm in alarms}
        alarms += [
            {**table(told), "kind": kind} for kind, told in self._alarms.items() if kind not in seen
        ]
        alarms.sort(key=lambda alarm: alarm["level"])
        return picture


def read_log(path: Path) -> Iterator[Record]:
    """The records of ``events.jsonl``, older files of it first; lines cut short are passed over.

    Raises OperatorError E204 where it cannot be read or there is no event in it.
    """
    found = False
    try:
        with ExitStack() as stack:
            for lines in _opened(path, stack):
                for line in iter(partial(lines.readline, MAX_LINE), ""):
                    if (record := _record(line)) is not None:
                        found = True
                        yield record
    except OSError as error:
        raise _no_log(path, reason(error)) from error
    if not found:
        raise _no_log(path, "no line of it is an event")


def _opened(path: Path, stack: ExitStack) -> list[TextIO]:
    """The log's files, the oldest first. All at once: a node that runs renames and removes them.

    The newest is opened first, so that none escapes that becomes an older one meanwhile.
    """
    opened: dict[tuple[int, int], TextIO] = {}
    older = sorted(path.parent.glob(f"{path.name}.*"), key=lambda p: p.suffix)
    for file in (path, *older):
        try:
            lines = stack.enter_context(file.open(encoding="utf-8", errors="replace"))
        except FileNotFoundError:
            if file == path:
                raise
            continue
        found = os.fstat(lines.fileno())
        opened.setdefault((found.st_dev, found.st_ino), lines)
    return list(opened.values())[::-1]


def _record(line: str) -> Record | None:
    try:
        return read_record(json.loads(line))
    except (ValueError, RecursionError):
        return None


def _no_log(path: Path, why: str) -> OperatorError:
    fix = "give the events.jsonl of a node's state directory with --replay"
    return operator_error("E204", f"cannot replay {path}", why=why, fix=fix)
