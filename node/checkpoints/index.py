"""What a checkpoint says of itself (``checkpoint.json``), and whether its files are that.

Every file has its hash in there, and what is said there has one, too: one flipped bit in it would
name another run or round.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from node.checkpoints.names import INDEX
from node.checkpoints.tensor_files import File

MAX_INDEX_BYTES = 1024 * 1024
Part = Callable[[str], bool]  # whether a file of that name belongs to it
_FILE = re.compile(r"([a-z]+/)?[A-Za-z0-9][A-Za-z0-9._-]*")  # of a checkpoint: never elsewhere


class UnknownFormError(ValueError):
    """It is as it was written, and of a form that this version of Atoll does not know."""


class Facts(BaseModel):
    """What a checkpoint is of."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    run: str  # run id
    round: int = Field(ge=0)  # rounds committed
    step: int = Field(ge=0)  # inner steps of this island
    tokens: int = Field(ge=0)  # trained by this island
    head: str = ""  # hash of the newest certificate, hex
    state: str = ""  # digest of the outer state, hex
    peer: str = ""  # whose; empty in those of before it was said
    # of the outer parameters that are in it; None: they were not evaluated, or it was not said yet
    validation: float | None = Field(None, allow_inf_nan=False)

    @property
    def evaluated(self) -> tuple[str, float] | None:
        """The outer state and its validation loss; None: the loss is not known."""
        return (self.state, self.validation) if self.validation is not None else None


class Index(Facts):
    """``checkpoint.json``."""

    format: int = Field(1, ge=1, le=1)
    created: float = Field(allow_inf_nan=False)  # later than that of any checkpoint that was there
    files: dict[str, File]
    digest: str = ""  # of all above, see digest_of; empty in those of before it was said


def write_index(draft: Path, facts: Facts, created: float, files: Mapping[str, File]) -> Index:
    """Write ``checkpoint.json``; raises OSError."""
    index = Index(**facts.model_dump(), format=1, created=created, files=dict(files))
    said = json.loads(index.model_dump_json(exclude={"digest"}))
    index = index.model_copy(update={"digest": digest_of(said)})
    (draft / INDEX).write_text(index.model_dump_json(indent=1), encoding="utf-8")
    return index


def digest_of(said: Mapping[str, Any]) -> str:
    """BLAKE3, in hex, of what stands in an index beside ``digest``, also what later versions add.

    In a form that does not depend on order and spaces, as that of manifests.
    """
    text = json.dumps(
        said, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    return blake3(text.encode()).hexdigest()


def everything(name: str) -> bool:
    """All files."""
    return True


def verify(path: Path, part: Part = everything) -> Index:
    """Check every file of a checkpoint, or every one of a ``part`` of them.

    Raises ValueError or OSError that says what is wrong.
    """
    index = _read_index(path)
    check_names(index)
    for name, expected in index.files.items():
        if not part(name):
            continue
        if not (path / name).is_file():
            raise ValueError(f"{name} is missing")
        length = (path / name).stat().st_size
        if length != expected.bytes:
            raise ValueError(f"{name} has {length} bytes, not {expected.bytes}")
        if fingerprint(path / name) != expected:
            raise ValueError(f"{name} has another hash than when it was written")
    return index


def check_names(index: Index) -> None:
    """Raise ValueError where the index names a file outside of its checkpoint."""
    if not all(map(_FILE.fullmatch, index.files)):
        raise ValueError(f"{INDEX} names a file outside of the checkpoint")


def made(path: Path) -> float:
    """When a checkpoint was made, as it says; of one that says nothing, when it was changed."""
    with suppress(OSError, ValueError):
        return _read_index(path).created
    with suppress(OSError):  # gone meanwhile
        return path.stat().st_mtime
    return 0.0


def said_by(path: Path) -> Index | None:
    """What a checkpoint says of itself, unverified; None where it says nothing."""
    try:
        return _read_index(path)
    except (OSError, ValueError):
        return None


def _read_index(path: Path) -> Index:
    """``checkpoint.json``; raises ValueError or OSError."""
    return parse_index((path / INDEX).read_bytes() if (path / INDEX).is_file() else b"")


def parse_index(raw: bytes) -> Index:
    """What ``checkpoint.json`` says; raises ValueError, UnknownFormError of another version's."""
    if not raw or len(raw) > MAX_INDEX_BYTES:
        raise ValueError(f"{INDEX} is missing, empty or too long")
    try:
        index = Index.model_validate_json(raw)
    except ValidationError as error:
        if _as_written(raw):
            raise UnknownFormError(
                f"{INDEX} is of a form that this version of Atoll does not know"
            ) from error
        raise ValueError(f"{INDEX} does not parse ({error.error_count()} errors)") from error
    if index.digest and not _as_written(raw):
        raise ValueError(f"{INDEX} has another hash than when it was written")
    return index


def _as_written(raw: bytes) -> bool:
    """Whether it says what it was written with; False: it does not tell."""
    try:
        said = json.loads(raw)
        return isinstance(said, dict) and said.pop("digest", None) == digest_of(said)
    except (ValueError, RecursionError):
        return False


def fingerprint(path: Path) -> File:
    """Length and hash of a file; raises OSError."""
    hasher = blake3(max_threads=blake3.AUTO)
    hasher.update_mmap(path)
    return File(bytes=path.stat().st_size, blake3=hasher.hexdigest())


def files_in(checkpoint: Path) -> list[Path]:
    """All files of a checkpoint, by their names."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def bytes_in(*checkpoints: Path) -> int:
    """The size of checkpoints, once of a file that several of them have; raises OSError."""
    files = [file.stat() for checkpoint in checkpoints for file in files_in(checkpoint)]
    shared = {(one.st_dev, one.st_ino): one.st_size for one in files if one.st_nlink > 1}
    return sum(shared.values()) + sum(one.st_size for one in files if one.st_nlink <= 1)
