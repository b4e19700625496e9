"""What this machine lacks for a run that it has found, before it enters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootstrap.manifest import Manifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.saving import floats_saved
from node.doctor.machine import lacking
from node.entry.own_model import layout_of
from node.island.hardware import device_kind
from node.modes import check_role, check_runs, check_wait, doubts
from node.monitor.events import Notice
from node.trainer.layout import Outline

if TYPE_CHECKING:
    from node.runtime import Node


async def preflight(node: Node, store: CheckpointStore, manifest: Manifest) -> Outline:
    """Tell what is missing, or likely to disappoint; the model's layout. Raises E204, E402."""
    config = node.config
    check_runs(manifest)
    check_role(manifest, config.role)
    check_wait(manifest, config.wait_for)
    for doubt in doubts(manifest):
        node.events.emit(Notice(text=doubt))
    layout = await layout_of(node, manifest)
    if config.role == "island" and config.checkpoint_every:
        store.preflight(
            4 * floats_saved(manifest) * layout.size,
            copies=bool(config.checkpoint_copy),
            evaluated=bool(manifest.rounds.eval_every),
        )
    if config.role == "island" and node.daemon.script is None:
        gpu = device_kind(config) == "cuda"
        if lack := lacking(config, manifest, layout.size, gpu=gpu):
            node.events.emit(Notice(text=lack))
    return layout
