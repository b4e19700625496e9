"""The daemon's part of a checkpoint: outer parameters, momentum and the signed manifest.

Written into a draft of :class:`~node.checkpoint.CheckpointStore` beside the trainer's files, and
read back to resume or to export.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bootstrap.manifest import Manifest, SignedManifest
from node.checkpoint import CheckpointError, CheckpointStore, read_tensors, verify, write_tensors
from node.data.tokenizer import BYTES, FILE, tokenizer_of
from node.statedir import StateDir
from protocols.errors import RemoteProtocolError

if TYPE_CHECKING:
    import torch

TENSORS = "outer.safetensors"
MANIFEST = "manifest.envelope"


@dataclass(frozen=True)
class OuterFiles:
    """What :func:`write_outer` wrote: fp32 [N] each, on the CPU."""

    base: torch.Tensor
    momentum: torch.Tensor
    signed: SignedManifest
    residual: torch.Tensor | None = None  # what coarse codecs have lost of this island's work


def write_outer(draft: Path, outer: OuterFiles) -> None:
    """Write into a draft; raises ``OSError`` for a full disk. Run it off the event loop."""
    tensors = {"base": outer.base.numpy(), "momentum": outer.momentum.numpy()}
    if outer.residual is not None:
        tensors["residual"] = outer.residual.numpy()
    write_tensors(draft / TENSORS, tensors)
    (draft / MANIFEST).write_bytes(outer.signed.data)


def read_outer(checkpoint: Path) -> OuterFiles:
    """Read from a verified checkpoint; raises :class:`CheckpointError` E404."""
    import torch

    try:
        data = (checkpoint / MANIFEST).read_bytes()
        tensors = read_tensors(checkpoint / TENSORS)
        base, momentum = (torch.from_numpy(tensors[key]) for key in ("base", "momentum"))
        residual = torch.from_numpy(tensors["residual"]) if "residual" in tensors else None
        signed = SignedManifest.open(data, verify_run(checkpoint))
        if base.shape != momentum.shape or base.dim() != 1 or base.dtype != torch.float32:
            raise ValueError("base and momentum are not two fp32 vectors of one length")
        if residual is not None and (residual.shape, residual.dtype) != (base.shape, base.dtype):
            raise ValueError("the residual is no fp32 vector of the same length")
    except (OSError, ValueError, KeyError, RemoteProtocolError) as error:
        raise CheckpointError(checkpoint, str(error), "use an older checkpoint") from error
    return OuterFiles(base, momentum, signed, residual)


def read_tokenizer_of(place: Path, manifest: Manifest) -> bytes:
    """The run's tokenizer.json, from the state directory that a checkpoint lies in.

    Empty for the byte tokenizer. Raises OperatorError E604 where it is not there.
    """
    if manifest.data.tokenizer == BYTES:
        return b""
    folders = (place, place.parent, place.parent.parent)  # a state directory, or a checkpoint
    found = next((f / FILE for f in folders if (f / FILE).is_file()), place / FILE)
    data = found.read_bytes() if found.is_file() else b""
    tokenizer_of(manifest.data.tokenizer, data)
    return data


def verify_run(checkpoint: Path) -> bytes:
    """The run id a checkpoint says it is of, after all its hashes have been checked."""
    return bytes.fromhex(verify(checkpoint).run)


def read_checkpoint(path: Path) -> OuterFiles:
    """Read a checkpoint directory, or the newest whole one of a state directory; else E404."""
    if re.fullmatch(r"ckpt-\d+", path.name):
        return read_outer(path)
    directory = StateDir(path).checkpoints
    found = CheckpointStore(directory).latest() if directory.is_dir() else None
    if found is None or found.checkpoint is None:
        raise CheckpointError(
            path,
            "it is no checkpoint, and there is none in it",
            "give a directory named ckpt-NUMBER, or a node's state directory",
        )
    return read_outer(found.checkpoint.path)
