from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_kit import VALUES, make, names, write_tensors

from node.checkpoints.checkpoint import (
    CheckpointError,
    CheckpointStore,
    DiskFullError,
    FolderGoneError,
)
from node.checkpoints.names import DRAFT_PREFIX, FETCHED_PREFIX
from node.checkpoints.under_way import room_beside


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB, where this user may mount one."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)]
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting needs root; test_errors_of_the_disk_are_told_apart runs everywhere")
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_keeps_what_was_there(small_disk: Path) -> None:
    store = CheckpointStore(small_disk)
    make(store, 1)
    make(store, 2)  # 20 KB each

    def too_much() -> None:
        with store.draft() as draft:
            write_tensors(draft / "a", {"base": VALUES})
            write_tensors(draft / "b", {"base": VALUES})

    for _ in range(3):
        with pytest.raises(DiskFullError, match="No space left") as caught:
            too_much()
        assert caught.value.code == "E402"
        assert names(store) == ["ckpt-00000001", "ckpt-00000002"]
    found = store.latest().checkpoint
    assert found is not None
    assert found.facts.round == 2
    with pytest.raises(DiskFullError, match="need"):
        store.preflight(60_000)


def test_one_is_on_the_disk_before_its_name_and_the_name_before_others_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any other order a crash of the machine could leave neither the new nor the old one."""
    store = CheckpointStore(tmp_path, keep=1)
    make(store, 1)
    sync, synced = os.fsync, list[tuple[str, list[str]]]()

    def fsync(file: int) -> None:
        sync(file)
        paths = [tmp_path, *tmp_path.rglob("*")]
        (which,) = [p for p in paths if os.path.samestat(os.fstat(file), p.stat())]
        synced.append((which.name, [name for name in names(store) if name.startswith("ckpt")]))

    monkeypatch.setattr(os, "fsync", fsync)
    made = make(store, 2).path
    *content, last = synced
    assert last == (tmp_path.name, ["ckpt-00000001", "ckpt-00000002"])
    assert [there for _, there in content] == [["ckpt-00000001"]] * len(content)
    found = {name for name, _ in content}
    assert found > {path.name for path in made.iterdir()}
    assert [name for name in found if name.startswith(DRAFT_PREFIX)], "the folder of its files"
    assert names(store) == ["ckpt-00000002"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [(errno.ENOSPC, DiskFullError), (errno.EDQUOT, DiskFullError), (errno.EIO, CheckpointError)],
)
def test_errors_of_the_disk_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[Exception]
) -> None:
    store = CheckpointStore(tmp_path)
    make(store, 1)

    def broken(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", broken)
        with pytest.raises(expected):
            make(store, 2)
    assert names(store) == ["ckpt-00000001"]


def test_a_timeout_in_a_draft_stays_a_timeout(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError), CheckpointStore(tmp_path).draft():
        raise TimeoutError


def test_preflight_counts_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2500))
    with pytest.raises(DiskFullError):
        store.preflight(1000)  # two kept and one in the making
    store.preflight(800)
    with pytest.raises(DiskFullError, match="4 checkpoints"):
        store.preflight(800, copies=True)  # and one that is on its way to a second place
    store.preflight(600, copies=True)
    with pytest.raises(DiskFullError, match="4 checkpoints"):
        store.preflight(800, evaluated=True)  # and the best
    (tmp_path / "ckpt-00000001").mkdir()
    (tmp_path / "ckpt-00000001" / "x").write_bytes(bytes(1000))
    store.preflight(1000)


def test_a_folder_that_is_gone_is_no_damaged_checkpoint(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    shutil.rmtree(store.directory)
    with pytest.raises(FolderGoneError, match="is gone") as caught:
        make(store, 0)
    assert caught.value.code == "E105"


def test_what_is_left_of_the_disk_beside_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=2500))
    assert room_beside(tmp_path, 0) == 2500
    assert room_beside(tmp_path, 2000) == 500
    with store.draft() as draft:
        (draft / "a").write_bytes(bytes(1500))  # of those 2000
        assert room_beside(tmp_path, 2000) == 2000
    monkeypatch.undo()
    assert room_beside(tmp_path / "gone", 0) == 0


def test_what_was_fetched_to_begin_with_makes_way_on_a_full_disk(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    (tmp_path / f"{FETCHED_PREFIX}state-0").write_bytes(bytes(9000))
    with pytest.raises(DiskFullError), store.draft():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == []


def test_what_was_fetched_to_begin_with_goes_with_the_first_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    with store.fetching("ckpt-00000001") as draft:
        (draft / "trainer").mkdir()
        (draft / "trainer" / "a").write_bytes(bytes(9000))
    state = tmp_path / f"{FETCHED_PREFIX}state-0"
    with state.open("wb") as file:
        file.truncate(10**9)  # of which nothing has come
    store = CheckpointStore(tmp_path)  # of a node that starts again
    assert len(list(tmp_path.iterdir())) == 2
    assert store.paths() == []
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "disk_usage", lambda _: usage._replace(free=27_000))
        store.preflight(12_000)  # three of them, which need those 9000 as well
        with pytest.raises(DiskFullError):
            store.preflight(20_000)
    assert make(store, 2).path == tmp_path / "ckpt-00000002"
    assert os.listdir(tmp_path) == ["ckpt-00000002"]


def test_what_is_fetched_of_where_this_node_has_yet_to_come_goes_only_where_the_disk_is_full(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    state = tmp_path / f"{FETCHED_PREFIX}state-0"
    other = tmp_path / f"{FETCHED_PREFIX}state-1"
    store.ahead = lambda: [state]
    for path in (state, other):
        path.write_bytes(bytes(9000))
    make(store, 2)
    assert set(os.listdir(tmp_path)) == {"ckpt-00000002", state.name}
    with pytest.raises(DiskFullError), store.draft():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(tmp_path) == ["ckpt-00000002"]
