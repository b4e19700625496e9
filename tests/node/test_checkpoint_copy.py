"""Second copies of checkpoints: where they may be, which are kept, and never half there."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import make, refuses, there
from fsspec.implementations.local import LocalFileSystem

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Facts, verify
from node.checkpoints.names import INDEX
from protocols.errors import OperatorError


def test_the_newest_are_kept_and_one_comes_back(store: CheckpointStore, tmp_path: Path):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    for round in range(4):
        copy.put(make(store, round).path)
    assert there(tmp_path / "copy") == ["ckpt-00000002", "ckpt-00000003"]
    copy.put(make(store, 3).path)  # again, of another life
    other = CheckpointStore(tmp_path / "other")
    found = copy.get_newest(other)
    assert found == tmp_path / "other" / "ckpt-00000003"
    assert verify(found) == verify(tmp_path / "checkpoints" / "ckpt-00000003")
    assert other.latest().checkpoint is not None


def test_two_islands_that_copy_to_one_place_are_told(store: CheckpointStore, tmp_path: Path):
    """Each would push the other's out, or be restored with the other's work."""
    place = str(tmp_path / "copy")
    one, other = CheckpointCopy(place, keep=2), CheckpointCopy(place, keep=2)
    theirs = CheckpointStore(tmp_path / "theirs")
    one.put(make(store, 1, peer="one").path)
    other.put(make(theirs, 1, peer="other").path)
    for copy, mine, peer in ((one, store, "one"), (other, theirs, "other")):
        if copy is other:
            (tmp_path / "copy").rename(tmp_path / "moved")  # what the first one would have made
            CheckpointCopy(place, keep=2).put(make(store, 3, peer="one").path)
        with pytest.raises(OperatorError, match="another island") as caught:
            copy.put(make(mine, 2, peer=peer).path)
        assert caught.value.code == "E407"


@pytest.mark.parametrize(
    ("after", "round_"), [("outer.safetensors", 1), (INDEX, 1), ("outer.safetensors", 2)]
)
def test_two_islands_that_copy_to_one_place_in_the_same_moment_are_told(
    store: CheckpointStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    after: str,
    round_: int,
):
    """Neither has seen the other's as it began, and of one round there may be files of both."""
    place, put_file = tmp_path / "copy", LocalFileSystem.put_file
    copy = CheckpointCopy(str(place), keep=2)
    theirs = make(CheckpointStore(tmp_path / "theirs"), round_, peer="other").path
    mine = make(store, 1, peer="one").path

    def put(files: LocalFileSystem, path: str, target: str, **how: Any) -> None:
        put_file(files, path, target, **how)
        if target.endswith(after):  # the other's are all there by now
            shutil.copytree(theirs, place / theirs.name, dirs_exist_ok=True)

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(LocalFileSystem, "put_file", put)
        with pytest.raises(OperatorError, match="another island copies") as caught:
            copy.put(mine)
    assert caught.value.code == "E407"
    assert ("remove that one there" in caught.value.fix) == (round_ == 1)
    left = there(place)
    for later in (2, 3):
        with pytest.raises(OperatorError, match="another island copies"):
            copy.put(make(store, later, peer="one").path)
    assert there(place) == left, "the other goes on"


def test_a_copy_that_something_removes_files_of_meanwhile_is_told(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    put_file = LocalFileSystem.put_file

    def put(files: LocalFileSystem, path: str, target: str, **how: Any) -> None:
        put_file(files, path, target, **how)
        if target.endswith(INDEX):
            Path(target).with_name("trainer.json").unlink()

    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    copy.put(make(store, 1, peer="one").path)
    with monkeypatch.context() as broken:
        broken.setattr(LocalFileSystem, "put_file", put)
        with pytest.raises(OperatorError, match="another island copies"):
            copy.put(make(store, 2, peer="one").path)
    assert "ckpt-00000001" in there(tmp_path / "copy"), "it is all there is"
    copy.put(make(store, 2, peer="one").path)
    assert len(there(tmp_path / "copy")) == 1


def test_who_has_lost_its_identity_with_its_disk_goes_on_with_its_copies(
    store: CheckpointStore, tmp_path: Path
):
    place = str(tmp_path / "copy")
    CheckpointCopy(place, keep=2).put(make(store, 1, peer="before").path)
    copy, other = CheckpointCopy(place, keep=2), CheckpointStore(tmp_path / "other")
    assert copy.get_newest(other) is not None
    for round in (2, 3, 4):
        copy.put(make(other, round, peer="after").path)
    assert there(tmp_path / "copy") == ["ckpt-00000003", "ckpt-00000004"]


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("no-such-protocol://x", "Protocol not known"),
        ("{0}/file", "is no folder"),
        ("file://{0}/file/below", "is no folder"),
        ("{0}/new/er", ""),
        ("memory://x", ""),
    ],
)
def test_what_can_be_no_place_is_told_at_once(tmp_path: Path, place: str, why: str):
    (tmp_path / "file").write_text("")
    copy = CheckpointCopy(place.format(tmp_path), keep=2)
    if not why:
        copy.check()
        assert there(tmp_path) == ["file"]
        return
    with pytest.raises(OperatorError, match=why) as caught:
        copy.check()
    assert caught.value.code == "E407"


def test_a_new_one_is_never_pushed_out_by_later_rounds(store: CheckpointStore, tmp_path: Path):
    """As where an island went over to a side of the swarm that is fewer rounds on."""
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    for round in (8, 9, 5):
        copy.put(make(store, round).path)
    assert there(tmp_path / "copy") == ["ckpt-00000005", "ckpt-00000009"]
    found = copy.get_newest(CheckpointStore(tmp_path / "other"))
    assert found is not None
    assert found.name == "ckpt-00000005"
    copy.put(make(store, 6).path)
    assert there(tmp_path / "copy") == ["ckpt-00000005", "ckpt-00000006"]


def test_another_one_of_the_same_round_takes_its_place_when_it_is_whole(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=1)
    copy.put(make(store, 9).path)
    for tries in range(3):
        step = 100 + tries
        with store.draft() as draft:
            (draft / "trainer.json").write_text("{}")
            facts = Facts(run="r", round=9, step=step, tokens=0)
            path = store.commit(draft, facts).path
        with monkeypatch.context() as broken:
            broken.setattr(LocalFileSystem, "put_file", refuses)
            with pytest.raises(OperatorError, match="cannot write"):
                copy.put(path)
        assert CheckpointCopy(copy.url, 1).get_newest(CheckpointStore(tmp_path / f"{tries}"))
        copy.put(path)
        assert len(there(tmp_path / "copy")) == 1
        found = copy.get_newest(CheckpointStore(tmp_path / f"again-{tries}"))
        assert found is not None
        assert (found.name, verify(found).step) == ("ckpt-00000009", step)


def test_what_was_broken_off_goes(store: CheckpointStore, tmp_path: Path):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=3)
    for round in range(3):
        copy.put(make(store, round).path)
        if round < 2:
            (tmp_path / "copy" / f"ckpt-{round:08d}" / INDEX).unlink()  # a link that went down
    assert there(tmp_path / "copy") == ["ckpt-00000002"]


def test_copies_of_another_run_are_left_alone(store: CheckpointStore, tmp_path: Path):
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    copy.put(make(store, 9).path)
    for round in (0, 10):
        with pytest.raises(OperatorError, match="has checkpoints of another run") as caught:
            copy.put(make(CheckpointStore(tmp_path / "new"), round, run="other").path)
        assert (caught.value.code, there(tmp_path / "copy")) == ("E407", ["ckpt-00000009"])
    (tmp_path / "copy" / "ckpt-00000009" / INDEX).write_text("{}")  # it says nothing now
    copy.put(make(CheckpointStore(tmp_path / "new"), 0, run="other").path)
    assert "ckpt-00000000" in there(tmp_path / "copy")


def test_a_url_of_fsspec(store: CheckpointStore):
    copy = CheckpointCopy("memory://bucket/run", keep=1)
    assert copy.get_newest(store) is None
    moved: list[bool] = []
    copy.put(make(store, 7).path, lambda: moved.append(True))
    assert len(moved) > 3, "each file and more: this file system tells of parts"
    other = CheckpointStore(store.directory.parent / "other")
    assert copy.get_newest(other) is not None


def test_a_place_that_refuses_is_named(store: CheckpointStore, tmp_path: Path):
    (tmp_path / "file").touch()
    for url in (str(tmp_path / "file" / "below"), "nosuch://bucket"):
        with pytest.raises(OperatorError) as caught:
            CheckpointCopy(url, keep=1).put(make(store, 1).path)
        assert (caught.value.code, url in caught.value.what) == ("E407", True)
