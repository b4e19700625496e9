"""A node's part in a run: the state, the trainer and the swarm around them, until it leaves."""

from __future__ import annotations

import asyncio
import contextlib
import os
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

from bootstrap.manifest import Manifest
from bootstrap.state import StateServer
from gossip.catchup.replay import Ending
from gossip.chain.swarm import Swarm
from gossip.common import AnySwarm
from gossip.exchange.exchange import Exchange
from gossip.hooks import Hooks
from gossip.membership.members import MEMBERS
from gossip.pairs.rounded import Rounded
from gossip.rounds.gathering import Gathering
from node.assembly import Workplace, make_conductor, make_reports, make_swarm
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.copying import Copying
from node.checkpoints.index import bytes_in
from node.checkpoints.restoring import Restored, restore
from node.checkpoints.saving import Keeper
from node.collector import spare_what_stays
from node.conductor import Conductor
from node.entry.donors import clean
from node.entry.entrance import Entrance, Run
from node.entry.fetching import Fetcher
from node.entry.finding import check_known
from node.entry.lookout import Lookout
from node.entry.past import LookingBack, tell_past
from node.entry.serving import serve_moments, serve_state
from node.entry.waiting import Gatherer, Waiting, gathering_of
from node.groundwork import Basis, Groundwork
from node.headway import counted
from node.hosts.crew import open_hub
from node.hosts.hub import Hub
from node.hosts.meeting import meeting
from node.island.hardware import Hardware, device_kind, hardware
from node.island.island import Island
from node.member import Origin
from node.modes import is_over
from node.monitor.events import JoinProgress, Notice
from node.multiples import Multiples
from node.replicas.replica import OuterReplica
from node.reports.attempts import given_up
from node.reports.links import own_speeds, tell_links
from node.reports.peers import PeerReports
from node.trainer.channel import Applied
from protocols.codecs import kernels
from protocols.errors import OperatorError, RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Announce, Certificate, Plan

if TYPE_CHECKING:
    from node.runtime import Node
    from node.trainer.layout import Outline


WORTH_TELLING = 10**9  # bytes of a checkpoint: a smaller one is read too soon to say so


class Participation:
    """Enters a run and takes part until told to stop; :mod:`node.leaving` is what comes then."""

    def __init__(self, node: Node, entrance: Entrance) -> None:
        self.node, self.entrance = node, entrance
        self.config, self.events = node.config, node.events
        self.hub: Hub | None = None  # this island's other hosts
        self.conductor: Conductor | None = None
        self.finishing = False
        self.failed: OperatorError | None = None  # why its trainer could not be kept alive
        self.news = asyncio.Event()  # somebody announced something
        self._layout: Outline  # of the run
        self.swarm: AnySwarm
        self.replicas: tuple[OuterReplica, ...]  # by fragment
        self.states: StateServer
        self.fetcher: Fetcher
        self.gathering: Gathering
        self.keeper: Keeper
        self._saves: Multiples  # rounds after which there is a checkpoint
        self.reporter: PeerReports
        self.lookout: Lookout

    @property
    def island(self) -> Island | None:
        """The trainer's ranks, where this node trains."""
        return self.conductor.island if self.conductor is not None else None

    @property
    def _newcomer(self) -> bool:
        """Whether others have yet to let this island take part; a seed only follows."""
        return self.fetcher.joined_under_way and self.config.role in MEMBERS

    # --- entering --------------------------------------------------------------------------------

    async def enter(self, stack: AsyncExitStack) -> None:
        """Find or make the run, get the state, start to take part."""
        if self.config.role == "island" and self.node.daemon.script is None:
            device, _ = self._hardware()
            leaving = self.node.daemon.stop_reason.done
            self.hub = await open_hub(self.config, device, self._notice, leaving, stack)
        if self.config.role == "island" and (copy := self._copy) is not None:
            await self.node.offload(copy.check)
        store = CheckpointStore(self.node.home.checkpoints, self.config.keep_checkpoints)
        if not self.config.resume:
            store.begin_anew()
        restored = await self._restored(store)
        ground = Groundwork(self.node, self.entrance, store, self.hub, self._on_learned)
        basis = await ground.lay(restored)
        stack.callback(basis.vectors.close)
        await self.node.offload(kernels.load)  # else the data thread waits for it, and all lanes do
        self._assemble(store, restored, basis)
        run = basis.run
        await self._keep_start(run)
        self._serve(stack, run)
        await self._start(stack, run)

    async def _restored(self, store: CheckpointStore) -> Restored | None:
        """The checkpoint that --resume goes on from. Raises E104, E404."""
        if not self.config.resume:
            return None
        for newest in store.paths()[:1]:
            with contextlib.suppress(OSError):  # restoring it says what is wrong
                if (size := bytes_in(newest)) >= WORTH_TELLING:
                    self._notice(f"reads {newest.name}, {size / 1e9:.1f} GB, and checks its hashes")
        restored: Restored | None = await self.node.offload(
            lambda: restore(store, self.events, self._copy)
        )
        if restored is not None:
            check_known(self.node, restored)
        return restored

    def _assemble(self, store: CheckpointStore, restored: Restored | None, basis: Basis) -> None:
        """Make swarm, checkpoints, trainer and reports around the state."""
        run, self._layout = basis.run, basis.layout
        self.replicas, self.fetcher = basis.replicas, basis.fetcher
        store.ahead = self.fetcher.ahead
        self.gathering = gathering_of(
            self.config.wait_for, self.replicas[0], restored=restored, events=self.events
        )
        self.swarm = make_swarm(
            self.node,
            run.manifest,
            self.replicas,
            Hooks(
                applied=self._on_committed,
                moved=self._on_moved,
                peer=self._on_peer,
                rejected=self._on_rejected,
                notice=self._notice,
                gave_up=self._on_given_up,
                behind=self._on_behind,
                learned=self._on_announced,
            ),
            lambda rounded: self._on_committed(rounded, None),
            Origin(
                self._newcomer,
                self.node.new_key,
                self.fetcher.lineages,
                self.fetcher.took,
                self.gathering,
            ),
        )
        self._saves = Multiples(self.config.checkpoint_every, self.replicas[0].place.round)
        self.keeper = Keeper(
            store,
            run.signed,
            self.replicas,
            None,
            self.events,
            self.swarm.still,
            self.node.offload_files,
            lambda: [chain.lineage for chain in self.swarm.chains],
            self._copying(store),
            self.node.daemon.stop_reason.done,
            restored.path if restored is not None else None,
            restored.facts.evaluated if restored is not None else None,
        )
        if self.config.role == "island":
            self.conductor = make_conductor(
                self.node,
                self.replicas,
                self.swarm,
                Workplace(basis.layout, basis.vectors, basis.tokens, self._hardware(), self.hub),
                restored,
                self.gathering,
                self._on_applied,
                joined=self.fetcher.joined_under_way if restored is None else restored.cold,
            )
            self.conductor.refresh = self.fetcher.refresher(self.swarm)
            self.keeper.conductor = self.conductor
            self.conductor.spare = self.keeper.moments
        self.reporter = make_reports(self.node, run.manifest, self.swarm, self.conductor)
        self.lookout = Lookout(
            self.node, self.entrance, self.swarm, self.replicas[0], self._on_rejected
        )
        self.node.state.parameters = self._layout.size

    async def _keep_start(self, run: Run) -> None:
        """Save what a script's run starts from, before others come and wait with it.

        It does not follow from the manifest: who is killed, and creates the run again, would have
        another start under the same run id, and none of those who wait could begin with it.
        """
        waits = run.created and self.gathering.on(self.replicas[0].place)
        if waits and self.node.daemon.script is not None and self.config.checkpoint_every:
            await self._save()

    @property
    def _copy(self) -> CheckpointCopy | None:
        url, keep = self.config.checkpoint_copy, self.config.keep_checkpoints
        return CheckpointCopy(url, keep) if url else None

    # --- the parts -------------------------------------------------------------------------------

    def _serve(self, stack: AsyncExitStack, run: Run) -> None:
        """Serve the state, an optimizer's moments and the known announcements to newcomers."""
        self.states = serve_state(self.node, run, self.swarm, self.replicas, self.keeper, stack)
        clean(self.node.home.root)
        if self.conductor is not None:
            serve_moments(self.node, run, self._layout, self.conductor, stack)
            wanted = self.config.moments == "donor"
            self.conductor.beginning.expects_moments = wanted and self.fetcher.downloaded
        self.node.announced = lambda: list(self.swarm.presence.known().announces)

    def _copying(self, store: CheckpointStore) -> Copying | None:
        if self._copy is None:
            return None
        copying = Copying(self._copy, store, self.events, self.node.offload_files)
        self.node.state.providers.copy_still = lambda: copying.still
        return copying

    async def _start(self, stack: AsyncExitStack, run: Run) -> None:
        for greeting in run.greetings:
            for envelope in greeting.welcome.announces:
                self.lookout.learn(envelope, greeting.peer)
        self.reporter.come()
        await self.node.welcome_others(run)
        self.node.state.status = "joining" if self._newcomer else "active"
        self.node.state.round = self.reporter.round
        spawn = self.node.tasks.spawn
        over = is_over(self.manifest, self.reporter.round, self.replicas[0].place.work)
        trains = not over or self.node.daemon.script is not None  # which is there, and is told
        if (conductor := self.conductor) is not None and trains:
            await conductor.island.start()
            stack.push_async_callback(conductor.island.stop)
            spawn(self._conduct(conductor))
            if conductor.beginning.expects_moments:
                spawn(self._take_moments(conductor))
        self.node.say_started(run.manifest.label, device_kind(self.config))
        self._check_end()  # a node that resumes or comes late may find the run over
        if self.fetcher.joined_under_way and not self.finishing:
            name, verb = ("train", "joins") if self.island is not None else ("follow", "follows")
            self.events.emit(
                JoinProgress(step=6, name=name, text=f"{verb} at round {self.reporter.round + 1}")
            )
            if self._newcomer and isinstance(self.swarm, Swarm):  # in pairs nobody lets it in
                chain, leave = self.swarm.chains[0], self.node.leave
                spawn(Waiting(chain, self.events, self.at_end, leave).run())
        if self.gathering.on(self.replicas[0].place) and isinstance(self.swarm, Swarm):
            self.node.state.status = "starting"
            spawn(Gatherer(self.swarm.chains[0], self.events).run())
        spare_what_stays()
        self.node.timekeeper.presence = self.swarm.presence
        spawn(self.swarm.run())
        tell_links(self.node.transport)
        tell_past(self.node.transport, self.node.history)
        spawn(self._look_back(run.peers, self.replicas[0].place.round))  # as rows count
        self.reporter.links.offsets.update({one.peer: one.offset for one in run.greetings})
        spawn(self.reporter.links.run())
        for peer in run.peers:  # ask who has come since our greeting, itself included
            spawn(self.swarm.presence.ask(peer))
        saves = self.island is not None and self.config.checkpoint_every
        if saves and self.config.checkpoint_seconds:
            spawn(self.keeper.by_time(self.config.checkpoint_seconds))
        spawn(self._be_found(stack, run))  # takes seconds, with work to save already

    async def _be_found(self, stack: AsyncExitStack, run: Run) -> None:
        """Join the run's DHT, and look there for others."""
        dht = await self.node.open_directory(stack, run)
        self.node.outbound.candidates = self.lookout.relays
        self.node.place.told = partial(self.lookout.moved, dht)
        self.lookout.moved(dht)
        self.node.tasks.spawn(self.lookout.run(dht))

    async def _take_moments(self, conductor: Conductor) -> None:
        await conductor.take(await self.fetcher.moments())

    async def _look_back(self, greeted: list[PeerId], before: int) -> None:
        node = self.node
        past = LookingBack(node.transport, node.history, node.offload_files, self.swarm, greeted)
        await past.run(before)

    # --- while it runs ---------------------------------------------------------------------------

    async def _conduct(self, conductor: Conductor) -> None:
        """Follow the trainer; where it cannot be kept alive leave in order, and raise that at last.

        Any other error ends the node at once: it may have left the state half changed.
        """
        try:
            await conductor.run()
        except OperatorError as error:
            if error is not conductor.failed:
                raise
            self.failed = error
            self.node.leave(f"{error.code}: {error.what}")

    def _on_committed(self, ended: Certificate | Rounded, exchange: Exchange | None) -> None:
        """A round has moved a replica: a certified one with its exchange, or one in pairs."""
        speeds = own_speeds(self.node.transport.stats, self.config.max_upload)
        self.swarm.presence.note(**speeds)
        self.reporter.on_committed(ended, exchange)
        self.lookout.after_servers()
        self._on_moved()

    def _on_moved(self) -> None:
        """A round or a download has moved a replica; a trainer that is there tells when it has."""
        if self.conductor is None or self.conductor.follows:
            self._check_end()

    async def _on_applied(self, applied: Applied) -> None:
        """The trainer stands on the new base: report, checkpoint, perhaps end."""
        if applied.validation_loss is not None:
            self.keeper.note_loss(applied.round, applied.validation_loss)
        news = self.reporter.on_applied(applied)
        self._check_end()
        if self.node.daemon.stop_reason.done():
            return  # as it leaves, it saves this very state
        if news and not applied.fragment and self._saves.due(applied.round):
            self.node.tasks.spawn(self._save())

    async def _save(self) -> None:
        await self.keeper.save()

    def _check_end(self) -> None:
        round_, committed = self.reporter.round, self.reporter.rounds_committed
        over = is_over(self.manifest, round_, self.replicas[0].place.work)
        self.finishing = self.finishing or over
        if why := reason_to_end(round_, committed, self.config.rounds, over=over):
            self.node.leave(why)

    def at_end(self, said: Announce) -> bool:
        """Whether a peer says that it has come to the end of the run."""
        return is_over(self.manifest, said.round, said.work)

    @property
    def manifest(self) -> Manifest:
        """The run's."""
        return self.replicas[0].manifest

    def _on_behind(self, fragment: int, ending: Ending) -> None:
        assert isinstance(self.swarm, Swarm)  # an island that gossips is never behind
        self.fetcher.on_behind(self.swarm, fragment, ending)

    def _on_given_up(self, before: Plan, plan: Plan | None) -> None:
        self.events.emit(given_up(before, plan))

    def _on_peer(self, peer: PeerId, what: str, why: str) -> None:
        if self.conductor is not None:
            self.node.tasks.spawn(self.conductor.look_again())
        self.lookout.after_servers()
        self.reporter.on_peer(peer, what, why)

    def _on_rejected(self, peer: PeerId, error: RemoteProtocolError) -> None:
        self.reporter.on_rejected(peer, error)

    def _on_learned(self, announce: Announce) -> None:
        self.news.set()
        for address in announce.addresses:
            with contextlib.suppress(OperatorError):  # a stranger may announce what is no address
                self.node.transport.book.add(announce.peer, address)

    def _on_announced(self, announce: Announce) -> None:
        self._on_learned(announce)
        self.reporter.on_learned(announce)

    # --- small things ----------------------------------------------------------------------------

    def _hardware(self) -> Hardware:
        """What to train on, and in how many ranks; raises E403 where that is not there."""
        if self.node.daemon.script is not None:
            return "cpu", 1  # the script's own business
        place = meeting(self.config, os.environ)
        return hardware(self.config, place.maximum if place is not None else 1)

    def _notice(self, text: str) -> None:
        self.events.emit(Notice(text=text))


def reason_to_end(round_: int, committed: int, limit: int, *, over: bool) -> str | None:
    """Why a node leaves by itself after a round, None: it goes on.

    ``round_``: of the run, which may be ``over``; ``committed``: since this node came, of at most
    ``limit``, 0: as many as come.
    """
    if over:
        return f"the run is over after {counted(round_, 'round')}"
    if limit and committed >= limit:
        return f"{counted(limit, 'round')} done, as --rounds says"
    return None
