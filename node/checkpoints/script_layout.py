"""The parameters of a script's model by name, as a checkpoint of its run tells them.

The manifest has only the hash of the names and shapes.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from bootstrap.manifest import Script
from node.errors import operator_error
from node.trainer.layout import Layout
from node.trainer.trainer_state import FOLDER, MOMENTS, STATE, TrainerState


def script_layout(checkpoint: Path, script: Script) -> Layout:
    """Where each parameter lies in the flat vector; raises OperatorError E602 where none says."""
    for folder in (FOLDER, MOMENTS):
        with suppress(OSError, ValueError):  # pydantic's are ValueErrors
            state = TrainerState.model_validate_json((checkpoint / folder / STATE).read_bytes())
            named = ((name, torch.Size(shape)) for name, shape in state.parameters)
            if (layout := Layout.of_shapes(named)).digest == script.layout:
                return layout
    raise operator_error(
        "E602",
        f"cannot export {checkpoint.name}",
        why="this run's model is its script's, and this checkpoint does not have the names of its "
        "parameters: no script has written into it, or an earlier version has",
        fix="in the script: island = node.join(..., resume=True), then "
        "torch.save(island.outer_parameters(), FILE)",
    )
