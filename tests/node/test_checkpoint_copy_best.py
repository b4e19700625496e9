"""The best checkpoint at a second place: kept there, brought back, and copied again."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import make, refuses, there
from fsspec.implementations.local import LocalFileSystem

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import verify
from protocols.errors import OperatorError


def test_the_best_is_kept_there_and_comes_back_besides_the_newest(
    store: CheckpointStore, tmp_path: Path
):
    """Else nothing could go back to it once the disk is lost."""
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    for round, loss in enumerate((2.0, 1.5, 1.7, 2.4), start=1):
        copy.put(make(store, round, loss=loss).path)
    assert there(tmp_path / "copy") == ["ckpt-00000002", "ckpt-00000004"]
    other, told = CheckpointStore(tmp_path / "other"), list[OperatorError]()
    newest = copy.get_newest(other)
    assert newest == tmp_path / "other" / "ckpt-00000004"
    copy.get_best(other, newest, told.append)
    assert (other.best(), other.paths()[0], told) == (
        tmp_path / "other" / "ckpt-00000002",
        newest,
        [],
    )
    make(other, 5, loss=1.4)
    copy.put(other.paths()[0])
    assert there(tmp_path / "copy") == ["ckpt-00000005"]
    copy.get_best(other, other.paths()[0])
    assert there(other.directory) == ["ckpt-00000004", "ckpt-00000005"]


def test_the_best_stays_where_its_round_comes_again_with_another_state(
    store: CheckpointStore, tmp_path: Path
):
    """As after a split whose other side was heavier: here, at the second place, and back again."""
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    for round_, loss in ((9, 1.5), (10, 1.9), (9, 2.1)):
        copy.put(make(store, round_, loss=loss).path)
    best = store.best()
    assert best is not None
    assert (verify(best).round, verify(best).validation) == (9, 1.5)
    assert [verify(path).validation for path in store.paths()] == [2.1, 1.9, 1.5]
    other, told = CheckpointStore(tmp_path / "other"), list[OperatorError]()
    newest = copy.get_newest(other)
    assert newest == other.directory / "ckpt-00000009"
    assert verify(newest).validation == 2.1
    copy.get_best(other, newest, told.append)
    assert (other.best(), other.paths()[0], told) == (
        other.directory / "ckpt-000000009",
        newest,
        [],
    )
    assert verify(other.paths()[1]).validation == 1.5
    for loss in (2.0, 1.8):  # and again: it is neither replaced by these nor are they kept
        copy.put(make(store, 9, loss=loss).path)
        assert [verify(path).validation for path in store.paths()] == [loss, 1.9, 1.5]
        assert len(there(tmp_path / "copy")) == 2
    copy.put(make(store, 9, loss=1.4).path)
    assert [verify(path).validation for path in (tmp_path / "copy").iterdir()] == [1.4]


@pytest.mark.parametrize("loss", [1.5, 2.0, None])
def test_the_best_of_the_newest_one_s_round_is_copied_beside_it(
    store: CheckpointStore, tmp_path: Path, loss: float | None
):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    make(store, 9, loss=1.5)
    copy.put(make(store, 9, loss=loss).path)
    best = store.best()
    assert best is not None
    copy.put_best(best)
    expected = [1.5] if loss == 1.5 else [1.5, loss]
    found = [verify(path).validation for path in (tmp_path / "copy").iterdir()]
    assert sorted(found, key=str) == sorted(expected, key=str)
    back = CheckpointStore(tmp_path / "back")
    newest = copy.get_newest(back)
    assert newest is not None
    assert verify(newest).validation == loss


def test_the_best_that_was_damaged_here_is_the_best_again_once_it_came_back(
    store: CheckpointStore, tmp_path: Path
):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    for round, loss in ((1, 1.5), (2, 1.7)):
        path = make(store, round, loss=loss).path
        copy.put(path)
        (path / "trainer.json").write_text("[]")  # as long as before
    again = CheckpointStore(store.directory)
    assert (again.latest().checkpoint, again.best()) == (None, None)
    newest = copy.get_newest(again)
    assert newest is not None
    copy.get_best(again, newest)
    assert again.best() == store.directory / "ckpt-00000001"


def test_a_best_one_that_cannot_come_back_is_told_and_holds_nothing_up(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    for round, loss in ((1, 1.5), (2, 1.7)):
        copy.put(make(store, round, loss=loss).path)
    (tmp_path / "copy" / "ckpt-00000001" / "outer.safetensors").unlink()
    other, told = CheckpointStore(tmp_path / "other"), list[OperatorError]()
    newest = copy.get_newest(other)
    assert newest is not None
    copy.get_best(other, newest, told.append)
    monkeypatch.setattr(LocalFileSystem, "ls", refuses)
    copy.get_best(other, newest, told.append)
    assert [error.code for error in told] == ["E404", "E407"]
    assert "remove it there" in told[0].fix
    assert there(other.directory) == [newest.name]


def test_one_that_was_passed_over_and_is_the_best_is_copied_later(
    store: CheckpointStore, tmp_path: Path
):
    """An older one than those there takes the place of none of the newest."""
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    best = make(store, 1, loss=1.5).path
    copy.put(make(store, 2, loss=1.7).path)
    for _ in range(2):
        copy.put(best)
        assert there(tmp_path / "copy") == ["ckpt-00000001", "ckpt-00000002"]
    moved: list[bool] = []
    copy.put(best, lambda: moved.append(True))
    assert not moved, "it is there already"


def test_the_best_is_copied_again_where_the_one_there_lacks_files(
    store: CheckpointStore, tmp_path: Path
):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    best = make(store, 1, loss=1.5).path
    copy.put(best)
    copy.put(make(store, 2, loss=1.7).path)
    moved: list[bool] = []
    for name in ("outer.safetensors", "trainer.json"):
        (found,) = (tmp_path / "copy").glob("ckpt-*1")
        (found / name).write_bytes(b"short")
        copy.put_best(best)
        (found,) = (tmp_path / "copy").glob("ckpt-*1")
        assert verify(found) == verify(best)
        copy.put_best(best, lambda: moved.append(True))
        assert not moved, "it is there already"


@pytest.mark.parametrize("question", [1, 2, 3])
def test_one_question_that_fails_has_no_copy_taken_for_a_ruin(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: int
) -> None:
    """NFS and SFTP have ``exists`` say no where the link is down for a moment."""
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    for round_, loss in enumerate((1.0, 2.0), start=1):
        copy.put(make(store, round_, loss=loss).path)
    info, asked = LocalFileSystem.info, list[str]()

    def failing(files: LocalFileSystem, path: Any, **options: Any) -> Any:
        if str(path).endswith("ckpt-00000001/checkpoint.json"):
            asked.append(str(path))
            if len(asked) == question:
                raise OSError(errno.EIO, "down for a moment")
        return info(files, path, **options)

    monkeypatch.setattr(LocalFileSystem, "info", failing)
    copy.put(make(store, 3, loss=2.0).path)
    assert "ckpt-00000001" in there(tmp_path / "copy"), "the best was removed"
