"""The daemon's process: its log, its directory, its signals, its port, and one group of all tasks.

What runs in it is :class:`node.runtime.Node`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, TextIO

from bootstrap.manifest import Manifest
from node import clock, directories, open_files
from node.checkpoints.under_way import forget_drafts
from node.closing import newest_round
from node.config import NodeConfig
from node.interrupts import EXIT_INTERRUPTED, SCRIPT_GONE, catch
from node.island.hardware import leave_cores_to_ranks
from node.monitor.console import AT_ONCE_S, Console
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Stopping
from node.monitor.processors import usable_cores
from node.monitor.sinks import Sinks, open_sink, told
from node.runtime import Node
from node.setting_values import host_port
from node.statedir import StateDir
from protocols.addresses import hostport, is_loopback
from protocols.connections.listening import EVERY_IPV4
from protocols.errors import OperatorError
from protocols.http.transport import HttpTransport
from protocols.identity import Identity
from protocols.limits import Limits
from protocols.tasks import Tasks, offload_to

if TYPE_CHECKING:
    from node.script.attached import Script


def run(config: NodeConfig, manifest: Manifest | None, script: Script | None = None) -> int:
    """Run a node until it is stopped or the run is over; the process's exit status.

    ``script``: the training script that has started it and trains in the place of ranks.
    """
    return asyncio.run(Daemon(config, manifest, script).main())


def _lacks(path: os.PathLike[str]) -> bool:
    return not os.path.exists(path)  # a Path's raises for a name that is too long


class Daemon:
    """One node, from start to end."""

    def __init__(
        self, config: NodeConfig, manifest: Manifest | None, script: Script | None = None
    ) -> None:
        self.config, self.manifest, self.script = config, manifest, script
        self.home = StateDir(config.dir)
        self.stop_reason: asyncio.Future[str]
        self.run_id = b""
        self.started = clock.wall()
        self.dashboard_key = ""

    async def main(self) -> int:
        """Run until stopped; exit status 0, or OperatorError for the operator."""
        loop = asyncio.get_running_loop()
        self.stop_reason = loop.create_future()
        self.home.lock()
        directories.note(self.home.root)
        async with AsyncExitStack() as stack:
            stack.callback(self.home.unlock)
            stack.enter_context(self.home.logging())
            events = EventLog(self.home.events, clock=clock.wall)
            stack.callback(events.close)
            self.dashboard_key = self._dashboard_key()
            console = Console(
                sys.stdout,
                as_json=self.config.json_log,
                dashboard_key=self.printed_key(sys.stdout),
            )
            events.subscribe(console)
            stack.push_async_callback(asyncio.to_thread, console.finish)
            if self.config.sink:
                sinks = Sinks({text: open_sink(text) for text in self.config.sink}, told(events))
                events.subscribe(sinks)
                stack.push_async_callback(sinks.aclose)
            leave_cores_to_ranks(self.config)
            pool = ThreadPoolExecutor(2, thread_name_prefix="atoll")
            # a large model's checkpoint takes minutes: no round may wait behind it
            files = ThreadPoolExecutor(3, thread_name_prefix="atoll-files")
            for each in (pool, files):  # beside the event loop, which has to hear a second Ctrl-C
                stack.push_async_callback(asyncio.to_thread, each.shutdown, cancel_futures=True)
            self._catch_signals(loop, events, console)
            new_key = _lacks(self.config.identity_path)
            identity = Identity.load_or_create(self.config.identity_path)
            transport = await self._open_transport(identity, events)
            stack.push_async_callback(transport.aclose)
            async with asyncio.TaskGroup() as group:
                tasks = Tasks(group)
                try:
                    if self.script is not None:
                        tasks.spawn(self.script.beat())
                    beside = offload_to(pool), offload_to(files)
                    node = Node(self, events, identity, new_key, transport, tasks, *beside)
                    await node.live(stack)
                finally:
                    tasks.cancel()
            self.home.check_there()
        return 0

    def _ended_at_once(self) -> str:
        """Says that it ended at once, and the newest checkpoint there is to go on from."""
        saved = newest_round(self.home.checkpoints)
        rest = f"; the newest checkpoint is of round {saved}" if saved is not None else ""
        return f"ended at once{rest}"

    def stop(self, reason: str) -> None:
        """Ask for a clean end; the first reason counts."""
        if not self.stop_reason.done():
            self.stop_reason.set_result(reason)

    async def until_stopped(self) -> None:
        """Return when somebody has asked for the end."""
        await asyncio.shield(self.stop_reason)

    def _dashboard_key(self) -> str:
        """What others need to see the dashboard; empty where only this machine can reach it."""
        shown = self.config.dashboard
        if not shown or (not self.config.api_key and is_loopback(host_port(shown)[0])):
            return ""
        return self.config.api_key or self.home.dashboard_key()

    def printed_key(self, out: TextIO) -> str:
        """The dashboard's key for a terminal; empty for a journal or pipe, which would keep it."""
        return self.dashboard_key if out.isatty() else ""

    def where_key_is(self) -> str:
        """In words, for a log that must not have the key itself."""
        return "the one of --api-key" if self.config.api_key else f"in {self.home.key_file}"

    async def _open_transport(self, identity: Identity, events: EventLog) -> HttpTransport:
        """Open the port; if it is taken and only the default, any free one."""
        limit = self.config.max_upload or None
        limits = Limits().within(open_files.raise_limit())
        cores = usable_cores()
        opened = partial(HttpTransport, identity, limits=limits, max_upload=limit, cores=cores)
        transport = opened(listen=self.config.listen)
        host, taken = host_port(self.config.listen)
        try:
            await transport.start()
        except OperatorError as error:
            if error.code != "E303" or not self.config.is_default("listen"):
                raise
            transport = opened(listen=hostport(host, 0))
            await transport.start()
            assert transport.listening is not None
            port = transport.listening[1]
            text = f"port {taken} is in use: listens on {port}, the one to forward this time"
            events.emit(Notice(text=f"{text}; --listen gives one that stays"))
        if transport.listening is not None and transport.listening[0] == EVERY_IPV4 != host:
            text = f"listens for peers on all addresses, not on {host} alone"
            events.emit(Notice(text=f"{text}: that name is loopback here"))
        return transport

    def _catch_signals(
        self, loop: asyncio.AbstractEventLoop, events: EventLog, console: Console
    ) -> None:
        """Once: leave cleanly. Twice: end at once; the trainer ranks die with this process.

        A terminal that is closed sends SIGHUP, and its shell another: together they count once. So
        does a signal with its echo. The first to a node that already leaves by itself, as its run
        is over, counts as once.
        """
        asked = False

        def on_signal(name: str) -> None:
            nonlocal asked
            leaves, twice = self.stop_reason.done(), asked
            if leaves and name == "SIGHUP":
                return
            asked = True
            if twice:
                try:
                    events.emit(Notice(text=f"{name} again: {self._ended_at_once()}"))
                finally:
                    self.home.withdraw_api()
                    forget_drafts(self.home.checkpoints)
                    console.finish(AT_ONCE_S)
                    os._exit(EXIT_INTERRUPTED)
            elif leaves:
                text = f"{name}: is leaving already, as {self.stop_reason.result()}"
                events.emit(Notice(text=f"{text} (once more ends it at once)"))
            else:
                reason = SCRIPT_GONE if self.script is not None and name == "SIGHUP" else name
                events.emit(Stopping(reason=reason))
                self.stop(reason)

        catch(loop, on_signal)
