"""A conductor with a trainer that reads at once, and a chain that only listens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from gossip_kit import counts_of
from replica_kit import ME, OTHER, normal

from bootstrap.manifest import Manifest
from node.conductor import Conductor
from node.island.beginning import Beginning, Stage
from node.replicas.replica import OuterReplica
from node.trainer.channel import (
    Snapshot,
    Stopped,
)
from node.trainer.shared import SharedVectors
from protocols.codecs import RangeCodec
from protocols.counts import Included
from protocols.identity import PeerId
from protocols.messages import Certificate, Contributor, Outcome, PartResult
from protocols.tasks import Offload

SIZE = 3000


class Gate:
    """A pool whose first piece of work is done at once, and heard of when the gate opens."""

    def __init__(self) -> None:
        self.open, self.reached = asyncio.Event(), asyncio.Event()

    async def offload(self, work: Callable[[], Any]) -> Any:
        done = work()
        if not self.reached.is_set():
            self.reached.set()
            await self.open.wait()
        return done


class Trainer:
    """An island whose trainer reads at once what it is given."""

    alive, grown, starts, directory = True, False, 1, Path()
    settings = SimpleNamespace(tokens="")

    def __init__(self, vectors: SharedVectors) -> None:
        self.vectors = vectors
        self.sent: list[Any] = []

    async def claim(self, fragment: int = 0) -> None:
        assert self.vectors.try_claim(fragment)

    async def send(self, command: Any) -> None:
        self.sent.append(command)

    def merged(self) -> None:
        """It has no other hosts."""


class Chain:
    """What this node says of itself."""

    under_way, contributes, fragment = False, False, 0
    exchanges = False  # the snapshot, in pairs

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    @property
    def has_work(self) -> bool:
        return self.contributes or self.exchanges

    def timed(self) -> list[float]:
        return []

    def update(self, **changes: Any) -> None:
        self.said.append(changes)

    def note(self, **changes: Any) -> None:
        pass


def quiet_swarm(*chains: Chain) -> Any:
    """Of which nobody else has been heard."""
    nobody = SimpleNamespace(members_alive=lambda now: (), announcement=lambda peer: None)
    presence = SimpleNamespace(note=lambda **changes: None, status=None)
    return SimpleNamespace(
        chains=chains, me=ME, presence=presence, membership=nobody, now=lambda: 0.0
    )


def conductor(
    vectors: SharedVectors,
    offload: Offload,
    tables: dict[str, Any] | None = None,
    kind: type[OuterReplica] = OuterReplica,
) -> tuple[Conductor, Chain]:
    """At round 0, with a trainer that trains, and a snapshot out."""
    manifest = Manifest.model_validate(tables or {"mode": "diloco"})
    replica = kind(manifest, ME, vectors, RangeCodec("fp32", SIZE), offload, (ME, OTHER), 0)
    replica.base.copy_(normal(1, SIZE))
    replica.sent.copy_(replica.base + 0.01 * normal(2, SIZE))
    layout = SimpleNamespace(size=SIZE, cuts=(slice(0, SIZE),))

    async def on_applied(applied: Any) -> None:
        pass

    chain = Chain()
    made = Conductor(
        manifest,
        ME,
        cast(Any, Trainer(vectors)),
        (replica,),
        cast(Any, layout),
        cast(Any, SimpleNamespace(emit=lambda event: None)),
        Beginning(manifest),
        on_applied,
        quiet_swarm(chain),
    )
    made.beginning.stage = Stage.BEGUN
    return made, chain


def snapshot(vectors: SharedVectors) -> Snapshot:
    assert vectors.try_snapshot()
    vectors.end_snapshot(0)
    return Snapshot(round=0, steps=5, tokens=640, finite=True)


async def at_once(work: Callable[[], Any]) -> Any:
    return work()


async def take_in(made: Conductor, *reports: Any) -> None:
    """The trainer reports this."""
    told = iter([*reports, Stopped()])

    async def next_event() -> Any:
        return next(told)

    cast(Any, made.island).next_event = next_event
    await made.run()


async def commit_without(replica: OuterReplica) -> None:
    """A round of the other island alone."""
    await commit(replica, {OTHER: 1})


async def commit(replica: OuterReplica, tokens: Mapping[PeerId, int]) -> None:
    """A round of islands that have brought so many tokens each."""
    place = replica.place
    counts = counts_of(tuple(Included(index, SIZE) for index in range(len(tokens))))
    part = PartResult(0, 0, 0, SIZE, OTHER, "fp32", bytes(32), counts, bytes(32), b"")
    outcome = Outcome(
        0,
        place.round,
        place.previous,
        place.state,
        "fp32",
        tuple(Contributor(peer, 1.0, count, True) for peer, count in tokens.items()),
        (part,),
        (ME, OTHER),
        place.work + sum(tokens.values()),
    )
    data = torch.empty(replica.codec.encoded_size(0, SIZE), dtype=torch.uint8)
    replica.codec.encode(0, 0.01 * normal(3, SIZE), data)
    certificate = Certificate(bytes(32), 0, 0, (ME, OTHER), outcome, ())
    await replica.apply(certificate, {(0, SIZE): data})


async def nobody(**changes: int) -> None:
    """Ranks that are started again; what they say comes later."""
