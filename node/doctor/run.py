"""Which run a machine is looked at for: what that run needs, and not what any run does."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.manifest_form import READING
from node.directories import kept_manifest, newest_checkpoint
from node.statedir import StateDir
from node.status import fetch
from protocols.errors import OperatorError


def of_directory(directory: Path) -> Manifest | None:
    """The run that a state directory belongs to; None where it says none, or none that is whole.

    That of the node that runs there, else that of the newest checkpoint, with which a node would
    go on. Of the checkpoint only the manifest is verified: the rest may take minutes to read.
    """
    home = StateDir(directory)
    if home.holder() is None:
        newest = newest_checkpoint(home.checkpoints)
        return kept_manifest(newest) if newest else None
    try:
        run = fetch(directory)["run"]
        return Manifest.model_validate(run["manifest"], context=READING) if run else None
    except (OperatorError, ValidationError, KeyError, TypeError):
        return None  # it is just starting, hangs, or is of another version
