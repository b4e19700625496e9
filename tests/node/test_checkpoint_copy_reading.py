"""What comes back of a second place of checkpoints: whole ones, and what has come only once."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import LinkDown, flip, make, say, there
from data_kit import serving
from fsspec.implementations.local import LocalFileSystem

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Facts, verify
from node.checkpoints.names import FETCHED_PREFIX, INDEX
from node.checkpoints.tensor_files import File
from protocols.errors import OperatorError


def test_an_error_of_a_web_server_is_no_missing_copy(store: CheckpointStore, tmp_path: Path):
    for round_ in (1, 2):
        CheckpointCopy(str(tmp_path / "web"), keep=2).put(make(store, round_).path)
    other, told = CheckpointStore(tmp_path / "other"), list[OperatorError]()
    with serving(tmp_path / "web") as server:
        copy = CheckpointCopy(server.url, keep=2)
        for asked in range(5):  # the list, both indexes, and that of the newest and a file again
            server.away, server.after = 1, asked
            with pytest.raises(OperatorError, match="cannot read") as caught:
                copy.get_newest(other, told.append)
            assert (caught.value.code, told) == ("E407", [])
            assert "503" in caught.value.why
        found = copy.get_newest(other)
    assert found is not None
    assert verify(found) == verify(store.paths()[0])


def test_one_without_an_index_is_none(store: CheckpointStore, tmp_path: Path):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=3)
    for round in range(2):
        copy.put(make(store, round).path)
    (tmp_path / "copy" / "ckpt-00000001" / INDEX).unlink()  # broken off
    other = CheckpointStore(tmp_path / "other")
    assert copy.get_newest(other) == tmp_path / "other" / "ckpt-00000000"


@pytest.mark.parametrize("damage", ["flip", "outside", "index"])
def test_damage_is_refused_and_leaves_nothing(store: CheckpointStore, tmp_path: Path, damage: str):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    copy.put(make(store, 1).path)
    place = tmp_path / "copy" / "ckpt-00000001"
    if damage == "flip":
        flip(place)
    elif damage == "outside":
        say(place, files={"../../evil": File(bytes=2, blake3="0" * 64).model_dump()})
    else:
        (place / INDEX).write_text("{}")
    other = CheckpointStore(tmp_path / "other")
    with pytest.raises(OperatorError, match="cannot read") as caught:
        copy.get_newest(other)
    assert caught.value.code == "E407"
    assert there(other.directory) == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("damage", ["flip", "gone"])
def test_one_that_is_damaged_is_passed_over(store: CheckpointStore, tmp_path: Path, damage: str):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    for round_ in (1, 2):
        copy.put(make(store, round_).path)
    file = tmp_path / "copy" / "ckpt-00000002" / "outer.safetensors"
    if damage == "flip":
        file.write_bytes(bytes(len(file.read_bytes())))
    else:
        file.unlink()
    other = CheckpointStore(tmp_path / "other")
    told: list[OperatorError] = []
    found = copy.get_newest(other, told.append)
    assert found is not None
    assert (found.name, there(other.directory)) == ("ckpt-00000001", ["ckpt-00000001"])
    (problem,) = told
    assert problem.code == "E404"
    assert "ckpt-00000002" in problem.what
    assert "outer.safetensors" in problem.why
    assert "ckpt-00000001 is tried" in problem.fix


@pytest.mark.parametrize("where", ["link", "disk"])
def test_an_error_on_the_way_brings_back_no_older_one(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
):
    """The newest is whole, and what was learnt since the older one would be lost for nothing."""
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    for round_ in (1, 2):
        copy.put(make(store, round_).path)
    other, told = CheckpointStore(tmp_path / "other"), list[OperatorError]()
    opened, mkdir = LocalFileSystem.open, Path.mkdir

    def open_(files: Any, path: str, mode: str = "rb") -> Any:
        file = opened(files, path, mode)
        return LinkDown(file, 100) if "00000002/outer" in path else file

    def mkdir_(path: Path, *given: Any, **named: Any) -> None:
        if path.parent == other.directory and named:
            raise OSError(errno.EIO, "Input/output error")
        mkdir(path, *given, **named)

    with monkeypatch.context() as broken:
        if where == "link":
            broken.setattr(LocalFileSystem, "open", open_)
        else:
            broken.setattr(Path, "mkdir", mkdir_)
        with pytest.raises(OperatorError, match="cannot") as caught:
            copy.get_newest(other, told.append)
    assert caught.value.code == ("E407" if where == "link" else "E404")
    assert ("reset" if where == "link" else "Input/output") in caught.value.why
    assert not told
    assert [name for name in there(other.directory) if not name.startswith(FETCHED_PREFIX)] == []
    found = copy.get_newest(other)
    assert found is not None
    assert found.name == "ckpt-00000002"


class Watched:
    """A file there; ``came`` counts what is read of each. Like SFTP's, its seek returns nothing."""

    def __init__(self, file: Any, came: Counter[str], *, seeks: bool) -> None:
        self.file, self.came, self.seeks = file, came, seeks

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, at: int) -> None:
        if not self.seeks:
            raise ValueError("Cannot seek")
        self.file.seek(at)

    def read(self, size: int) -> bytes:
        data = bytes(self.file.read(size))
        self.came[Path(self.file.name).name] += len(data)
        return data


@pytest.mark.parametrize("seeks", [True, False])
@pytest.mark.parametrize("spoilt", [False, True])
def test_what_has_come_is_not_fetched_again(
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    seeks: bool,
    spoilt: bool,
):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    with store.draft() as draft:
        (draft / "first.bin").write_bytes(b"1" * 1000)
        (draft / "last.bin").write_bytes(b"2" * 1000)
        place = store.commit(draft, Facts(run="r", round=1, step=1, tokens=1)).path
    copy.put(place)
    other, opened = CheckpointStore(tmp_path / "other"), LocalFileSystem.open

    def broken(files: Any, path: str, mode: str = "rb") -> Any:
        file = opened(files, path, mode)
        return LinkDown(file, 100) if path.endswith("last.bin") else file

    with monkeypatch.context() as first:
        first.setattr(LocalFileSystem, "open", broken)
        with pytest.raises(OperatorError):
            copy.get_newest(other)
    (draft,) = other.directory.iterdir()
    begun = (draft / "last.bin").stat().st_size
    assert begun == 100
    if spoilt:  # as a power cut leaves it
        (draft / "last.bin").write_bytes(bytes(begun))
    (draft / "old.bin").write_bytes(b"of another copy of that name")

    came = Counter[str]()

    def watched(files: Any, path: str, mode: str = "rb") -> Any:
        return Watched(opened(files, path, mode), came, seeks=seeks)

    monkeypatch.setattr(LocalFileSystem, "open", watched)
    found = copy.get_newest(CheckpointStore(other.directory))  # of a node that starts again
    assert found is not None
    assert verify(found) == verify(place)
    assert there(other.directory) == [found.name]
    assert there(found) == there(place)
    again = 1000 if spoilt and seeks else 0
    assert came["last.bin"] == (1000 - begun if seeks else 1000) + again
    assert "first.bin" not in came
