"""The daemon's part of a checkpoint: the outer parameters and state, and the signed manifest.

Written into a draft of :class:`~node.checkpoints.checkpoint.CheckpointStore` beside the trainer's
files, and read back to resume or to export.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import (
    ITS_VERSION,
    CheckpointError,
    CheckpointStore,
    OtherVersionError,
)
from node.checkpoints.index import Index, UnknownFormError, verify
from node.checkpoints.names import INDEX
from node.checkpoints.tensor_files import Entry, leave_note, read_tensors, write_entries
from node.data.tokenizer import BYTES, FILE, tokenizer_of
from node.errors import operator_error
from node.statedir import MANIFEST, StateDir
from protocols.errors import OperatorError, OtherVersion, RemoteProtocolError, reason

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

TENSORS = "outer.safetensors"
PREFIX = "outer."  # of the names of the outer optimizer's vectors
SHARD = "evaluation.bin"
LEAVE_OUT = "leave out --best, which takes the newest"
ITS_MANIFEST = f"{ITS_VERSION}; all checkpoints of a run have the same manifest"
NONE = "it is no checkpoint, and there is none in it"
TRIES = 5  # to read a checkpoint where a node may remove it meanwhile
BESIDE = (SHARD, FILE)  # files of a run in the state directory, named by hash in its manifest


@dataclass(frozen=True)
class OuterFiles:
    """What a checkpoint holds of the outer state: fp32 [N] each, on the CPU."""

    base: torch.Tensor
    vectors: dict[str, torch.Tensor]  # of the outer optimizer, by name
    signed: SignedManifest
    residual: torch.Tensor | None = None  # what coarse codecs have lost of this island's work
    # of an island in pairs, by fragment: its push-sum weights, and its own count of rounds
    weights: tuple[float, ...] = ()
    rounds: tuple[int, ...] = ()

    def entries(self) -> list[Entry]:
        """What the file has."""
        tensors = {"base": self.base}
        tensors |= {PREFIX + name: vector for name, vector in self.vectors.items()}
        if self.residual is not None:
            tensors["residual"] = self.residual
        found = [Entry.of_tensor(name, tensor) for name, tensor in tensors.items()]
        return found + numbers(self.weights, self.rounds)


class Writable(Protocol):
    """What :func:`write_outer` takes."""

    @property
    def signed(self) -> SignedManifest:
        """The run's manifest."""
        ...

    def entries(self) -> list[Entry]:
        """The tensors."""
        ...


def numbers(weights: tuple[float, ...], rounds: tuple[int, ...]) -> list[Entry]:
    """What a checkpoint of an island in pairs has beside vectors; of others it is nothing."""
    import numpy as np

    both = {"weights": np.array(weights), "rounds": np.array(rounds)}
    return [Entry.of_array(*each) for each in both.items()] if rounds else []


def write_outer(draft: Path, outer: Writable) -> None:
    """Write into a draft; raises ``OSError`` for a full disk. Run it off the event loop."""
    file = write_entries(draft / TENSORS, outer.entries())
    leave_note(draft, draft / TENSORS, file)
    (draft / MANIFEST).write_bytes(outer.signed.data)


def write_beside(draft: Path, home: Path) -> None:
    """Take in the run's files of a state directory: a copy of the checkpoint is then enough."""
    for name in BESIDE:
        if kept := read_beside(home, name):
            (draft / name).write_bytes(kept)


def read_beside(folder: Path, name: str) -> bytes:
    """One of the run's files; empty where it is lost, or a damaged disk does not give it."""
    try:
        return (folder / name).read_bytes()
    except OSError:
        return b""


def read_outer(checkpoint: Path, verified: Index | None = None) -> OuterFiles:
    """Read from a checkpoint; raises :class:`CheckpointError` E404, OperatorError E202.

    ``verified``: what it says, where all its hashes have been checked; else that is done here.
    """
    import torch

    try:
        data = (checkpoint / MANIFEST).read_bytes()
        tensors = read_tensors(checkpoint / TENSORS)
        base = torch.from_numpy(tensors["base"])
        residual = torch.from_numpy(tensors["residual"]) if "residual" in tensors else None
        index = verify(checkpoint) if verified is None else verified
        signed = _signed(checkpoint, data, bytes.fromhex(index.run))
        if base.dim() != 1 or base.dtype != torch.float32:
            raise ValueError("base is no fp32 vector")
        vectors = _vectors(tensors, signed.manifest, len(base))
        if residual is not None and (residual.shape, residual.dtype) != (base.shape, base.dtype):
            raise ValueError("the residual is no fp32 vector of the same length")
        own = tensors if signed.manifest.mode in PAIRED else {}
        weights = tuple(map(float, own.get("weights", ())))
        rounds = tuple(map(int, own.get("rounds", ())))
        wanted = signed.manifest.rounds.fragments if own else 0
        if (len(weights), len(rounds)) != (wanted, wanted):
            raise ValueError(f"weights and rounds of {len(rounds)} fragments, not of {wanted}")
        if not all(0 < weight < math.inf for weight in weights) or min(rounds, default=0) < 0:
            raise ValueError(f"push-sum weights {weights} at rounds {rounds}")
    except UnknownFormError as error:
        raise OtherVersionError(checkpoint.name, str(error)) from error
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise CheckpointError(checkpoint, reason(error), "use an older checkpoint") from error
    return OuterFiles(base, vectors, signed, residual, weights, rounds)


def _signed(checkpoint: Path, data: bytes, run: bytes) -> SignedManifest:
    """The manifest of a checkpoint that is whole: older ones of the run have the same.

    Raises OperatorError E202 where it is another version's, and E404.
    """
    try:
        return SignedManifest.open(data, run)
    except OtherVersion as error:
        what = f"checkpoint {checkpoint.name} is of another version of Atoll"
        raise operator_error("E202", what, why=str(error), fix=ITS_MANIFEST) from error
    except RemoteProtocolError as error:
        raise CheckpointError(checkpoint, str(error), ITS_MANIFEST) from error


def _vectors(
    tensors: Mapping[str, npt.NDArray[np.float32]], manifest: Manifest, size: int
) -> dict[str, torch.Tensor]:
    """What the run's outer optimizer keeps; raises ValueError, KeyError where it is not there."""
    import torch

    from diloco.optimizers import named
    from node.replicas.lowrank_state import BASES, plan_of
    from node.trainer.layout import Layout

    rule, fragments = named(manifest.outer.optimizer), manifest.rounds.fragments
    lengths = dict.fromkeys(rule.vectors, size) | dict.fromkeys(rule.numbers, fragments)
    if rule.factors:
        plan = plan_of(Layout.of_manifest(manifest).entries, manifest.outer.rank)
        lengths[BASES] = plan.kept
    vectors = {name: torch.from_numpy(tensors[PREFIX + name]) for name in lengths}
    for name, vector in vectors.items():
        if vector.shape != (lengths[name],) or vector.dtype != torch.float32:
            raise ValueError(f"{name} is no fp32 vector of {lengths[name]} elements")
    return vectors


def read_tokenizer_of(checkpoint: Path, manifest: Manifest) -> bytes:
    """The run's tokenizer.json, from a checkpoint or the state directory that it lies in.

    Empty for the byte tokenizer. Raises OperatorError E604 where there is none that is the run's.
    """
    if manifest.data.tokenizer == BYTES:
        return b""
    folders = (checkpoint, checkpoint.parent, checkpoint.parent.parent)
    found = [data for folder in folders if (data := read_beside(folder, FILE))] or [b""]
    problems = []
    for data in found:
        try:
            tokenizer_of(manifest.data.tokenizer, data, manifest.model.document_end)
            return data
        except OperatorError as error:
            problems.append(error)
    raise problems[0]


def read_newest(
    path: Path, *, best: bool = False, tell: Callable[[CheckpointError], object] = lambda one: None
) -> tuple[Path, OuterFiles]:
    """Read a checkpoint directory, or the newest whole one of a state directory; else E404.

    ``best``: in place of the newest the one with the lowest validation loss. ``tell`` is called
    with what is wrong with those that are passed over. Returns which one it was as well. A node
    that runs there may remove it while it is read: then the newest by then is tried.
    """
    for left in reversed(range(TRIES)):
        before = _listed(path)
        try:
            checkpoint, verified = find_checkpoint(path, best=best, tell=tell)
            return checkpoint, read_outer(checkpoint, verified)
        except CheckpointError:
            if not left or _listed(path) == before:
                raise
    raise AssertionError("the last try returns or raises")


def _listed(place: Path) -> dict[str, int]:
    """What lies among the checkpoints of a place; empty where there are none."""
    with suppress(OSError), os.scandir(_folder(place)) as found:
        return {entry.name: entry.inode() for entry in found}
    return {}


def _folder(place: Path) -> Path:
    """Where checkpoints lie: the place itself, as a copy of them is, or in a state directory."""
    return place if any(place.glob("ckpt-*")) else StateDir(place).checkpoints


def find_checkpoint(
    path: Path, *, best: bool = False, tell: Callable[[CheckpointError], object] = lambda one: None
) -> tuple[Path, Index | None]:
    """A checkpoint itself, or the newest whole one of a state directory or a copy; else E404.

    ``best`` and ``tell`` as of :func:`read_newest`. With what it says
    where it has been verified.
    """
    if path.name.startswith("ckpt-") or os.path.isfile(path / INDEX):
        return path, None
    try:
        directory = _folder(path)
        store = CheckpointStore(directory, owns=False)
        found = store.latest(best=best) if directory.is_dir() else None
    except OSError as error:  # another user's, as a rule
        raise CheckpointError(path, reason(error), "let this user read it") from error
    if found is None or found.checkpoint is None:
        there = found is not None and bool(store.paths())
        if said := why_none(found.why if found is not None else "", best=best, there=there):
            raise CheckpointError(path, *said)
        raise CheckpointError(
            path,
            NONE if os.path.lexists(path) else "there is no such directory",
            "give a directory named ckpt-NUMBER, or a node's state directory",
        )
    for damage in found.damaged:
        if damage.path.exists():  # else it has been pruned meanwhile
            tell(damage)
    return found.checkpoint.path, found.checkpoint.facts


def why_none(damaged: str, *, best: bool, there: bool) -> tuple[str, str] | None:
    """Why none of a place can be used, and what to do; None where there is none.

    ``damaged``: what is wrong with those that were tried; ``there``: whether there are any.
    """
    if damaged and best:
        return (
            f"none that was evaluated is whole ({damaged})",
            f"give a copy of one, or {LEAVE_OUT}",
        )
    if damaged:
        return f"none in it is whole ({damaged})", "give a copy of one"
    if best and there:
        return "none in it has a validation loss: those rounds were not evaluated", LEAVE_OUT
    return None
