"""A checkpoint of numbers that anybody can check, and what of it is read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from node.checkpoints import checkpoint, index
from node.checkpoints.checkpoint import Checkpoint, CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.tensor_files import Entry, File, write_entries

VALUES = np.arange(5000, dtype=np.float32)


def write_tensors(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]]) -> File:
    """Write arrays as safetensors."""
    return write_entries(path, [Entry.of_array(*each) for each in tensors.items()])


def make(
    store: CheckpointStore, round: int, run: str = "r", peer: str = "", loss: float | None = None
) -> Checkpoint:
    with store.draft() as draft:
        write_tensors(draft / "outer.safetensors", {"base": VALUES + round})
        (draft / "trainer.json").write_text("{}")
        facts = Facts(run=run, round=round, step=10 * round, tokens=0, peer=peer, validation=loss)
        return store.commit(draft, facts)


def names(store: CheckpointStore) -> list[str]:
    return sorted(path.name for path in store.directory.iterdir())


def files_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read for their hash from now on."""
    read: list[str] = []
    fingerprint = index.fingerprint

    def counted(path: Path) -> File:
        read.append(path.name)
        return fingerprint(path)

    for module in (checkpoint, index):  # as one is made, and as it is verified
        monkeypatch.setattr(module, "fingerprint", counted)
    return read
