"""The outline of a run's model, and whether this node's trainer has that model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bootstrap.manifest import Manifest
from node.errors import operator_error
from node.trainer.layout import Outline, outline

if TYPE_CHECKING:
    from node.runtime import Node


async def layout_of(node: Node, manifest: Manifest) -> Outline:
    """The model's outline. Raises E201 where this node's trainer has another model."""
    layout: Outline = await node.offload(lambda: outline(manifest))
    script, wanted = node.daemon.script, manifest.script.layout
    if script is None and wanted and node.config.role == "island":
        raise operator_error(
            "E201",
            "the islands of this run train with scripts of their own",
            why=f"{manifest.label} does not say which model and data they have",
            fix="join it from such a script with node.join(model, optimizer, peers=...)",
        )
    if script is not None and script.layout != wanted:
        raise operator_error(
            "E201",
            "the swarm trains another model than this script",
            why=f"names and shapes of the parameters differ: {layout.size:,} in the swarm, "
            f"{script.vectors.size:,} here"
            if wanted
            else "it trains a model that Atoll builds itself",
            fix="build the same model, or give peers of your run",
        )
    if script is not None and (found := script.frozen.difference(manifest.script)):
        raise operator_error(
            "E201",
            "what is frozen in this script's model is not what the swarm has",
            why=f"{found}; what is trained beside one base fits no other",
            fix="load the same revision, in the same precision and quantization, as the creator of "
            "the run; or give node.join compare_frozen=False where islands may differ in it",
        )
    return layout
