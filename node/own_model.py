"""What this node's trainer needs of a run: the model's outline, and tokens to train on."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from bootstrap.manifest import Manifest
from node.data.folder import is_folder
from node.data.plain_text import left_out
from node.data.streamed import is_stream
from node.data.supply import check_files
from node.entrance import Entrance, Run
from node.errors import operator_error
from node.monitor.events import Notice
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


async def tokens_of(node: Node, entrance: Entrance, run: Run) -> str:
    """The training tokens; remembered, so that resuming needs no --data.

    Raises as :meth:`~node.entrance.Entrance.tokens` does.
    """
    if node.daemon.script is not None:
        return ""
    place = node.config.data or ""
    note = node.home.root / "tokens.path"
    kept = os.fsdecode(note.read_bytes()) if note.is_file() else ""  # paths are any bytes
    tokens = await entrance.tokens(run, kept)
    if not place and is_folder(tokens):  # the same as before: damaged since?
        await node.offload(lambda: check_files(tokens, lambda done, total: None))
    text = place if not is_folder(place) and not is_stream(place) else ""
    if line := await node.offload(lambda: left_out(text)) if text else "":
        node.events.emit(Notice(text=line))
    note.write_bytes(os.fsencode(tokens))
    return tokens
