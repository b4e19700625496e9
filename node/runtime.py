"""The composition root: everything a running node consists of is made and wired here.

One :class:`asyncio.TaskGroup` owns all tasks. Reading :meth:`Daemon.main` from top to bottom is
reading what ``node start`` does: open the port, find or make the run, get the state, train, and
leave so that nobody notices.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

from bootstrap.dht import Dht
from bootstrap.handshake import OPEN_TO_STRANGERS, Clocks, Gate, anyone, shared_token
from bootstrap.manifest import Manifest
from bootstrap.probe import ProbeServer
from bootstrap.seeds import PeerCache
from node import __version__, clock, places
from node.closing import last_words, newest_round
from node.config import NodeConfig
from node.entrance import Entrance, Run
from node.hardware import leave_cores_to_ranks
from node.interrupts import EXIT_INTERRUPTED, SCRIPT_GONE
from node.monitor.alarms import Watch
from node.monitor.api import ApiServer, make_app
from node.monitor.console import Console
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, PeerRefused, Started, Stopping
from node.monitor.gpus import Gpus
from node.monitor.history import History
from node.monitor.machine import Machine
from node.monitor.sinks import Sinks, open_sink, told
from node.monitor.state import NodeState
from node.monitor.views import NodeView, RunView
from node.outbound import Outbound
from node.own_address import OwnPlace, hostport, outward_address
from node.setting_values import host_port, is_loopback
from node.statedir import StateDir
from protocols.errors import OperatorError
from protocols.http import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.tasks import Tasks, offload_to
from protocols.whereabouts import Whereabouts

if TYPE_CHECKING:
    from node.participation import Participation
    from node.script.attached import Script

MAX_TURNED_AWAY = 1024  # peers


def run(config: NodeConfig, manifest: Manifest | None, script: Script | None = None) -> int:
    """Run a node until it is stopped or the run is over; the process's exit status.

    ``script``: the training script that has started it and trains in the place of ranks.
    """
    return asyncio.run(Daemon(config, manifest, script).main())


class Daemon:
    """One node, from start to end."""

    def __init__(
        self, config: NodeConfig, manifest: Manifest | None, script: Script | None = None
    ) -> None:
        self.config, self.manifest, self.script = config, manifest, script
        self.home = StateDir(config.dir)
        self.stop_reason: asyncio.Future[str]
        self.run_id = b""
        self.started = time.time()
        self.dashboard_key = ""

    async def main(self) -> int:
        """Run until stopped; exit status 0, or OperatorError for the operator."""
        loop = asyncio.get_running_loop()
        self.stop_reason = loop.create_future()
        self.home.lock()
        places.note(self.home.root)
        async with AsyncExitStack() as stack:
            stack.callback(self.home.unlock)
            stack.enter_context(self.home.logging())
            events = EventLog(self.home.events)
            stack.callback(events.close)
            self.dashboard_key = self._dashboard_key()
            console = Console(
                sys.stdout,
                as_json=self.config.json_log,
                dashboard_key=self.printed_key(sys.stdout),
            )
            events.subscribe(console)
            if self.config.sink:
                sinks = Sinks({text: open_sink(text) for text in self.config.sink}, told(events))
                events.subscribe(sinks)
                stack.push_async_callback(sinks.aclose)
            leave_cores_to_ranks(self.config)
            pool = ThreadPoolExecutor(2, thread_name_prefix="atoll")
            # beside the event loop, which still has to hear a second Ctrl-C
            stack.push_async_callback(asyncio.to_thread, pool.shutdown, cancel_futures=True)
            self._catch_signals(loop, events)
            new_key = not self.config.identity_path.exists()
            identity = Identity.load_or_create(self.config.identity_path)
            transport = await self._open_transport(identity, events)
            stack.push_async_callback(transport.aclose)
            async with asyncio.TaskGroup() as group:
                tasks = Tasks(group)
                try:
                    node = Node(self, events, identity, new_key, transport, tasks, offload_to(pool))
                    await node.live(stack)
                finally:
                    tasks.cancel()
            self.home.check_there()
        return 0

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
        """The dashboard's key where a person looks at ``out``: a journal or a pipe keeps it."""
        return self.dashboard_key if out.isatty() else ""

    def where_key_is(self) -> str:
        """In words, for a log that must not have the key itself."""
        return "the one of --api-key" if self.config.api_key else f"in {self.home.key_file}"

    async def _open_transport(self, identity: Identity, events: EventLog) -> HttpTransport:
        """Open the port; where nobody asked for this one and it is taken, any free one."""
        limit = self.config.max_upload or None
        transport = HttpTransport(identity, listen=self.config.listen, max_upload=limit)
        try:
            await transport.start()
        except OperatorError as error:
            if error.code != "E303" or not self.config.is_default("listen"):
                raise
            host, taken = host_port(self.config.listen)
            where = hostport(host, 0)
            transport = HttpTransport(identity, listen=where, max_upload=limit)
            await transport.start()
            assert transport.listening is not None
            port = transport.listening[1]
            text = f"port {taken} is in use: listens on {port}, the one to forward this time"
            events.emit(Notice(text=f"{text}; --listen gives one that stays"))
        return transport

    def _catch_signals(self, loop: asyncio.AbstractEventLoop, events: EventLog) -> None:
        """Once: leave cleanly. Twice: end at once; the trainer ranks die with this process.

        A terminal that is closed, which says so once and its shell once more, is a first time.
        """

        def on_signal(name: str) -> None:
            if self.stop_reason.done():
                if name == "SIGHUP":
                    return
                self.home.withdraw_api()
                os._exit(EXIT_INTERRUPTED)
            reason = SCRIPT_GONE if self.script is not None and name == "SIGHUP" else name
            events.emit(Stopping(reason=reason))
            self.stop(reason)

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # under nohup
            loop.add_signal_handler(number, on_signal, number.name)


class Node:
    """The parts of a node that talk to others; lives inside the daemon's task group."""

    def __init__(
        self,
        daemon: Daemon,
        events: EventLog,
        identity: Identity,
        new_key: bool,
        transport: HttpTransport,
        tasks: Tasks,
        offload: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self.daemon, self.config, self.home = daemon, daemon.config, daemon.home
        self.events, self.identity, self.new_key = events, identity, new_key
        self.transport, self.tasks, self.offload = transport, tasks, offload
        self.whereabouts = Whereabouts(transport, identity, transport.book)
        self.outbound = Outbound(transport, events, tasks.spawn)
        self.place = OwnPlace(self.config, transport, self.outbound, self.whereabouts)
        transport.relay.offer(self.config.relay)
        transport.relay.may_wait = self._known
        self.cache = PeerCache(self.home.root / "peers.json")
        self.clocks = Clocks()
        self.announced: Callable[[], Sequence[bytes]] = tuple
        self.said_started = False
        self._turned_away: set[PeerId] = set()
        self.brought: asyncio.Queue[tuple[PeerId, bytes]] = asyncio.Queue()  # runs, to a seed
        self.gate = Gate(
            transport,
            self.whereabouts,
            software=__version__,
            run=lambda: daemon.run_id,
            admits=shared_token(self.config.invitation) if self.config.invitation else anyone,
            announces=lambda: tuple(self.announced()),  # as it is then
            observed=transport.observed,
            brought=self._on_brought,
            refused=self._on_refused,
            clock=clock.wall,
        )
        ProbeServer(transport)
        self.is_member: Callable[[PeerId], bool] = lambda peer: False
        transport.admit(self._admits)
        self.state = NodeState(self._view(), log=events)
        self.state.providers.strangers = self._strangers
        self.state.providers.machine = Machine(self.home.root, Gpus())
        self.state.providers.reachability = self.outbound.describe
        self.history = History(self.home.history)
        events.subscribe(self.history)
        self.api = ApiServer(
            make_app(self.state, events, self.history, key=self.config.api_key),
            self.config.api,
            may_move=self.config.is_default("api"),
        )
        self.dashboard: ApiServer | None = None
        if shown := self.config.dashboard:
            app = make_app(
                self.state,
                events,
                self.history,
                key=daemon.dashboard_key,
                host=host_port(shown)[0],
            )
            self.dashboard = ApiServer(app, shown, option="--dashboard")

    def _admits(self, peer: PeerId, name: str) -> bool:
        """Whether a peer may ask for ``name``: strangers may find this node and greet it."""
        if not self.config.invitation or name in OPEN_TO_STRANGERS:
            return True
        return self._known(peer)

    def _known(self, peer: PeerId) -> bool:
        return self.gate.admitted(peer) or self.is_member(peer)

    def _on_brought(self, peer: PeerId, run: bytes) -> None:
        """A seed takes part in the first run that it hears of."""
        if self.config.role == "seed":
            self.daemon.run_id = run  # whoever comes from now on is told of it
            self.brought.put_nowait((peer, run))

    def leave(self, reason: str) -> None:
        """Ask for a clean end, and say why."""
        if not self.daemon.stop_reason.done():
            self.events.emit(Stopping(reason=reason))
            self.daemon.stop(reason)

    def _on_refused(self, peer: PeerId, code: str) -> None:
        """Say once of each peer that it was not let in; a flood of new ones is not written down."""
        if peer not in self._turned_away and len(self._turned_away) < MAX_TURNED_AWAY:
            self._turned_away.add(peer)
            self.events.emit(PeerRefused(peer=peer, code=code))

    def _strangers(self) -> dict[str, int]:
        """Connections and requests that came to nothing."""
        stats = self.transport.stats
        return {
            "garbage": stats.garbage_connections,
            "handshake": stats.refused_handshakes,
            "limit": stats.capped_connections,
            "request": stats.refused_requests,
        }

    async def live(self, stack: AsyncExitStack) -> None:
        """From opening the API to having left the swarm."""
        # torch takes seconds: beside the event loop, as peers may greet this node already
        await self.offload(lambda: import_module("node.participation"))
        from node.leaving import leave
        from node.participation import Participation

        self.place.publish()
        await self.api.start()
        stack.push_async_callback(self.api.aclose)
        self.home.publish_api(self.api.address, self.config.api_key)
        stack.callback(self.home.withdraw_api)
        if self.dashboard is not None:
            await self.dashboard.start()
            stack.push_async_callback(self.dashboard.aclose)
        entrance = Entrance(
            self.config,
            self.transport,
            self.whereabouts,
            self.cache,
            self.clocks,
            self.events,
            self.outbound,
        )
        participation = Participation(self, entrance)
        self.tasks.spawn(Watch(self.state.alarms_now, self.events).run())
        if self.config.seconds:
            self.tasks.spawn(self._stop_after(self.config.seconds))
        entering = self.tasks.spawn(participation.enter(stack))
        stopping = self.tasks.spawn(self.daemon.until_stopped())
        await asyncio.wait((entering, stopping), return_when=asyncio.FIRST_COMPLETED)
        if entering.done():  # else stopped on the way in: there is nothing to save
            await entering
            await stopping
            await leave(participation, stack)
        self._say_ended(participation if entering.done() else None)

    def _say_ended(self, took_part: Participation | None) -> None:
        saved = newest_round(self.home.checkpoints) if self.config.role == "island" else None
        text = last_words(
            self.daemon.stop_reason.result(),
            rounds=took_part.reporter.round if took_part is not None else None,
            over=took_part is not None and took_part.finishing,
            home=self.home.root if saved is not None else None,
            saved=saved,
            script=self.daemon.script is not None,
        )
        self.events.emit(Notice(text=text))

    async def _stop_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.daemon.stop(f"{seconds:g} s are over")

    async def open_directory(self, stack: AsyncExitStack, run: Run) -> Dht:
        """Join the run's DHT and publish this node's address in it."""
        dht = await Dht.start(
            self.transport,
            self.whereabouts,
            run.peers,
            run.signed.run_id,
            client_mode=self.outbound.needed,
        )
        stack.push_async_callback(dht.aclose)
        self.tasks.spawn(dht.maintain())
        dht.keep_announced()
        return dht

    def welcome_others(self, run: Run) -> None:
        """From here on this node introduces others to the run; says how they can join."""
        self.daemon.run_id = run.signed.run_id
        manifest = run.manifest
        self.history.begin(run.signed.run_id.hex())
        self.state.run = RunView(
            id=run.signed.run_id.hex(),
            label=manifest.label,
            total_rounds=manifest.rounds.total_rounds,
            manifest=manifest.model_dump(mode="json"),
        )

    def say_started(self, label: str, device: str) -> None:
        """The start-up block, once; ``label`` is the run's, empty while there is none."""
        if self.said_started:
            return
        self.said_started = True
        join_address = self.place.join_address()
        self.state.node = replace(self.state.node, device=device, join_address=join_address)
        self.events.emit(
            Started(
                peer=self.identity.peer_id,
                run=label,
                version=__version__,
                role=self.config.role,
                device=device,
                identity_new=self.new_key,
                listen=self.place.listening(),
                api=self.api.address,
                dashboard=_reachable(self.dashboard.address) if self.dashboard else "",
                join_address=join_address,
                invitation_needed=bool(self.config.invitation),
                scripts=self.state.run is not None
                and bool(self.state.run.manifest["script"]["layout"]),
            )
        )
        if self.daemon.dashboard_key and not self.daemon.printed_key(sys.stdout):
            self.events.emit(Notice(text=f"the dashboard's key is {self.daemon.where_key_is()}"))

    def _view(self) -> NodeView:
        return NodeView(
            peer=self.identity.peer_id,
            role=self.config.role,
            name=self.config.name,
            region=self.config.region,
            version=__version__,
            device=self.config.device,
            listen=self.place.listening(),
            public_addr=self.config.public_addr,
            join_address=self.place.join_address(),
            invitation_needed=bool(self.config.invitation),
            pid=os.getpid(),
            started=self.daemon.started,
        )


def _reachable(address: str) -> str:
    """``HOST:PORT`` of a listener as others would type it."""
    host, port = host_port(address)
    return hostport(outward_address() if host in ("0.0.0.0", "::") else host, port)
