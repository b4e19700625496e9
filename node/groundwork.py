"""What a node needs before it takes part in a run: the run, its state, and tokens to train on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bootstrap.manifest import Manifest
from node import clock
from node.assembly import make_replicas
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.restoring import Restored
from node.entry.entrance import Entrance, Run
from node.entry.fetching import Fetcher
from node.entry.finding import Finder
from node.entry.preflight import preflight
from node.entry.serving import offer_run
from node.hosts.crew import job_of
from node.hosts.hub import Hub
from node.modes import is_over
from node.reading import Reading
from node.replicas.replica import OuterReplica
from node.trainer.shared import SharedVectors
from protocols.errors import OperatorError
from protocols.messages import Announce

if TYPE_CHECKING:
    from node.runtime import Node
    from node.trainer.layout import Outline


@dataclass(frozen=True)
class Basis:
    """What a node has when it begins to take part in a run."""

    run: Run
    layout: Outline
    vectors: SharedVectors
    replicas: tuple[OuterReplica, ...]  # by fragment; what they hold is in the vectors
    fetcher: Fetcher  # has brought it there
    tokens: str  # where those to train on are; empty: nothing is trained here


class Groundwork:
    """Gets all that; ``hub``: this island's other hosts, which need the tokens, too."""

    def __init__(
        self,
        node: Node,
        entrance: Entrance,
        store: CheckpointStore,
        hub: Hub | None,
        on_learned: Callable[[Announce], None],
    ) -> None:
        self.node, self.config = node, node.config
        self.entrance, self.store, self.hub = entrance, store, hub
        self._on_learned = on_learned
        self._layout: Outline  # of the run that was found

    async def lay(self, restored: Restored | None) -> Basis:
        """Find the run or make it, read its text, get its state; ``restored``: the checkpoint's."""
        node, tokens = self.node, ""
        reading = Reading(self.config, node.identity, node.events, node.offload)
        finder = Finder(node, self.entrance, reading, partial(offer_run, node), self._ready)
        while True:
            run = await finder.find(restored.signed if restored else None)
            # reading takes long: in vain where the run is over, which a checkpoint or peers tell
            now = clock.wall() + node.clocks.offset
            first = restored is None and not run.said_to_be_over(now)
            if first:
                tokens = await self._read(reading, run)
            script = node.daemon.script
            vectors = script.vectors if script else await self._shared(self._layout.size)
            try:
                replicas = make_replicas(node, run, self._layout, vectors)
                base, _ = vectors.tensors()
                fetcher = Fetcher(node, run, replicas, base, self._on_learned)
                await fetcher.get(restored)
                rounds = min(replica.place.round for replica in replicas)
                if not first and not is_over(run.manifest, rounds, replicas[0].place.work):
                    trained = restored is not None and restored.facts.step > 0
                    tokens = await self._read(reading, run, trained=trained)
            except BaseException as error:  # also cancellation: shared memory is given back
                vectors.close()
                if not (isinstance(error, OperatorError) and finder.release(error)):
                    raise
            else:
                return Basis(run, self._layout, vectors, replicas, fetcher, tokens)

    async def _ready(self, manifest: Manifest) -> None:
        self._layout = await preflight(self.node, self.store, manifest)

    async def _read(self, reading: Reading, run: Run, *, trained: bool = False) -> str:
        """Where this island's training tokens are; its other hosts are told to make theirs."""
        if self.config.role != "island":
            return ""
        tokens = await reading.tokens(run, trained=trained)
        await self._tell_hosts(run, tokens, reading.place)
        return tokens

    async def _shared(self, size: int) -> SharedVectors:
        """New vectors with all memory reserved, which takes seconds per ten GB. Raises E401."""
        vectors: SharedVectors = await self.node.offload(lambda: SharedVectors.create(size))
        return vectors

    async def _tell_hosts(self, run: Run, tokens: str, place: str) -> None:
        """Let this island's other hosts make their tokens, while this one goes on."""
        if (hub := self.hub) is not None:
            cache = self.node.home.root / "data-cache"
            hub.offer(await self.node.offload(lambda: job_of(run, tokens, place, cache)))
