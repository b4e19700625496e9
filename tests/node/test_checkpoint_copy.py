"""Second copies of checkpoints: kept, brought back, and never half there."""

from __future__ import annotations

import errno
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import make
from data_kit import serving
from fsspec.implementations.local import LocalFileSystem

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Facts, verify
from node.checkpoints.names import FETCHED_PREFIX, INDEX
from protocols.errors import OperatorError


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "checkpoints")


def there(place: Path) -> list[str]:
    return sorted(path.name for path in place.iterdir())


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


def refuses(*given: object, **named: object) -> None:
    raise OSError("the link went down")


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
        data = bytearray((place / "outer.safetensors").read_bytes())
        data[-1] ^= 1
        (place / "outer.safetensors").write_bytes(data)
    elif damage == "outside":
        text = (place / INDEX).read_text().replace("trainer.json", "../../evil")
        (place / INDEX).write_text(text)
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


class LinkDown:
    """A file there, of which one piece comes before the link goes down."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.read_before = False

    def __enter__(self) -> LinkDown:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, size: int) -> bytes:
        if self.read_before:
            raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")
        self.read_before = True
        return bytes(self.file.read(min(size, 100)))


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
        return LinkDown(file) if "00000002/outer" in path else file

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
        return LinkDown(file) if path.endswith("last.bin") else file

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


def test_a_place_that_refuses_is_named(store: CheckpointStore, tmp_path: Path):
    (tmp_path / "file").touch()
    for url in (str(tmp_path / "file" / "below"), "nosuch://bucket"):
        with pytest.raises(OperatorError) as caught:
            CheckpointCopy(url, keep=1).put(make(store, 1).path)
        assert (caught.value.code, url in caught.value.what) == ("E407", True)


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
