"""Making the large parts of a node: its membership in the swarm, and its trainer."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from bootstrap.handshake import admission
from bootstrap.manifest import Manifest
from gossip.chain import Chain
from gossip.driver import Swarm
from gossip.exchange import Wiring
from gossip.hooks import Hooks
from gossip.lineage import Lineage
from gossip.membership import Membership
from gossip.planning import Rules
from gossip.presence import Presence
from node import __version__
from node.conductor import Conductor
from node.hardware import Hardware, training
from node.island import Island
from node.mixing import mix_of
from node.monitor.events import Notice
from node.replica import OuterReplica
from node.saving import Restored
from node.script.attached import Attached
from node.trainer.channel import Applied
from node.trainer.layout import Outline
from node.trainer.settings import TrainerSettings
from protocols.codecs import RangeCodec
from protocols.identity import PeerId
from protocols.messages import Announce

if TYPE_CHECKING:
    from node.runtime import Node

KEPT_BYTES = 64 * 1024 * 1024  # of merged parts for those who missed rounds, more than required
MAX_KEPT = 256  # rounds
MIN_WAIT_S = 1.0  # the trainer waits at least so long for a merge before it trains on


def make_swarm(
    node: Node,
    manifest: Manifest,
    replica: OuterReplica,
    codec: RangeCodec,
    hooks: Hooks,
    *,
    newcomer: bool,
    lineage: Lineage | None,
) -> Swarm:
    """This node's membership; ``newcomer``: others have yet to let it take part.

    ``lineage`` leads to where the replica stands; None: to the first round.
    """
    run, rules, size = manifest.run_id, manifest.rounds, len(replica.base)
    wiring = Wiring(
        node.transport,
        node.identity,
        run,
        codec,
        node.tasks.spawn,
        node.offload,
        time.monotonic,
    )

    def proof(peer: PeerId) -> bytes:
        return admission(node.config.invitation, run, peer)

    chain = Chain(
        wiring,
        replica,
        Rules(
            size=size,
            codecs=rules.allowed_codecs,
            encoded_bytes=codec.size_as,
            exposed=rules.exposed,
            overlapped=rules.overlap_steps / rules.inner_steps,
            quorum=rules.quorum,
            grace_fraction=rules.grace_fraction,
            min_grace_s=rules.min_grace_s,
            mix=mix_of(manifest.merge),
        ),
        Presence(
            wiring,
            Membership(replica.me),
            _first_announcement(node, replica, newcomer, proof(replica.me)),
            lambda: (replica.place,),
            wall=lambda: time.time() + node.clocks.offset,
            admission=proof,
        ),
        hooks,
        keep_rounds=max(
            rules.replay_rounds, min(MAX_KEPT, KEPT_BYTES // codec.encoded_size(0, size))
        ),
        ledger_directory=node.home.root,
        known_lineage=lineage,
        new_identity=node.new_key,
    )
    swarm = Swarm((chain,))
    node.is_member = lambda peer: peer in swarm.membership.islands
    if replica.certificate is not None:
        chain.ledger.add(replica.certificate, {})
    return swarm


def make_conductor(
    node: Node,
    replica: OuterReplica,
    swarm: Swarm,
    layout: Outline,
    tokens: str,
    hardware: Hardware,
    restored: Restored | None,
    on_applied: Callable[[Applied], Awaitable[None]],
    *,
    joined: bool,
) -> Conductor:
    """The trainer's ranks and who drives them; ``joined``: its optimizer is cold."""
    config, manifest = node.config, replica.manifest
    trained, why = training(config, manifest, layout.size, hardware)
    if why:
        node.events.emit(Notice(text=f"layout {why}"))
    wait_s = max(manifest.rounds.min_grace_s, MIN_WAIT_S)
    settings = TrainerSettings(
        manifest=manifest,
        tokens=tokens,
        evaluation=node.home.root / "evaluation.bin",
        wait_s=wait_s,
        **trained,
    )
    script = node.daemon.script
    conductor = Conductor(
        manifest,
        replica.me,
        Attached(script, manifest, node.home.logs, wait_s, node.daemon.stop)
        if script is not None
        else Island(settings, replica.vectors, node.home.logs),
        replica,
        layout,
        node.events,
        restored.path if restored else None,
        on_applied,
        joined=joined,
        swarm=swarm,
    )
    if restored is not None:
        conductor.pace.step = restored.facts.step
        conductor.pace.tokens = restored.facts.tokens
    replica.trainer = conductor
    return conductor


def _first_announcement(
    node: Node, replica: OuterReplica, newcomer: bool, proof: bytes
) -> Announce:
    place = replica.place
    return Announce(
        peer=replica.me,
        role=node.config.role,
        status="joining" if newcomer else "active",
        incarnation=int(node.daemon.started * 1000),
        addresses=tuple(node.addresses()[:8]),
        version=__version__,
        region=node.config.region,
        name=node.config.name,
        round=place.round,
        head=place.previous,
        state=place.state,
        work=place.work,
        upload=node.config.max_upload,  # until it is measured
        admission=proof,
    )
