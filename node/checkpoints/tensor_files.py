"""Safetensors files, written piece by piece and hashed on the way.

safetensors' own writers, and those of torch.distributed.checkpoint, first make a copy of all that
goes into a file, and a hash that is taken afterwards reads all of it again. Of a large model that
is as much memory as it has to itself, and minutes. Here a file is written from where its tensors
lie, and flushed to the disk while it grows: so no flush at the end takes minutes in which nothing
is seen to move, and what others flush to the same disk waits for little.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError

if TYPE_CHECKING:
    from torch import Tensor

PIECE = 1 << 20  # bytes that are hashed, and then written, at once: a cache holds them
FLUSHED = 1 << 26  # bytes after which they are flushed to the disk, while the next are written
NOTE_PREFIX = ".hash-"  # of files of a draft that say what was written into others
MAX_NOTE_BYTES = 4096
_ALIGNED = 8
# safetensors' names of types, by numpy's and torch's, and the bytes of an element
_TYPES = {
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
    "int64": ("I64", 8),
    "uint64": ("U64", 8),
    "float32": ("F32", 4),
    "int32": ("I32", 4),
    "uint32": ("U32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "int16": ("I16", 2),
    "uint16": ("U16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int8": ("I8", 1),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}

Bytes = npt.NDArray[np.uint8]


class File(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    bytes: int = Field(ge=0)
    blake3: str = Field(pattern=r"^[0-9a-f]{64}$")


class _Note(File):
    name: str


@dataclass(frozen=True)
class Entry:
    """A tensor that is to be written: its bytes come in pieces, each of which is used up at once.

    ``dtype`` as numpy and torch name it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: Callable[[], Iterable[Bytes]]

    @classmethod
    def of_array(cls, name: str, array: npt.NDArray[np.generic]) -> Entry:
        """Of an array that does not change until it is written."""
        return cls(
            name,
            array.dtype.name,
            array.shape,
            lambda: [np.ascontiguousarray(array).reshape(-1).view(np.uint8)],
        )

    @classmethod
    def of_tensor(cls, name: str, tensor: Tensor) -> Entry:
        """Of a tensor on the CPU that does not change until it is written."""
        import torch

        def pieces() -> list[Bytes]:
            flat: Bytes = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            return [flat]

        dtype = str(tensor.dtype).removeprefix("torch.")
        return cls(name, dtype, tuple(tensor.shape), pieces if tensor.numel() else list)

    @property
    def bytes(self) -> int:
        """Its length in the file."""
        return int(np.prod(self.shape, dtype=np.int64)) * _TYPES[self.dtype][1]


def write_entries(
    path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None
) -> File:
    """Write a file of safetensors, and flush it to the disk; raises OSError with its number.

    ValueError for a type that such a file cannot hold, and where there are two of a name.
    """
    ordered = sorted(entries, key=_place)  # as safetensors does, so that all lie aligned
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "flush") as flusher:
        hasher, length, flushed = blake3(), 0, 0
        flushing: Future[None] | None = None
        for piece in _pieces(_header(ordered, metadata), ordered):
            hasher.update(piece)
            length += len(piece)
            while piece:
                piece = piece[file.write(piece) :]
            if length - flushed >= FLUSHED:
                if flushing is not None:
                    flushing.result()
                flushing, flushed = flusher.submit(_flush, file.fileno()), length
        if flushing is not None:
            flushing.result()
        _flush(file.fileno())
    return File(bytes=length, blake3=hasher.hexdigest())


def _pieces(header: Bytes, ordered: Sequence[Entry]) -> Iterator[memoryview]:
    """All that is written, in order; nothing of a tensor is made before its turn."""
    yield header.data
    for entry in ordered:
        for data in entry.pieces():
            yield from (data[at : at + PIECE].data for at in range(0, len(data), PIECE))


def _place(entry: Entry) -> tuple[int, str]:
    if entry.dtype not in _TYPES:
        raise ValueError(f"{entry.name} is of type {entry.dtype}, which safetensors does not know")
    return -_TYPES[entry.dtype][1], entry.name


def _header(ordered: Sequence[Entry], metadata: Mapping[str, str] | None) -> Bytes:
    names: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    at = 0
    for entry in ordered:
        if entry.name in names:
            raise ValueError(f"two tensors are called {entry.name}")
        end = at + entry.bytes
        kind = _TYPES[entry.dtype][0]
        names[entry.name] = {
            "dtype": kind,
            "shape": list(entry.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(names, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)


def _flush(descriptor: int) -> None:
    getattr(os, "fdatasync", os.fsync)(descriptor)  # macOS has only the latter


def read_tensors(path: Path) -> dict[str, npt.NDArray[np.float32]]:
    """Read a file of fp32 tensors; raises ValueError when the file is damaged."""
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"{path.name}: {error}") from error


def leave_note(draft: Path, path: Path, file: File) -> None:
    """Tell who commits a draft what was written to ``path`` in it; raises OSError."""
    name = path.relative_to(draft).as_posix()
    text = _Note(name=name, **file.model_dump()).model_dump_json()
    (draft / (NOTE_PREFIX + name.replace("/", "-"))).write_text(text, encoding="utf-8")


def take_notes(draft: Path) -> dict[Path, File]:
    """What notes in a draft say of its files, where those are as long; the notes are removed."""
    found = {}
    for path in draft.glob(f"{NOTE_PREFIX}*"):
        with suppress(ValidationError, FileNotFoundError):  # then that file is read once more
            note = _Note.model_validate_json(path.read_bytes()[: MAX_NOTE_BYTES + 1])
            told = draft / note.name
            if told.stat().st_size == note.bytes:
                found[told] = File(bytes=note.bytes, blake3=note.blake3)
        path.unlink()
    return found
