"""Where a node's outer state comes from: its checkpoint, the run's beginning, or its peers.

At entry all fragments are fetched. Later, a member that cannot replay the rounds it missed of a
fragment fetches that one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import torch

from bootstrap.handshake import greet
from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from bootstrap.state import DownloadProgress, PartialState, Sharing
from gossip.catchup.approach import LITTLE
from gossip.catchup.lineage import Lineage
from gossip.catchup.replay import Ending
from gossip.chain.swarm import Swarm
from gossip.common import AnySwarm
from node import __version__, clock
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import bytes_in
from node.checkpoints.names import FETCHED_PREFIX
from node.checkpoints.restoring import Restored
from node.checkpoints.trainer_files import Taken
from node.checkpoints.under_way import room_beside
from node.entry.arrival import Arrival
from node.entry.donors import FAILURES, Taking
from node.entry.downloading import take_newer, take_state
from node.entry.entrance import Run
from node.entry.looking import PATIENCE_S
from node.headway import Headway, counted
from node.hf.import_hf import import_hf
from node.member import arrival_of
from node.monitor.events import Behind, JoinProgress, Notice, Problem, Rejected
from node.monitor.wording import short
from node.replicas.own_state import OwnReplica
from node.replicas.replica import OuterReplica
from node.trainer.layout import initial_vector
from protocols.errors import OperatorError, RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Announce

if TYPE_CHECKING:
    from node.runtime import Node


@dataclass
class Came:
    """How much of states of ``size`` bytes came from others, and how long that took."""

    bytes: int = 0
    size: int = 0
    seconds: float = 0.0

    def add(self, came: int, size: int, seconds: float) -> None:
        """Another one."""
        self.bytes, self.size, self.seconds = (
            self.bytes + came, self.size + size, self.seconds + seconds,
        )  # fmt: skip

    @property
    def whole_s(self) -> float | None:
        """Seconds for all of it; None: too little came to tell, the rest was here before."""
        if self.bytes <= LITTLE * self.size:
            return None if self.size else 0.0
        return self.seconds * self.size / self.bytes


class Fetcher:
    """Fills the replicas of one node; ``learned`` is told of announcements on the way."""

    def __init__(
        self,
        node: Node,
        run: Run,
        replicas: Sequence[OuterReplica],
        base: torch.Tensor,
        learned: Callable[[Announce], None],
    ) -> None:
        """``base``: the whole vector; each replica's ``base`` is a part of it."""
        self.node, self.run, self.replicas, self.base = node, run, tuple(replicas), base
        self.events, self.learned = node.events, learned
        self.lineages: list[Lineage | None] = [None] * len(self.replicas)  # to where we begin
        self.joined_under_way = False
        self.took: list[float] = []  # seconds of the downloads at entry, by fragment
        self._came = Came()
        self._downloading: set[int] = set()
        self.downloaded = False  # at entry

    async def get(self, restored: Restored | None) -> None:
        """The state to begin with. Raises OperatorError E502 or E206 where it cannot be had."""
        if restored is not None:
            await self._restore(restored)
        elif self.run.created:
            manifest = self.run.manifest
            if not manifest.script.layout:  # else the script has put its own there
                await self.node.offload(partial(self._begin, manifest, self._making_first()))
            for replica in self.replicas:
                await replica.settle()
        elif self.run.manifest.mode in PAIRED and self.node.config.role != "island":
            self.joined_under_way = True  # each state is an island's own, and this node is none
        else:
            await self._join()

    async def moments(self) -> Taken | None:
        """A donor's inner moments; None (and an event) where none came: the rate warms up."""
        taking = Taking(
            self.node.transport,
            self.run.manifest,
            self.node.home.root,
            self.node.offload_files,
            self._greet,
            Headway(lambda text: self.events.emit(Notice(text=f"downloads moments: {text}"))),
        )
        active = [
            one
            for one in await self._arrival(lambda: self.run.peers).look()
            if (one.role, one.status) == ("island", "active") and one.peer != self.replicas[0].me
        ]
        steps_s = [1 / one.steps_per_second for one in active if one.steps_per_second > 0]
        step_s = median(steps_s) if steps_s else 0.0
        try:
            donors = [one.peer for one in active]
            taken, said = await taking.take(donors, self._came.whole_s, step_s=step_s)
        except FAILURES as error:
            why = str(error) or type(error).__name__
            self.events.emit(Notice(text=f"no donor's moments ({why}): warms its learning rate up"))
            return None
        self.events.emit(Notice(text=f"begins with a donor's moments {said}"))
        return taken

    async def _restore(self, restored: Restored) -> None:
        await self.node.offload(lambda: self._read_in(restored))
        for index, (replica, state) in enumerate(zip(self.replicas, restored.states, strict=True)):
            if isinstance(replica, OwnReplica):
                replica.blend.weight = restored.weights[index]
            await replica.settle(state)
            replica.inherited = True
            self.lineages[index] = state.lineage if state else None
        self.joined_under_way = bool(self.run.peers)

    def _read_in(self, restored: Restored) -> None:
        """Copy all vectors of a checkpoint: seconds for each ten GB."""
        self.base.copy_(restored.base)
        at, starts = 0, dict.fromkeys(restored.vectors, 0)
        for replica in self.replicas:
            end = at + len(replica.base)
            for name, vector in replica.vectors.items():
                start = starts[name]
                starts[name] = start + len(vector)
                vector.copy_(restored.vectors[name][start : starts[name]])
            if replica.residual is not None and restored.residual is not None:
                replica.residual.values.copy_(restored.residual[at:end])
            at = end

    def _making_first(self) -> Callable[[int, int], None]:
        """Reports progress on the first parameters; called in the thread that makes them."""
        loop = asyncio.get_running_loop()

        def told(text: str) -> None:
            event = Notice(text=f"makes the first parameters: {text}")
            loop.call_soon_threadsafe(self.events.emit, event)

        return Headway(told, unit="parameters")

    def _begin(self, manifest: Manifest, progress: Callable[[int, int], None]) -> None:
        """The parameters that a new run starts from."""
        model, fragments = manifest.model, manifest.rounds.fragments
        if self.run.init_from is not None:
            import_hf(model, self.run.init_from, self.base, fragments)
        else:
            initial_vector(model, manifest.seed, self.base, fragments, progress)

    async def _join(self) -> None:
        self.joined_under_way = self.downloaded = True
        arrival = self._arrival(lambda: self.run.peers)
        arrival.broken, arrival.making = self._tell_broken, self._tell_making
        found = await arrival.look()
        self.events.emit(JoinProgress(step=4, name="discover", text=counted(len(found), "island")))
        started = time.monotonic()
        served: dict[str, int] = {}
        size = sum(map(_bytes, self.replicas))

        def tell(text: str) -> None:
            self.events.emit(JoinProgress(step=5, name="sync", text=text))

        headway = Headway(tell, total=size)

        for index, replica in enumerate(self.replicas):
            began, on_disk = time.monotonic(), self._on_disk(index)
            told = _told(headway, tell)
            arrived = await arrival.fetch(replica.state, told, index, on_disk)
            if not self._saves:
                await on_disk.beside(on_disk.drop)
            came = Came()
            came.add(sum(arrived.served.values()), _bytes(replica), time.monotonic() - began)
            self.took.append(came.whole_s or 0.0)  # 0: not known
            self._came.add(came.bytes, came.size, came.seconds)
            headway.part_done(_bytes(replica))
            await replica.settle(arrived.state, arrived.target.state)
            self.lineages[index] = arrived.state.lineage
            for peer, count in arrived.served.items():
                if count:
                    served[str(peer)] = served.get(str(peer), 0) + count
        took = time.monotonic() - started
        self.events.emit(
            JoinProgress(
                step=5,
                name="sync",
                text=f"round {self.replicas[0].place.round}, {size / 1e6:.1f} MB "
                f"from {counted(len(served), 'peer')} in {took:.1f} s, digest ok",
                sources=served,
            )
        )

    @property
    def _saves(self) -> bool:
        """Whether checkpoints are made: the first removes what was kept of a download."""
        config = self.node.config
        return config.role == "island" and bool(config.checkpoint_every)

    def _on_disk(self, fragment: int, room: Callable[[], int] | None = None) -> PartialState:
        path = self.node.home.checkpoints / f"{FETCHED_PREFIX}state-{fragment}"
        return PartialState(path, self.run.signed.run_id, self.node.offload_files, room)

    def ahead(self) -> list[Path]:
        """Files of states that are being fetched, or where this node has yet to come. Blocks."""
        found: list[Path] = []
        for fragment, replica in enumerate(self.replicas):
            on_disk = self._on_disk(fragment)
            known = on_disk.offer()
            if fragment in self._downloading or (known and known.round > replica.place.round):
                found += on_disk.files
        return found

    def _room(self) -> int:
        """Bytes of the disk that are left beside the next checkpoint, if it is like the newest."""
        directory, size = self.node.home.checkpoints, 0
        with suppress(OSError):  # replaced meanwhile
            size = sum(map(bytes_in, CheckpointStore(directory, owns=False).paths()[:1]))
        return room_beside(directory, size)

    def _tell_broken(self, why: str) -> None:
        text = f"nothing comes, tries for {PATIENCE_S:.0f} s: {why}"
        self.events.emit(JoinProgress(step=5, name="sync", text=text))

    def _tell_making(self, peer: PeerId, size: int) -> None:
        text = f"waits for {short(peer)}, which makes a copy of {size / 1e6:,.1f} MB"
        self.events.emit(JoinProgress(step=5, name="sync", text=text))

    def refresher(self, swarm: AnySwarm) -> Callable[[], Awaitable[None]] | None:
        """Brings what was downloaded up to date, once the trainer is up; None: nothing to do.

        In certified rounds a newcomer follows the rounds meanwhile. In gossip each island has a
        state of its own and trains on, so the downloaded one would be old.
        """
        if self.run.manifest.mode not in PAIRED or not self.downloaded:
            return None
        return lambda: self._refresh(swarm)

    async def _refresh(self, swarm: AnySwarm) -> None:
        """Fetch a newer state; keep the old one if nobody has a newer one or it cannot be had."""
        arrival = self._arrival(lambda: swarm.membership.alive(swarm.now()) or self.run.peers)
        before = self.replicas[0].place.round
        try:
            await take_newer(swarm, self.replicas, arrival, self._headway)
        except OperatorError as error:
            self.events.emit(Problem.of(error))
            return
        if (now := self.replicas[0].place.round) > before:
            text = f"the others went on: begins after round {now}, not {before}"
            self.events.emit(Notice(text=text))

    # --- later -----------------------------------------------------------------------------------

    def on_behind(self, swarm: Swarm, fragment: int, ending: Ending) -> None:
        """Replay is not possible: take the state of a fragment itself."""
        if fragment in self._downloading:
            return
        self._downloading.add(fragment)
        here = self.replicas[fragment].place.round
        membership = swarm.chains[fragment].membership
        heads = [a.round for a in membership.members_alive(swarm.now())]
        head, why = max(heads, default=here), ending.value
        self.events.emit(Behind(round=here, head=head, action="download", reason=why))
        self.node.tasks.spawn(self._download(swarm, fragment, ending))

    async def _download(self, swarm: Swarm, fragment: int, ending: Ending) -> None:
        """Take the swarm's state of a fragment, and keep local work where possible."""
        arrival = self._arrival(lambda: swarm.membership.alive(swarm.now()))
        chain, replica = swarm.chains[fragment], self.replicas[fragment]
        on_disk = self._on_disk(fragment, self._room)
        try:
            await take_state(chain, replica, arrival, ending, self._headway(), on_disk)
            if not self._saves:
                await on_disk.beside(on_disk.drop)
        except OperatorError as error:  # the next peer that is ahead starts this again
            self.events.emit(Problem.of(error))
        finally:
            self._downloading.discard(fragment)

    def _headway(self) -> DownloadProgress:
        def tell(text: str) -> None:
            self.events.emit(Notice(text=f"downloads the state: {text}"))

        return _told(Headway(tell), tell)

    @cached_property
    def _sharing(self) -> Sharing:
        return Sharing(self.node.transport, self.run.signed.run_id)

    def _arrival(self, ask: Callable[[], list[PeerId]]) -> Arrival:
        return arrival_of(self.run.manifest)(
            transport=self.node.transport,
            run=self.run.signed.run_id,
            founders=(self.run.signed.creator,),
            ask=ask,
            wall=lambda: clock.wall() + self.node.clocks.offset,
            learned=self.learned,
            greet=self._greet,
            untrue=self._on_untrue,
            offload=self.node.offload,
            fragments=len(self.replicas),
            sharing=self._sharing,
            mention=lambda peer, by: self.node.whereabouts.mention(peer, by=by),
        )

    def _on_untrue(self, peer: PeerId, error: RemoteProtocolError) -> None:
        self.events.emit(Rejected(peer=peer, reason=error.reason, detail=str(error)))

    async def _greet(self, peer: PeerId) -> None:
        run, invitation = self.run.signed.run_id, self.node.config.invitation
        transport, whereabouts = self.node.transport, self.node.whereabouts
        await greet(
            transport, whereabouts, peer, software=__version__, run=run, invitation=invitation
        )


def _told(headway: Headway, tell: Callable[[str], object]) -> DownloadProgress:
    """Has a download's headway told, and first what of it is here from before."""

    def told(done: int, total: int, sources: int) -> None:
        if sources:
            headway(done, total, sources)
            return
        headway.had(done)
        if done:
            tell(f"{done / 1e6:.1f} MB are here from before")

    return told


def _bytes(replica: OuterReplica) -> int:
    return sum(4 * len(vector) for vector in replica.state)
