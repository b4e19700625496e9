"""The daemon's side of the trainer: its ranks as structured child processes.

An :class:`Island` starts one process a rank, talks to rank 0, and turns everything that can
happen into a queue of events. A rank that dies takes the others down and becomes one
:class:`TrainerDied`, never a hang; whether to start again is the daemon's decision. Ranks stop in
three steps (asked, terminated, killed) and die with the daemon.

Where the island has other hosts (:mod:`node.hosts`), it waits for them before it starts, has the
layout made for those that came, and supervises their ranks like its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
import traceback
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from node.hosts.crew import Crew
from node.hosts.listening import listening_for_ranks
from node.hosts.remote import Host, RemoteRank
from node.hosts.wire import SILENT_S
from node.island.absence import Absence
from node.island.other_hosts import among_hosts
from node.island.rank_ends import TrainerDied, obituary, settle, silent
from node.island.rank_process import PASSING, RankProcess, oom_kills, rank_environment, refusal
from node.island.rendezvous import Rendezvous
from node.island.silence import Silence, Silent
from node.modes import by_gradients, by_outer_steps
from node.trainer.channel import (
    REPORTS,
    ChannelClosedError,
    Command,
    Failed,
    Ready,
    Report,
    StepDone,
    Stop,
)
from node.trainer.framing import READ_BYTES, Unframer, frame
from node.trainer.settings import TrainerSettings
from node.trainer.shared import SharedVectors
from protocols.addresses import hostport
from protocols.errors import Malformed, OperatorError
from protocols.tasks import Background, beside
from protocols.wire import decode_any

STOP_GRACE_S = 15.0  # after Stop: an inner step may be long
TERMINATE_GRACE_S = 3.0  # after SIGTERM, then SIGKILL
LOOK_S = 5.0  # between looks at whether rank 0 hangs, or this process has stood still
CLAIM_POLL_S = 0.005  # between tries while the trainer writes a snapshot
UNSTARTED_PAUSE_S = 5.0  # before the report that ranks cannot be started
MAX_QUEUED = 1024  # events; beyond it StepDone, which is for people only, is left out


Event = Report | Silent | TrainerDied


@dataclass(frozen=True)
class _Life:
    """What one start of the ranks has made."""

    reader: asyncio.StreamReader
    rendezvous: Rendezvous
    oom_kills: int


class Island:
    """The trainer of this node. ``directory`` receives logs and the settings file.

    Use :meth:`start`, take events with :meth:`next_event`, and always :meth:`stop`; or
    ``async with``, which does both.
    """

    def __init__(
        self,
        settings: TrainerSettings,
        vectors: SharedVectors,
        directory: Path,
        crew: Crew | None = None,
    ) -> None:
        """``crew``: the island's other hosts, where it has some."""
        self.settings = settings
        self.vectors = vectors
        self.directory = directory
        self.crew = crew
        self.starts = 0  # how often the ranks were started
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._ranks: list[RankProcess | RemoteRank] = []
        self._writer: asyncio.StreamWriter | None = None
        self._background = Background()  # outlives the daemon's group, to end the ranks with grace
        self._supervisor: asyncio.Task[None] | None = None
        self._changing = asyncio.Lock()  # a restart and the end may come at once
        self._ended = False  # by :meth:`stop`: a restart that is late for it starts nothing
        self._stopping = False
        self._ready = False
        self._gathering = False  # the ranks are not all started yet, or could not be
        self._failed: Failed | None = None
        self._silence = self._watch()
        self._absence = Absence(LOOK_S)

    async def __aenter__(self) -> Island:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    @property
    def alive(self) -> bool:
        """Whether all ranks are running."""
        return self._supervisor is not None and not self._supervisor.done()

    async def start(self) -> None:
        """Start all ranks; returns at once, ``Ready`` follows as an event."""
        async with self._changing:
            self._ended = False
            await self._start()

    async def _start(self) -> None:
        if self.alive:
            raise RuntimeError("the island is running")
        self._stopping, self._failed, self._ranks = False, None, []
        self.starts += 1
        self._ready, self._silence, self._absence = False, self._watch(), Absence(LOOK_S)
        while not self._events.empty():  # an earlier life's snapshots are void
            self._events.get_nowait()
        self.vectors.clear()
        if self.crew is not None:
            self._gathering = True
            self._supervisor = self._background.spawn(self._heard(self._run_with(self.crew)))
            return
        try:
            life = await self._launch(())
        except OSError as error:
            if error.errno not in PASSING:
                raise
            self._gathering = True
            self._supervisor = self._background.spawn(self._not_started(error))
            return
        self._supervisor = self._background.spawn(self._heard(self._supervise(life)))

    @property
    def grown(self) -> bool:
        """Whether another host has come, which starting again would take in."""
        return self.crew is not None and self.crew.grown

    def merged(self) -> None:
        """A round has been merged since the ranks were started."""
        if self.crew is not None:
            self.crew.merged()

    async def _run_with(self, crew: Crew) -> None:
        """Wait for the other hosts, start ranks on all of them, and supervise these."""
        try:
            hosts = await crew.muster(again=self.starts > 1)
            self.settings = crew.fit(self.settings, hosts)
        except OperatorError as error:
            died = TrainerDied(0, None, "", error.code, error.what, self._log, "", error)
            self._events.put_nowait(died)
            return
        try:
            life = await self._launch(hosts)
        except OSError as error:  # nobody would hear of it if it were raised here
            await self._not_started(error)
            return
        self._gathering = False
        await self._supervise(life)

    async def _heard(self, life: Coroutine[Any, Any, None]) -> None:
        """Carry a life out to its end; a defect of Atoll in there ends it like a death."""
        try:
            await life
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody awaits this task
            with contextlib.suppress(OSError), self._log.open("a", encoding="utf-8") as file:
                traceback.print_exc(file=file)
            while isinstance(error, ExceptionGroup):
                error = error.exceptions[0]
            if not self._stopping:
                self._events.put_nowait(self._defect(error))

    def _defect(self, error: Exception) -> TrainerDied:
        """What is told of a defect of Atoll in what follows the ranks."""
        text = f"its supervisor has failed: {type(error).__name__}: {error}"
        return TrainerDied(0, None, "", "E405", text, self._log, "")

    @property
    def _log(self) -> Path:
        """Where all is written that happens to rank 0."""
        return self.directory / "trainer-rank0.log"

    async def _not_started(self, error: OSError) -> None:
        """Report that there is no memory, disk or file for another process.

        Only after a pause: the daemon then tries again at once, and a few times only.
        """
        await asyncio.sleep(UNSTARTED_PAUSE_S)
        text = f"ranks do not start: {error}"
        refused = refusal(error, text)
        self._events.put_nowait(TrainerDied(0, None, "", "E405", text, self._log, "", refused))

    async def _launch(self, hosts: Sequence[Host]) -> _Life:
        """Start all ranks, those of this host first."""
        crew, settings = self.crew, self.settings
        self.directory.mkdir(parents=True, exist_ok=True)
        settings_file = settings.write(self.directory)
        shares = [range(settings.ranks)] if crew is None else crew.shares(settings.ranks, hosts)
        ours, theirs = socket.socketpair()
        rendezvous = Rendezvous(self.directory)
        store, address = rendezvous.store, ""
        kills = oom_kills()
        try:
            with contextlib.ExitStack() as stack:
                stack.enter_context(theirs)
                rank_0 = {"--channel": theirs.fileno(), "--vectors": self.vectors.descriptor}
                if crew is not None and hosts:
                    address = crew.reached_at(hosts)
                    listening = stack.enter_context(listening_for_ranks(address))
                    store = hostport(address, listening.getsockname()[1])
                    rank_0["--store-socket"] = listening.fileno()
                environment = rank_environment(settings.threads, address)
                for rank in shares[0]:
                    words = ["--settings", str(settings_file), "--place", str(rank)]
                    words += ["--store", store]
                    inherited = rank_0 if rank == 0 else {}
                    for flag, descriptor in inherited.items():
                        words += [flag, str(descriptor)]
                    files = *inherited.values(), *rendezvous.inherited
                    self._ranks.append(
                        await RankProcess.spawn(rank, self.directory, words, environment, files)
                    )
            if crew is not None:
                for host, share in zip(hosts, shares[1:], strict=True):
                    self._ranks += crew.launch(host, self.starts, settings, share, store)
            reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        except BaseException:  # also Ctrl-C: ranks that were started must not outlive us
            ours.close()
            self._signal_all(signal.SIGKILL)
            for started in self._ranks:
                await started.wait()
            rendezvous.close()
            raise
        return _Life(reader, rendezvous, kills)

    async def next_event(self) -> Event:
        """The next event, oldest first; waits for it."""
        return await self._events.get()

    async def send(self, command: Command) -> None:
        """Send a command to rank 0; raises :class:`ChannelClosedError` when it is not there."""
        if self._writer is None or not self.alive:
            raise ChannelClosedError("the trainer is not running")
        try:
            self._writer.write(frame(command))
            self._silence.sent(command)
            await self._writer.drain()
        except ConnectionError as error:
            raise ChannelClosedError(f"the trainer is gone ({error})") from error

    async def claim(self, fragment: int = 0) -> None:
        """Take ``base`` and ``sent`` from the trainer; it writes no snapshot until it has applied.

        Look at ``vectors.snapshot`` afterwards: a snapshot may lie there whose event is still on
        its way. Write, then send Begin or Apply; the claim ends with ``Applied``.
        """
        while not self.vectors.try_claim(fragment):  # noqa: ASYNC110 - a lock of another process
            await asyncio.sleep(CLAIM_POLL_S)

    async def stop(self) -> None:
        """End all ranks: asked, then terminated, then killed. Queues ``Stopped`` if it came."""
        self._ended = True
        async with self._changing:
            await self._stop()

    async def _stop(self) -> None:
        self._stopping = True
        if self._supervisor is None:
            return
        if self._gathering:
            self._gathering = False
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        try:
            if self._ready and self.alive:  # before that it listens to nothing
                with contextlib.suppress(ChannelClosedError):  # it went by itself meanwhile
                    await self.send(Stop())
                    await asyncio.wait((self._supervisor,), timeout=STOP_GRACE_S)
            if self.alive:
                self._signal_all(signal.SIGTERM)
                await asyncio.wait((self._supervisor,), timeout=TERMINATE_GRACE_S)
        finally:
            self._signal_all(signal.SIGKILL)
            await asyncio.wait((self._supervisor,))
            if not self._supervisor.cancelled():
                self._supervisor.result()
            self._supervisor = None

    async def restart(self, **changes: Any) -> None:
        """Stop, and start again with changed settings, e.g. ``micro_batch=4`` after an E401.

        The vectors stay as they are; the trainer waits for ``Begin`` as at its first start. If
        :meth:`stop` was called meanwhile, nothing is started.
        """
        async with self._changing:
            await self._stop()
            self.settings = TrainerSettings.model_validate({**dict(self.settings), **changes})
            if not self._ended:
                await self._start()

    async def _supervise(self, life: _Life) -> None:
        """Read events until the first rank ends; then end the rest and say why."""
        ended: list[tuple[int, int]] = []
        try:
            async with beside(self.vectors.keep_beating()), asyncio.TaskGroup() as group:
                reading = group.create_task(self._read(life.reader))
                looking = group.create_task(self._hangs())
                exits = [group.create_task(rank.wait()) for rank in self._ranks]
                await asyncio.wait((reading, looking, *exits), return_when=asyncio.FIRST_COMPLETED)
                hangs = looking.done()
                looking.cancel()
                if not (self._stopping or hangs):
                    ended = await settle(exits)
                if not self._stopping:
                    self._signal_all(signal.SIGKILL)
                await asyncio.wait(exits)
        finally:
            self._signal_all(signal.SIGKILL)
            self.vectors.clear()
            if self._writer is not None:
                self._writer.close()
            life.rendezvous.close()
        if self._stopping:
            return
        if hangs:
            died = silent(self._ranks[0], self._silence.seconds)
        else:
            now, limit_s = asyncio.get_running_loop().time(), self.settings.collective_s
            stood_s = self._absence.within(limit_s, now)
            died = obituary(self._ranks, ended, self._failed, life.oom_kills, limit_s, stood_s)
            if self.crew is not None:
                stood_s = self._absence.within(SILENT_S, now)
                died = among_hosts(self.crew, died, self._ranks[died.rank], stood_s)
        self._events.put_nowait(died)

    async def _hangs(self) -> None:
        """Ends once rank 0 is taken to hang; tells of it long before."""
        while not self._silence.waited(LOOK_S):
            self._absence.look(asyncio.get_running_loop().time())
            if (word := self._silence.word()) is not None:
                self._events.put_nowait(word)
            await asyncio.sleep(LOOK_S)

    def _watch(self) -> Silence:
        settings = self.settings
        waits = by_gradients(settings.manifest) or by_outer_steps(settings.manifest)
        return Silence(math.inf if waits else settings.wait_s, settings.compile)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Queue what rank 0 reports, until it closes the channel or breaks its rules."""
        unframer = Unframer()
        try:
            while data := await reader.read(READ_BYTES):
                for raw in unframer.feed(data):
                    self._take(decode_any(raw, *REPORTS))
        except Malformed as error:
            self._failed = Failed("", f"rank 0 sent what is no report: {error}")
        except ConnectionError:
            return  # as good as its end

    def _take(self, report: Report) -> None:
        self._silence.came(report)
        if isinstance(report, Failed):
            self._failed = report  # becomes part of TrainerDied
            return
        if isinstance(report, Ready):
            self._ready = True
            if self.crew is not None:
                self.crew.met()
        if isinstance(report, StepDone) and self._events.qsize() >= MAX_QUEUED:
            return
        self._events.put_nowait(report)

    def _signal_all(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            rank.signal(number)
