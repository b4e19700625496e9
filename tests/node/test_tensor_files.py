"""Files of tensors: what safetensors reads of them, their hashes, and what is flushed meanwhile."""

from __future__ import annotations

import errno
import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from checkpoint_kit import files_read, write_tensors
from safetensors import safe_open
from safetensors.torch import load_file

from node.checkpoints import tensor_files
from node.checkpoints.checkpoint import CheckpointStore, DiskFullError
from node.checkpoints.index import Facts, verify
from node.checkpoints.tensor_files import (
    NOTE_PREFIX,
    Entry,
    leave_note,
    read_tensors,
    write_entries,
)

FACTS = Facts(run="r", round=1, step=0, tokens=0)


def test_safetensors_reads_any_type_and_shape(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE", 1000)  # so that most tensors come in several
    monkeypatch.setattr(tensor_files, "FLUSHED", 2000)
    numbers = torch.arange(1200)
    tensors = {
        name: numbers.to(getattr(torch, name)).reshape(30, 40) for name in tensor_files._TYPES
    }
    tensors |= {
        "number": torch.tensor(3.5),
        "nothing": torch.zeros(0, 4),
        "turned": torch.randn(30, 50).T,
        "ümlaut": torch.ones(3, dtype=torch.uint8),
    }
    path = tmp_path / "x.safetensors"
    entries = [Entry.of_tensor(name, tensor) for name, tensor in tensors.items()]
    file = write_entries(path, entries, {"format": "pt", "says": '{"a": 1}'})
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        same = found[name].contiguous().view(-1), tensor.contiguous().view(-1)
        assert torch.equal(*(each.view(torch.uint8) for each in same))
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt", "says": '{"a": 1}'}
    data = path.read_bytes()
    assert (file.bytes, file.blake3) == (len(data), blake3(data).hexdigest())


def test_arrays_lie_aligned(tmp_path: Path) -> None:
    arrays = {"a": np.ones(3, np.float32), "b": np.ones(1, np.int64), "c": np.array(2.0)}
    write_tensors(tmp_path / "x", arrays)
    data = (tmp_path / "x").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert not (8 + length) % 8
    assert [header[name]["data_offsets"] for name in "bca"] == [[0, 8], [8, 16], [16, 28]]
    found = read_tensors(tmp_path / "x")
    assert all(np.array_equal(found[name], array) for name, array in arrays.items())


def test_what_such_a_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    one = Entry.of_tensor("one", torch.ones(1))
    with pytest.raises(ValueError, match="two tensors"):
        write_entries(tmp_path / "x", [one, one])
    with pytest.raises(ValueError, match="complex128"):
        write_entries(tmp_path / "x", [Entry.of_tensor("c", torch.ones(1, dtype=torch.complex128))])


def test_a_file_is_flushed_while_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end little is left to flush: for minutes nothing would seem to move."""
    monkeypatch.setattr(tensor_files, "PIECE", 1000)
    monkeypatch.setattr(tensor_files, "FLUSHED", 4000)
    sizes: list[int] = []
    monkeypatch.setattr(tensor_files, "_flush", lambda fd: sizes.append(os.fstat(fd).st_size))
    write_tensors(tmp_path / "x", {"x": np.zeros(8000, np.float32)})
    assert len(sizes) >= 8
    assert sizes == sorted(sizes)
    assert sizes[-1] == (tmp_path / "x").stat().st_size


@pytest.mark.parametrize("size", [10, 8000])
def test_a_disk_that_is_full_when_it_is_flushed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tensor_files, "FLUSHED", 4000)
    monkeypatch.setattr(tensor_files, "_flush", full)
    with pytest.raises(DiskFullError), CheckpointStore(tmp_path / "c").draft() as draft:
        write_tensors(draft / "x", {"x": np.zeros(size, np.float32)})


def test_what_was_hashed_when_it_was_written_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = files_read(monkeypatch)
    store = CheckpointStore(tmp_path)
    with store.draft() as draft:
        (draft / "trainer").mkdir()
        for path in (draft / "outer.safetensors", draft / "trainer" / "shard.safetensors"):
            leave_note(draft, path, write_tensors(path, {"x": np.ones(9)}))
        (draft / "small").write_text("{}")
        made = store.commit(draft, FACTS)
    assert read == ["small"]
    names = {path.name for path in made.path.rglob("*")}
    assert not [name for name in names if name.startswith(NOTE_PREFIX)]
    assert verify(made.path) == made.facts
    assert len(made.facts.files) == 3


def _longer(path: Path, note: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def _shorter(path: Path, note: Path) -> None:
    os.truncate(path, 10)


def _spoilt(path: Path, note: Path) -> None:
    note.write_text("{")


def _of_nothing(path: Path, note: Path) -> None:
    note.write_text(note.read_text().replace("outer", "other"))


@pytest.mark.parametrize("how", [_longer, _shorter, _spoilt, _of_nothing])
def test_a_note_that_does_not_fit_its_file_is_not_believed(tmp_path: Path, how: Any) -> None:
    store = CheckpointStore(tmp_path)
    with store.draft() as draft:
        path = draft / "outer.safetensors"
        leave_note(draft, path, write_tensors(path, {"x": np.ones(9)}))
        (note,) = draft.glob(f"{NOTE_PREFIX}*")
        how(path, note)
        made = store.commit(draft, FACTS)
    assert verify(made.path) == made.facts
    assert list(made.facts.files) == ["outer.safetensors"]
