"""A member of a run as the run's manifest makes it, alike for a node and in a simulation.

What the manifest says of rounds and of the state reaches both from here. :mod:`node.assembly` adds
what only a machine has, and :mod:`node.simulate.swarm` what a simulation has in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from bootstrap.state import StateServer
from gossip.catchup.lineage import Lineage
from gossip.chain.chain import Chain
from gossip.chain.promises import PromiseRecord
from gossip.chain.swarm import Swarm
from gossip.common import AnySwarm
from gossip.hooks import Hooks
from gossip.membership.presence import Presence
from gossip.pairs.rounded import Rounded
from gossip.pairs.swarm import Pairs
from gossip.rounds.gathering import Gathering
from gossip.wiring import Wiring
from node.entry.arrival import Arrival
from node.entry.own_arrival import OwnArrival
from node.replicas.replica import OuterReplica
from node.roaming import make_pairs
from node.run_rules import rules_of
from protocols.tasks import Offload
from protocols.transport import Transport


@dataclass(frozen=True)
class Origin:
    """Where a member comes from; the lists are by fragment."""

    newcomer: bool  # others have yet to let it take part
    new_identity: bool  # its key was made just now
    lineages: Sequence[Lineage | None]  # to where its replica stands; None: at the first round
    took: Sequence[float] = ()  # seconds of its downloads, if there were any
    gathering: Gathering = field(default_factory=Gathering)  # whom it waits for, at the first round


def swarm_of(
    manifest: Manifest,
    wiring: Wiring,
    replicas: Sequence[OuterReplica],
    presence: Presence,
    hooks: Hooks,
    rounded: Callable[[Rounded], None],
    origin: Origin,
    *,
    keep_rounds: int,
    directory: Path | None = None,
) -> Swarm | Pairs:
    """A member's part in the rounds, or in the exchanges of pairs; ``replicas`` are by fragment.

    In pairs ``rounded`` is told of each round, else ``hooks.applied``.
    ``keep_rounds``: for those who missed some. ``directory``: for what is to outlive the process,
    or has no room in memory; None: nothing is.
    """
    if manifest.mode in PAIRED:
        return make_pairs(
            manifest,
            wiring,
            replicas,
            presence,
            hooks,
            rounded,
            newcomer=origin.newcomer,
            directory=directory,
        )
    run, me = manifest.run_id, wiring.identity.peer_id

    def record(fragment: int) -> PromiseRecord | None:
        return PromiseRecord(directory / f"promised-{fragment}", run, me) if directory else None

    swarm = Swarm(
        [
            Chain(
                replace(wiring, codec=replica.codec),
                replica,
                rules_of(manifest, replica),
                presence,
                hooks,
                keep_rounds=keep_rounds,
                ledger_directory=directory,
                known_lineage=lineage,
                new_identity=origin.new_identity,
                record=record(replica.place.fragment),
                gathering=origin.gathering,
                late_s=replica.late_s,
            )
            for replica, lineage in zip(replicas, origin.lineages, strict=True)
        ]
    )
    for chain, replica in zip(swarm.chains, replicas, strict=True):
        if replica.certificate is not None:
            chain.ledger.add(replica.certificate, {})
    for chain, seconds in zip(swarm.chains, origin.took, strict=False):
        chain.following.approach.downloaded(seconds)
    return swarm


def state_server(
    transport: Transport,
    manifest: Manifest,
    swarm: AnySwarm,
    replicas: Sequence[OuterReplica],
    *,
    still: Callable[[], AbstractAsyncContextManager[None]],
    offload: Offload,
    room: Callable[[], int | None] = lambda: None,
) -> StateServer:
    """Gives a member's state to newcomers; no round is applied while ``still`` is held."""
    return StateServer(
        transport,
        manifest.run_id,
        lambda fragment: replicas[fragment].standing,
        still=still,
        offload=offload,
        room=room,
        read_by=swarm.readers.copied if isinstance(swarm, Swarm) else None,
        fragments=len(replicas),
    )


def arrival_of(manifest: Manifest) -> type[Arrival]:
    """How a newcomer downloads the state: the one that all share, or one of the islands'."""
    return OwnArrival if manifest.mode in PAIRED else Arrival
