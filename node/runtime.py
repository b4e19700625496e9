"""Whatever of a node talks to others, made and wired in one place.

Reading :meth:`Node.live` from top to bottom is reading what ``node start`` does once its port is
open: find or make the run, get the state, train, and leave so that nobody notices.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bootstrap.dht import Dht
from bootstrap.handshake import OPEN_TO_STRANGERS, Clocks, Gate, anyone, shared_token
from bootstrap.manifest import Manifest
from bootstrap.manifest_form import READING
from bootstrap.probe import ProbeServer
from bootstrap.seeds import PeerCache
from node import __version__, clock
from node.closing import last_words, newest_round
from node.entry.brought import Brought, place_of
from node.entry.entrance import Entrance, Run
from node.entry.outbound import Outbound
from node.entry.own_address import OwnPlace, outward_address
from node.entry.port_mapping import PortMapping
from node.entry.timekeeping import Timekeeper
from node.monitor.alarm_watch import Watch
from node.monitor.api import ApiServer, make_app
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, PeerRefused, Started, Stopping
from node.monitor.gpus import Gpus
from node.monitor.history import History
from node.monitor.machine import Machine
from node.monitor.state import NodeState
from node.monitor.views import NodeView, RunView
from node.setting_values import host_port
from protocols.addresses import hostport
from protocols.errors import reason
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.tasks import Offload, Tasks
from protocols.whereabouts import Whereabouts

if TYPE_CHECKING:
    from node.daemon import Daemon
    from node.participation import Participation

MAX_TURNED_AWAY = 1024  # peers


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
        offload: Offload,
        offload_files: Offload,
    ) -> None:
        """``offload`` is for what rounds wait for, ``offload_files`` for what may take minutes."""
        self.daemon, self.config, self.home = daemon, daemon.config, daemon.home
        self.events, self.identity, self.new_key = events, identity, new_key
        self.transport, self.tasks = transport, tasks
        self.offload, self.offload_files = offload, offload_files
        self.whereabouts = Whereabouts(
            transport,
            identity,
            transport.book,
            clock=clock.wall,
            number=self.home.incarnation,
        )
        self.outbound = Outbound(transport, events, tasks.spawn)
        self.place = OwnPlace(self.config, transport, self.outbound, self.whereabouts)
        transport.relay.offer(self.config.relay)
        transport.relay.may_wait = self._known
        self.cache = PeerCache(self.home.root / "peers.json")
        self.clocks = Clocks()
        self.timekeeper = Timekeeper(clock.wall, self.clocks, events)
        self.announced: Callable[[], Sequence[bytes]] = tuple
        self.said_started = False
        self._turned_away: set[PeerId] = set()
        self.brought = Brought(lambda peer: place_of(peer, transport.observed(peer)))  # to a seed
        self.gate = Gate(
            transport,
            self.whereabouts,
            software=__version__,
            run=lambda: daemon.run_id,
            admits=shared_token(self.config.invitation) if self.config.invitation else anyone,
            announces=lambda: tuple(self.announced()),  # at the time of the call
            observed=self._observed,
            brought=self._on_brought,
            refused=self._on_refused,
            clock=clock.wall,
        )
        ProbeServer(transport)
        self.is_member: Callable[[PeerId], bool] = lambda peer: False
        self.whereabouts.is_member = self._in_swarm
        transport.admit(self._admits)
        self.state = NodeState(self._view(), log=events, clock=clock.wall)
        self._provide()
        self.history = History(
            self.home.history, me=self.state.node.peer, failed=self._on_history_lost
        )
        events.subscribe(self.history)
        self.api = self._served(
            self.config.api, self.config.api_key, may_move=self.config.is_default("api")
        )
        self.dashboard: ApiServer | None = None
        if shown := self.config.dashboard:
            self.dashboard = self._served(shown, daemon.dashboard_key, option="--dashboard")

    def _provide(self) -> None:
        """Tell the state where it finds what it has not from events."""
        providers, transport = self.state.providers, self.transport
        providers.strangers = self._strangers
        providers.met = lambda: transport.relays.met
        providers.accepted = lambda: transport.stats.connections
        providers.stalled = lambda: transport.stats.stalled_bodies
        providers.machine = Machine(self.home.root, Gpus())
        providers.reachability = self.outbound.describe

    def _served(self, where: str, key: str, **options: Any) -> ApiServer:
        """A listener at ``where``; ``options`` are those of :class:`ApiServer`."""
        host = host_port(where)[0]
        app = make_app(self.state, self.events, self.history, key=key, host=host)
        return ApiServer(app, where, **options)

    def _on_history_lost(self, error: OSError) -> None:
        """Say so after the event that was not written: other subscribers have yet to get it."""
        text = f"{self.home.history.name} lacks rounds, and charts after a restart: {reason(error)}"
        asyncio.get_running_loop().call_soon(self.events.emit, Notice(text=text))

    def _admits(self, peer: PeerId, name: str) -> bool:
        """Whether a peer may ask for ``name``: strangers may find this node and greet it."""
        if not self.config.invitation or name in OPEN_TO_STRANGERS:
            return True
        return self._known(peer)

    def _known(self, peer: PeerId) -> bool:
        return self.gate.admitted(peer) or self._in_swarm(peer)

    def _in_swarm(self, peer: PeerId) -> bool:
        return self.is_member(peer)  # which is known once there is a run

    def _observed(self, peer: PeerId) -> str:
        """The address a peer connects from; empty where that may be its relay's."""
        return "" if self.outbound.needed else self.transport.observed(peer)

    def _on_brought(self, peer: PeerId, run: bytes) -> None:
        """A seed takes part in the first run that it is handed over."""
        if self.config.role == "seed":
            self.brought.add(peer, run)

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
        """Counts of connections and requests that were refused or failed."""
        stats = self.transport.stats
        return {
            "garbage": stats.garbage_connections,
            "handshake": stats.refused_handshakes,
            "limit": stats.capped_connections,
            "request": stats.refused_requests,
        }

    async def live(self, stack: AsyncExitStack) -> None:
        """From opening the API to having left the swarm.

        Raises at its very end what kept the last checkpoint from being made.
        """
        # torch takes seconds: beside the event loop, as peers may greet this node already
        await self.offload(lambda: import_module("node.participation"))
        from node.leaving import leave
        from node.participation import Participation

        if self.config.map_port:
            await self._map_port(stack)
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
            self.transport.own_end,
            self.place,
        )
        participation = Participation(self, entrance)
        self.timekeeper.greet = lambda peer: entrance.measure(peer, self.daemon.run_id)
        self.tasks.spawn(self.timekeeper.run())
        self.tasks.spawn(Watch(self.state.alarms_now, self.events, self.state.peers).run())
        if self.config.seconds:
            self.tasks.spawn(self._stop_after(self.config.seconds))
        entering = self.tasks.spawn(participation.enter(stack))
        stopping = self.tasks.spawn(self.daemon.until_stopped())
        await asyncio.wait((entering, stopping), return_when=asyncio.FIRST_COMPLETED)
        if entering.done():  # else stopped on the way in: there is nothing to save
            await entering
            await stopping
            unsaved = await leave(participation, stack)
            self._say_ended(participation)
            if unsaved is not None:
                raise unsaved
        else:
            self._say_ended(None)

    async def _map_port(self, stack: AsyncExitStack) -> None:
        assert self.transport.listening is not None
        mapping = PortMapping(self.events)
        stack.push_async_callback(mapping.aclose)
        await mapping.open(self.transport.listening[1])
        self.place.mapped = lambda: mapping.outer
        self.place.map_again = mapping.renew
        self.tasks.spawn(mapping.keep())

    def _say_ended(self, took_part: Participation | None) -> None:
        saved = newest_round(self.home.checkpoints) if self.config.role == "island" else None
        over = took_part is not None and took_part.finishing
        text = last_words(
            self.daemon.stop_reason.result(),
            rounds=took_part.reporter.round if took_part is not None else None,
            over=over,
            home=self.home.root if saved is not None else None,
            saved=saved,
            script=self.daemon.script is not None,
            again=self._flags_again() if over and saved is not None else None,
        )
        self.events.emit(Notice(text=text))

    def _flags_again(self) -> list[str] | None:
        from node.again import flags_again
        from node.reading import NOTE, TokensNote

        if (run := self.state.run) is None:
            return None
        place = TokensNote.of(self.home.root / NOTE, run.id).place
        return flags_again(Manifest.model_validate(run.manifest, context=READING), place)

    async def _stop_after(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.leave(f"{seconds:g} s are over")

    async def open_directory(self, stack: AsyncExitStack, run: Run) -> Dht:
        """Join the run's DHT and publish this node's address in it."""
        dht = await Dht.start(
            self.transport,
            self.whereabouts,
            run.peers,
            run.signed.run_id,
            client_mode=self.outbound.needed,
            clock=clock.wall,
        )
        stack.push_async_callback(dht.aclose)
        self.tasks.spawn(dht.maintain())
        dht.keep_announced()
        return dht

    async def welcome_others(self, run: Run) -> None:
        """From here on this node introduces others to the run; says how they can join."""
        self.daemon.run_id = run.signed.run_id
        manifest = run.manifest
        await self.history.load(run.signed.run_id.hex(), self.offload_files)
        self.state.rounds.remember(self.history.lowest())
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
        run = self.state.run
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
                public_addr=self.config.public_addr,
                api=self.api.address,
                dashboard=_reachable(self.dashboard.address) if self.dashboard else "",
                join_address=join_address,
                invitation_needed=bool(self.config.invitation),
                scripts=run is not None and bool(run.manifest["script"]["layout"]),
                own_text=run is not None and run.manifest["data"]["recipe"] == "text",
                total_rounds=run.total_rounds if run is not None else 0,
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
