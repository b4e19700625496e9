"""What this node's trainer needs of a run: the model's outline, and tokens to train on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bootstrap.manifest import Manifest
from node.data.folder import is_folder
from node.data.supply import check_files
from node.entrance import Run
from node.errors import operator_error
from node.reading import Reading
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
    return layout


async def tokens_of(node: Node, reading: Reading, run: Run) -> str:
    """The training tokens; remembered, so that resuming needs no --data.

    Raises as :meth:`~node.reading.Reading.tokens` does.
    """
    if node.daemon.script is not None:
        return ""
    note = node.home.root / "tokens.path"
    kept = os.fsdecode(note.read_bytes()) if note.is_file() else ""  # paths are any bytes
    tokens = await reading.tokens(run, kept)
    if not node.config.data and is_folder(tokens):  # the same as before: damaged since?
        await node.offload(lambda: check_files(tokens, lambda done, total: None))
    note.write_bytes(os.fsencode(tokens))
    return tokens
