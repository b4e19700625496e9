"""Second copies of checkpoints where there is no room to spare: what is broken off takes none."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import make, refuses, there
from fsspec.implementations.local import LocalFileSystem

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import bytes_in
from node.checkpoints.names import INDEX
from protocols.errors import OperatorError

KEPT = ["ckpt-00000001", "ckpt-00000002"]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "copy"


@pytest.fixture
def copy(store: CheckpointStore, place: Path) -> CheckpointCopy:
    """With two copies there, as many as are kept."""
    copy = CheckpointCopy(str(place), keep=2)
    for round_ in (1, 2):
        copy.put(make(store, round_).path)
    return copy


def failing(monkeypatch: pytest.MonkeyPatch, at: str, meanwhile: Callable[[Path], object]) -> None:
    """The place fails once half of the file ``at`` has come there, after what is done meanwhile."""
    put_file = LocalFileSystem.put_file

    def put(files: LocalFileSystem, path: str, target: str, **how: Any) -> None:
        put_file(files, path, target, **how)
        if target.endswith(at):
            os.truncate(target, os.path.getsize(target) // 2)
            meanwhile(Path(target).parent)
            raise OSError("the link went down")

    monkeypatch.setattr(LocalFileSystem, "put_file", put)


@pytest.mark.parametrize("how", ["killed", "another's file"])
def test_one_that_broke_off_for_want_of_room_does_not_take_that_of_the_next(
    store: CheckpointStore,
    copy: CheckpointCopy,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """No later one was copied, of which each left another ruin."""
    room, put_file = 3 * bytes_in(store.paths()[0]) + 1000, LocalFileSystem.put_file

    def put(files: LocalFileSystem, path: str, target: str, **how: Any) -> None:
        if bytes_in(place) + os.path.getsize(path) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        put_file(files, path, target, **how)

    monkeypatch.setattr(LocalFileSystem, "put_file", put)
    path = make(store, 3).path
    if how == "killed":
        shutil.copytree(path, place / path.name)
        (place / path.name / INDEX).unlink()
    else:
        size = (path / "outer.safetensors").stat().st_size
        (place / "file").write_bytes(bytes(room - bytes_in(place) - size - 100))
        with pytest.raises(OperatorError, match="cannot write"):
            copy.put(path)
        (place / "file").unlink()
    for round_ in (4, 5, 6):
        copy.put(make(store, round_).path)
    assert there(place) == ["ckpt-00000005", "ckpt-00000006"]


@pytest.mark.parametrize("at", ["outer.safetensors", "trainer.json", INDEX])
def test_one_that_fails_leaves_nothing_there(
    store: CheckpointStore,
    copy: CheckpointCopy,
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    with monkeypatch.context() as broken:
        failing(broken, at, lambda folder: None)
        with pytest.raises(OperatorError, match="cannot write"):
            copy.put(make(store, 3).path)
    assert there(place) == KEPT


def test_what_it_cannot_remove_hides_no_error_and_holds_nothing_up(
    store: CheckpointStore, copy: CheckpointCopy, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at a place where nothing may be removed: what fits is copied all the same."""

    def forbidden(*given: object, **named: object) -> None:
        raise PermissionError("nothing may be removed")

    with monkeypatch.context() as broken:
        broken.setattr(LocalFileSystem, "rm", forbidden)
        with broken.context() as first:
            failing(first, "trainer.json", lambda folder: None)
            with pytest.raises(OperatorError, match="cannot write") as caught:
                copy.put(make(store, 3).path)
        assert "the link went down" in caught.value.why
        assert there(place) == [*KEPT, "ckpt-00000003"]
        with pytest.raises(OperatorError, match="cannot write") as caught:
            copy.put(make(store, 4).path)
        assert "nothing may be removed" in caught.value.why
    assert (place / "ckpt-00000004" / INDEX).exists()
    copy.put(make(store, 5).path)
    assert there(place) == ["ckpt-00000004", "ckpt-00000005"]


def test_who_is_given_up_removes_nothing(
    store: CheckpointStore, copy: CheckpointCopy, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then a newer one may lie under that name."""
    gone: list[Path] = []

    def moved() -> None:
        if gone:
            raise RuntimeError("a newer one is copied in its place")

    failing(monkeypatch, "outer.safetensors", gone.append)
    with pytest.raises(OperatorError, match="cannot write") as caught:
        copy.put(make(store, 3).path, moved)
    assert "the link went down" in caught.value.why
    assert there(place) == [*KEPT, "ckpt-00000003"]


def test_what_has_become_another_island_s_is_left_to_it(
    store: CheckpointStore, copy: CheckpointCopy, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make(CheckpointStore(store.directory.parent / "theirs"), 3, peer="other").path
    failing(
        monkeypatch,
        "outer.safetensors",
        lambda folder: shutil.copytree(theirs, folder, dirs_exist_ok=True),
    )
    with pytest.raises(OperatorError, match="cannot write"):
        copy.put(make(store, 3).path)
    assert (place / "ckpt-00000003" / INDEX).exists()


def test_none_is_taken_for_broken_off_since_the_place_does_not_answer(
    store: CheckpointStore, copy: CheckpointCopy, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fsspec's ``exists`` says no of whatever it cannot ask for."""
    exists = LocalFileSystem.exists
    with monkeypatch.context() as down:
        down.setattr(
            LocalFileSystem,
            "exists",
            lambda files, path, **how: not path.endswith(INDEX) and exists(files, path, **how),
        )
        down.setattr(LocalFileSystem, "put_file", refuses)
        with pytest.raises(OperatorError, match="cannot write"):
            copy.put(make(store, 3).path)
    assert there(place) == KEPT
    assert copy.get_newest(CheckpointStore(place.parent / "other")) is not None
