"""What a node gives to newcomers: the run's manifest, the state, an optimizer's moments.

:mod:`node.entry.fetching` is how they take it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TYPE_CHECKING

from bootstrap.state import BlobServer, MomentsServer, StateServer
from gossip.common import AnySwarm
from node.checkpoints.saving import Keeper
from node.conductor import Conductor
from node.entry.donors import Giving
from node.entry.entrance import Run
from node.member import state_server
from node.monitor.memory import available
from node.replicas.replica import OuterReplica
from node.trainer.layout import Layout, Outline
from node.trainer.moments import MomentLayout, moments_last

if TYPE_CHECKING:
    from node.runtime import Node


def offer_run(node: Node, run: Run) -> None:
    """Let newcomers have the manifest and the evaluation shard."""
    BlobServer(node.transport, run.signed.run_id, manifest=run.signed.data, blobs=run.blobs)


def serve_state(
    node: Node,
    run: Run,
    swarm: AnySwarm,
    replicas: Sequence[OuterReplica],
    keeper: Keeper,
    stack: AsyncExitStack,
) -> StateServer:
    """Serve the state of every fragment, until ``stack`` is unwound."""

    def still() -> AbstractAsyncContextManager[None]:
        return keeper.still()  # the one of this moment: the last checkpoint replaces it

    states = state_server(
        node.transport,
        run.manifest,
        swarm,
        replicas,
        still=still,
        offload=node.offload,
        room=available,
    )
    stack.push_async_callback(states.aclose)
    return states


def serve_moments(
    node: Node, run: Run, layout: Outline, conductor: Conductor, stack: AsyncExitStack
) -> None:
    """Serve the optimizer's moments until ``stack`` is unwound, where another could use them."""
    if not (moments_last(run.manifest) and isinstance(layout, Layout)):
        return
    moment_layout, root = MomentLayout.of(layout, run.manifest.inner), node.home.root
    giving = Giving(conductor, moment_layout, root, node.offload_files)
    moments = MomentsServer(
        node.transport, run.signed.run_id, giving.copy, offload=node.offload_files
    )
    stack.push_async_callback(moments.aclose)
