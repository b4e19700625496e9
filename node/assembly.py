"""Making the large parts of a node: its membership in the swarm, and its trainer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bootstrap.handshake import admission
from bootstrap.manifest import Manifest
from gossip.chain.swarm import Swarm
from gossip.common import AnySwarm
from gossip.exchange import ledger
from gossip.hooks import Hooks
from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.membership.standing import first_announcement
from gossip.pairs.rounded import Rounded
from gossip.pairs.swarm import Pairs
from gossip.rounds.gathering import Gathering
from gossip.wiring import Wiring
from node import __version__, clock
from node.checkpoints.restoring import Restored
from node.checkpoints.saving import floats_saved
from node.checkpoints.under_way import room_beside
from node.conductor import Conductor
from node.entry.entrance import Run
from node.errors import operator_error
from node.hosts.crew import crew_of
from node.hosts.hub import Hub
from node.island.beginning import Beginning
from node.island.cores import contention
from node.island.fitting import Fitting
from node.island.hardware import Hardware, device_memory, training
from node.island.island import Island
from node.member import Origin, swarm_of
from node.monitor.events import Notice
from node.replicas.replica import OuterReplica
from node.reports.pairs import GossipReports
from node.reports.peers import PeerReports
from node.reports.rounds import Reporter
from node.run_rules import replicas_of
from node.script.attached import Attached
from node.trainer.channel import Applied
from node.trainer.layout import Outline
from node.trainer.settings import TrainerSettings
from node.trainer.shared import SharedVectors
from protocols.identity import PeerId
from protocols.messages import Announce

if TYPE_CHECKING:
    from node.runtime import Node

MIN_WAIT_S = 1.0  # the least that the trainer waits for a merge before it trains on


def make_replicas(
    node: Node, run: Run, layout: Outline, vectors: SharedVectors
) -> tuple[OuterReplica, ...]:
    """The outer state of every fragment, each a part of the vectors; there is nothing in it yet."""
    return replicas_of(
        run.manifest,
        node.identity.peer_id,
        layout,
        vectors,
        node.offload,
        (run.signed.creator,),
        trains=node.config.role == "island",
    )


async def until_doubled(presence: Presence) -> None:
    """Raise E108 once another node with this one's key has started.

    Everybody believes the newest of the two, and a key that votes twice decides nothing.
    """
    doubled = asyncio.Event()
    presence.on_double = doubled.set
    await doubled.wait()
    raise operator_error("E108", f"another node has started as {presence.wiring.identity.peer_id}")


def make_swarm(
    node: Node,
    manifest: Manifest,
    replicas: Sequence[OuterReplica],
    hooks: Hooks,
    rounded: Callable[[Rounded], None],
    origin: Origin,
) -> AnySwarm:
    """This node's membership; ``replicas`` are by fragment.

    In pairs ``rounded`` is told of each round, else ``hooks.applied``.
    """
    run, rules = manifest.run_id, manifest.rounds
    encoded = sum(replica.codec.encoded_size(0, replica.size) for replica in replicas)
    wiring = Wiring(
        node.transport,
        node.identity,
        run,
        replicas[0].codec,
        node.tasks.spawn,
        node.offload,
        time.monotonic,
    )

    def proof(peer: PeerId) -> bytes:
        return admission(node.config.invitation, run, peer)

    me = node.identity.peer_id
    presence = Presence(
        wiring,
        Membership(me, most_from_one_place=node.config.max_identities),
        _first_announcement(node, replicas[0], origin.newcomer, proof(me)),
        lambda: [replica.place for replica in replicas],
        wall=lambda: clock.wall() + node.clocks.offset,
        admission=proof,
        observed=node.transport.observed,
        reached=node.transport.reached,
    )
    node.is_member = lambda peer: peer in presence.membership.islands
    node.tasks.spawn(until_doubled(presence))
    swarm = swarm_of(
        manifest,
        wiring,
        replicas,
        presence,
        hooks,
        rounded,
        origin,
        keep_rounds=max(rules.replay_rounds, min(ledger.MOST, ledger.SMALL // encoded)),
        directory=node.home.root,
    )
    if isinstance(swarm, Swarm):
        saves = node.config.role == "island" and node.config.checkpoint_every
        size = sum(replica.size for replica in replicas)
        saved = 4 * floats_saved(manifest) * size if saves else 0
        for chain in swarm.chains:
            chain.ledger.room = partial(room_beside, node.home.checkpoints, saved)
    return swarm


@dataclass(frozen=True)
class Workplace:
    """What an island's ranks work with on this machine."""

    layout: Outline
    vectors: SharedVectors
    tokens: str  # where they are
    hardware: Hardware
    hub: Hub | None  # of the island's other hosts


def make_conductor(
    node: Node,
    replicas: Sequence[OuterReplica],
    swarm: AnySwarm,
    place: Workplace,
    restored: Restored | None,
    gathering: Gathering,
    on_applied: Callable[[Applied], Awaitable[None]],
    *,
    joined: bool,
) -> Conductor:
    """The trainer's ranks and their conductor; ``joined``: the optimizer is cold."""
    manifest, script = replicas[0].manifest, node.daemon.script
    settings = _settings_of(node, manifest, place)
    island: Island
    if script is not None:
        fitting = None
        island = Attached(script, manifest, node.home.logs, settings.wait_s, node.leave)
    else:
        island, fitting = _island_of(node, settings, place)
    conductor = Conductor(
        manifest,
        node.identity.peer_id,
        island,
        tuple(replicas),
        place.layout,
        node.events,
        Beginning(
            manifest,
            checkpoint=restored.trained if restored else None,
            moments=restored.moments if restored else None,
            joined=joined,
        ),
        on_applied,
        swarm,
        gathering=gathering,
        own_inner_steps=node.config.inner_steps,
        fitting=fitting,
    )
    if restored is not None:
        conductor.pace.step = restored.facts.step
        conductor.pace.tokens = restored.facts.tokens
    return conductor


def _settings_of(node: Node, manifest: Manifest, place: Workplace) -> TrainerSettings:
    """The trainer's, as the operator asks for them and the machine allows."""
    config = node.config
    hosts = 1 if place.hub is None else place.hub.meeting.maximum
    trained, why = training(config, manifest, place.layout.size, place.hardware, hosts)
    if why:
        node.events.emit(Notice(text=f"layout {why}"))
    on_cores = node.daemon.script is None and place.hardware[0] == "cpu"
    if on_cores and (hint := contention(config.threads, node.home.root)):
        node.events.emit(Notice(text=hint))
    return TrainerSettings(
        manifest=manifest,
        tokens=place.tokens,
        cache=node.home.root / "data-cache",
        cache_bytes=int(config.data_cache),
        evaluation=node.home.root / "evaluation.bin",
        wait_s=max(manifest.rounds.min_grace_s, MIN_WAIT_S),
        **trained,
    )


def _island_of(node: Node, settings: TrainerSettings, place: Workplace) -> tuple[Island, Fitting]:
    """Ranks to be started, with as many sequences at a time as fitted into memory before."""
    fitting = Fitting(node.home.micro_batch, settings.micro_batch, device_memory(*place.hardware))
    if known := fitting.known(settings):
        settings = settings.model_copy(update={"micro_batch": known})
        node.events.emit(Notice(text=fitting.told))
    crew = crew_of(place.hub, node.config, settings, place.layout.size, place.hardware, fitting)
    return Island(settings, place.vectors, node.home.logs, crew), fitting


def make_reports(
    node: Node, manifest: Manifest, swarm: AnySwarm, conductor: Conductor | None
) -> PeerReports:
    """What tells the monitor of rounds and peers."""
    if isinstance(swarm, Pairs):
        return GossipReports(manifest, swarm, conductor, node.events, node.state, node.transport)
    assert isinstance(swarm, Swarm)
    return Reporter(manifest, swarm, conductor, node.events, node.state, node.transport)


def _first_announcement(
    node: Node, replica: OuterReplica, newcomer: bool, proof: bytes
) -> Announce:
    return first_announcement(
        replica.me,
        replica.place,
        role=node.config.role,
        status="joining" if newcomer else "active",
        incarnation=node.home.incarnation(node.daemon.started),
        addresses=tuple(node.place.addresses()[:8]),
        version=__version__,
        region=node.config.region,
        name=node.config.name,
        upload=node.config.max_upload,  # until it is measured
        admission=proof,
    )
