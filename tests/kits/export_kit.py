"""Checkpoints at a URL as nodes make them, for ``node export --from``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from data_kit import tokenizer_bytes
from fsspec.implementations.memory import MemoryFileSystem

from bootstrap.manifest import Data, Manifest, Model
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, write_beside, write_outer
from node.data.tokenizer import FileTokenizer
from node.trainer.layout import Layout
from protocols.identity import Identity

Command = Callable[..., tuple[int, str, str]]

MODEL = Model(vocab_size=600, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=48)
SIZE = Layout.of_config(MODEL).size
PLACE = "memory://second/place"
OUTER = "outer.safetensors"


def made(home: Path, number: int, loss: float | None = None) -> Path:
    """A checkpoint as a node makes it, with a trainer's files; G is its number everywhere."""
    store = CheckpointStore(home / "checkpoints", keep=9)
    manifest = Manifest(model=MODEL, data=Data(tokenizer=FileTokenizer(tokenizer_bytes()).digest))
    signed = SignedManifest.create(manifest, Identity.from_seed(bytes(32)))
    outer = OuterFiles(torch.full((SIZE,), float(number)), {"v": torch.zeros(SIZE)}, signed)
    with store.draft() as draft:
        write_outer(draft, outer)
        write_beside(draft, home)
        (draft / "trainer").mkdir()
        (draft / "trainer" / "trainer.json").write_text("{}")
        (draft / "trainer" / "shard-0.safetensors").write_bytes(bytes(8 * SIZE))
        run = manifest.run_id.hex()
        facts = Facts(run=run, round=number, step=1, tokens=1, validation=loss)
        return store.commit(draft, facts).path


def put(home: Path, *numbers: int, losses: dict[int, float] | None = None) -> None:
    for number in numbers:
        CheckpointCopy(PLACE, keep=9).put(made(home, number, (losses or {}).get(number)))


def stored(number: int, name: str = OUTER) -> Any:
    """A file there."""
    return MemoryFileSystem.store[f"/second/place/ckpt-{number:08d}/{name}"]


def damage(number: int, name: str = OUTER) -> None:
    """A wrong byte, and the length as before."""
    file = stored(number, name)
    file.seek(-1, os.SEEK_END)
    file.write(b"\xff")


def value(out: Path) -> float:
    """What G was."""
    from safetensors.torch import load_file

    (found,) = {part.unique().item() for part in load_file(out / "model.safetensors").values()}
    return float(found)
