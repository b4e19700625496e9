"""A checkpoint of numbers that anybody can check, what of it is read, and a link that goes down."""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from node.checkpoints import checkpoint, index
from node.checkpoints.checkpoint import Checkpoint, CheckpointStore
from node.checkpoints.index import Facts, digest_of
from node.checkpoints.names import INDEX
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


def there(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


def names(store: CheckpointStore) -> list[str]:
    return there(store.directory)


def flip(checkpoint: Path) -> None:
    """What a disk may do to a file without any sign of it."""
    file = checkpoint / "outer.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def say(checkpoint: Path, **said: Any) -> None:
    """Have it say this, too, as if it had been made so."""
    index = json.loads((checkpoint / INDEX).read_text())
    del index["digest"]
    index |= said
    (checkpoint / INDEX).write_text(json.dumps(index | {"digest": digest_of(index)}))


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


def refuses(*given: object, **named: object) -> None:
    """Whatever was asked of a second place."""
    raise OSError("the link went down")


class LinkDown:
    """A file there, of which one piece comes before the link goes down."""

    def __init__(self, file: Any, piece: int) -> None:
        self.file, self.piece = file, piece
        self.read_before = False

    def __enter__(self) -> LinkDown:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, at: int) -> None:
        self.file.seek(at)

    def read(self, size: int) -> bytes:
        if self.read_before:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.read_before = True
        return bytes(self.file.read(min(size, self.piece)))
