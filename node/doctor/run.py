"""Which run a machine is looked at for: what that run needs, and not what any run does."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.statedir import StateDir
from node.status import fetch
from protocols.errors import OperatorError, RemoteProtocolError

_MAX_BYTES = 1024 * 1024  # of a checkpoint's index, and of a manifest
_MANIFEST = "manifest.envelope"  # as node.outer_files writes it


def of_directory(directory: Path) -> Manifest | None:
    """The run that a state directory belongs to; None where it says none, or none that is whole.

    That of the node that runs there, else that of the newest checkpoint, with which a node would
    go on. Of the checkpoint only the manifest is verified: the rest may take minutes to read.
    """
    home = StateDir(directory)
    if home.holder() is None:
        return _of_checkpoint(home.checkpoints)
    try:
        run = fetch(directory)["run"]
        return Manifest.model_validate(run["manifest"]) if run else None
    except (OperatorError, ValidationError, KeyError, TypeError):
        return None  # it is just starting, hangs, or is of another version


def _of_checkpoint(checkpoints: Path) -> Manifest | None:
    try:
        newest = max(checkpoints.glob("ckpt-*"), default=None)
        if newest is None:
            return None
        run = bytes.fromhex(json.loads(_read(newest / "checkpoint.json"))["run"])
        return SignedManifest.open(_read(newest / _MANIFEST), run).manifest
    except (OSError, ValueError, KeyError, TypeError, RecursionError, RemoteProtocolError):
        return None


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)
