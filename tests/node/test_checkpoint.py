from __future__ import annotations

import errno
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_kit import VALUES, flip, make, names, say

from node.checkpoints import checkpoint
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore
from node.checkpoints.index import MAX_INDEX_BYTES, Facts, Index, check_names, verify
from node.checkpoints.names import INDEX, OLD_PREFIX
from node.checkpoints.tensor_files import File, read_tensors
from node.checkpoints.under_way import forget_drafts
from node.directories import newest_checkpoint


def test_the_newest_comes_back_and_two_are_kept(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert store.latest().checkpoint is None
    for round in range(4):
        make(store, round)
    assert names(store) == ["ckpt-00000002", "ckpt-00000003"]
    found = CheckpointStore(store.directory).latest()
    assert found.damaged == ()
    assert found.checkpoint is not None
    assert (found.checkpoint.facts.round, found.checkpoint.facts.step) == (3, 30)
    read = read_tensors(found.checkpoint.path / "outer.safetensors")
    assert np.array_equal(read["base"], VALUES + 3)


@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("killed", [True, False])
def test_one_of_the_same_round_takes_the_place_of_the_other_or_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool, best: bool
) -> None:
    """That of ``best`` stays beside it, as it does where a kill comes between."""
    store = CheckpointStore(tmp_path, keep=1)
    make(store, 3, loss=1.5 if best else None)
    rename, names_before = Path.rename, names(store)

    def broken(path: Path, target: Path) -> Path:
        if path.name.startswith(".draft-") and ".draft-old-" not in path.name:
            raise SystemExit if killed else OSError(errno.EIO, "broken")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(SystemExit if killed else CheckpointError):
        make(store, 3)
    monkeypatch.undo()
    again = CheckpointStore(tmp_path, keep=1) if killed else store
    beside = ["ckpt-000000003"] if best else []
    assert names(again) == (beside if killed and best else names_before)
    assert again.latest().checkpoint is not None
    make(again, 3, loss=1.6 if best else None)
    assert names(again) == [*beside, "ckpt-00000003"]


def truncate(path: Path) -> None:
    os.truncate(path / "outer.safetensors", 100)


def lose(path: Path) -> None:
    (path / "trainer.json").unlink()


def spoil(path: Path) -> None:
    (path / INDEX).write_text("{not json")


def unindex(path: Path) -> None:
    (path / INDEX).unlink()


def bloat(path: Path) -> None:
    with (path / INDEX).open("a") as file:
        file.write(" " * MAX_INDEX_BYTES)


def escape(path: Path) -> None:
    say(path, files={"../trainer.json": File(bytes=2, blake3="0" * 64).model_dump()})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (truncate, "100 bytes"),
        (flip, "another hash"),
        (lose, "trainer.json is missing"),
        (spoil, "does not parse"),
        (unindex, "missing"),
        (bloat, "too long"),
        (escape, "outside"),
    ],
)
def test_a_damaged_one_is_passed_over(tmp_path: Path, damage: object, says: str) -> None:
    store = CheckpointStore(tmp_path)
    make(store, 1)
    damage(make(store, 2).path)  # type: ignore[operator]
    found = store.latest()
    assert found.checkpoint is not None
    assert found.checkpoint.facts.round == 1
    (error,) = found.damaged
    assert error.code == "E404"
    assert says in error.why
    assert "ckpt-00000001 is tried" in error.fix
    assert found.why == f"ckpt-00000002: {error.why}"
    damage(found.checkpoint.path)  # type: ignore[operator]
    none = store.latest()
    assert none.checkpoint is None
    assert "none is left" in none.damaged[1].fix


@pytest.mark.parametrize(
    "name",
    [
        "../a",
        "..",
        "/a",
        "./a",
        "trainer/../a",
        "trainer/..",
        "a/b/c",
        "trainer//a",
        "",
        "a\n",
        "a\\b",
    ],
)
def test_an_index_that_names_a_file_elsewhere_is_refused(name: str) -> None:
    """A copy of it is written where it says, whoever wrote it."""

    def index(name: str) -> Index:
        file = File(bytes=0, blake3="0" * 64)
        return Index(run="r", round=0, step=0, tokens=0, format=1, created=0.0, files={name: file})

    check_names(index("trainer/rank-0.safetensors"))
    with pytest.raises(ValueError, match="outside"):
        check_names(index(name))


def test_damaged_newer_ones_never_push_out_the_new_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for round in (8, 9):
        truncate(make(store, round).path)
    make(store, 5)
    found = store.latest().checkpoint
    assert found is not None
    assert found.facts.round == 5
    make(store, 6)
    assert names(store) == ["ckpt-00000005", "ckpt-00000006"]


def test_the_one_that_was_made_last_is_gone_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of an earlier round, as on another side of a split, or by a clock that was set back."""
    store = CheckpointStore(tmp_path)
    make(store, 8)
    make(store, 9)
    monkeypatch.setattr(time, "time", lambda: 1e6)
    for round, others in ((6, [9]), (7, [6]), (5, [7]), (7, [5])):
        make(store, round)
        again = CheckpointStore(tmp_path)
        assert [int(path.name[5:]) for path in again.paths()] == [round, *others]
        found = again.latest()
        assert found.damaged == ()
        assert found.checkpoint is not None
        assert found.checkpoint.facts.round == round
        assert newest_checkpoint(tmp_path) == found.checkpoint.path


def test_the_same_round_again_replaces(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    make(store, 1)
    with store.draft() as draft:
        store.commit(draft, Facts(run="r", round=1, step=77, tokens=0))
    assert names(store) == ["ckpt-00000001"]
    found = store.latest().checkpoint
    assert found is not None
    assert found.facts.step == 77


@pytest.mark.parametrize("anew", [False, True])
def test_what_a_kill_leaves_of_an_old_one_is_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, anew: bool
) -> None:
    """Its index is gone first, and its folder was changed last: it would be the newest."""
    store = CheckpointStore(tmp_path)
    for round in (1, 2):
        make(store, round)
    removed: list[str] = []

    def killed(path: Path, **how: Any) -> None:
        if (path / INDEX).exists():
            (path / INDEX).unlink()
            removed.append(path.name)
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            make(store, 3)
    assert [name for name in removed if name.endswith("ckpt-00000001")]
    again = CheckpointStore(tmp_path)
    if anew:
        again.begin_anew()
    assert [path.name for path in again.paths()] == ["ckpt-00000003", "ckpt-00000002"]
    make(again, 4)
    kept = {"ckpt-00000004", "ckpt-00000002" if anew else "ckpt-00000003"}
    assert {path.name for path in tmp_path.iterdir()} == kept | (
        {"before-ckpt-00000003"} if anew else set()
    )


@pytest.mark.parametrize("number", [errno.EACCES, errno.EMFILE, errno.ESTALE, errno.EIO])
def test_one_that_cannot_be_read_now_is_not_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """It may be whole, and newer ones would push it out. What the disk has lost is damage."""
    store = CheckpointStore(tmp_path)
    for round in (1, 2):
        make(store, round)

    def failing(path: Path) -> Index:
        if path.name == "ckpt-00000002":
            raise OSError(number, os.strerror(number), str(path))
        return verify(path)

    monkeypatch.setattr(checkpoint, "verify", failing)
    if number == errno.EIO:
        found = store.latest().checkpoint
        assert found is not None
        assert found.facts.round == 1
        return
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        store.latest()
    assert caught.value.fix == "let this user read it, or move it away"


def test_a_draft_disappears_though_somebody_still_writes_into_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread cannot be stopped where the call that began it is cancelled."""
    store, rmdir = CheckpointStore(tmp_path), os.rmdir
    with store.draft() as draft:
        (draft / "half").write_text("x")

        def meanwhile(*arguments: Any, **options: Any) -> None:
            with suppress(FileNotFoundError):
                (draft / "late").write_text("x")
            rmdir(*arguments, **options)

        monkeypatch.setattr(os, "rmdir", meanwhile)
    assert names(store) == []


def test_at_least_one_is_kept(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        CheckpointStore(tmp_path / "none", keep=0)
    assert not (tmp_path / "none").exists()


def test_an_abandoned_draft_disappears(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def interrupted() -> None:
        with store.draft() as draft:
            (draft / "half").write_text("x")
            raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError):
        interrupted()
    assert names(store) == []
    (tmp_path / ".draft-1-2").mkdir()  # of a daemon that was killed
    assert names(CheckpointStore(tmp_path)) == []


def test_a_file_that_is_no_tensors(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match="x: "):
        read_tensors(tmp_path / "x")


def test_a_process_that_ends_at_once_leaves_no_draft_of_its_own(tmp_path: Path) -> None:
    """Those of another process, and what a newer checkpoint replaces, are none of its business."""
    kept = [f".draft-{os.getpid() + 1}-5", f"{OLD_PREFIX}ckpt-00000003"]
    for name in (f".draft-{os.getpid()}-7", *kept):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_bytes(b"x")
    forget_drafts(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)
    forget_drafts(tmp_path / "nothing")


def test_the_best_is_kept_besides_the_newest(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for round, loss in enumerate((2.0, 1.5, 1.7, None, 1.9, 2.4), start=1):
        make(store, round, loss=loss)
    assert names(store) == ["ckpt-00000002", "ckpt-00000005", "ckpt-00000006"]
    assert store.best() == tmp_path / "ckpt-00000002"
    assert store.latest().checkpoint == store.latest(best=False).checkpoint
    newest, best = store.latest().checkpoint, store.latest(best=True).checkpoint
    assert newest is not None
    assert best is not None
    assert (newest.facts.round, best.facts.round) == (6, 2), "--resume goes on from the newest"
    make(store, 7, loss=1.4)  # better than the best: that goes as any other
    assert names(store) == ["ckpt-00000006", "ckpt-00000007"]


def test_one_of_another_run_is_never_the_best(tmp_path: Path) -> None:
    """It would be kept for ever, and exported as this run's."""
    store = CheckpointStore(tmp_path)
    make(store, 3, run="before", loss=0.5)
    for round, loss in enumerate((2.0, 1.9, 2.4), start=4):
        make(store, round, loss=loss)
    assert store.best() == tmp_path / "ckpt-00000005"
    assert names(store) == ["ckpt-00000005", "ckpt-00000006"]


def test_where_the_best_is_damaged_the_next_is_taken(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=3)
    for round, loss in enumerate((1.5, 1.7, 1.6), start=1):
        made = make(store, round, loss=loss)
        if round == 1:
            truncate(made.path)
    found = store.latest(best=True)
    assert found.checkpoint is not None
    assert found.checkpoint.facts.round == 3
    assert "ckpt-00000003 is tried" in found.damaged[0].fix


def test_one_that_lacks_files_holds_no_place_as_the_best(tmp_path: Path) -> None:
    """A later one could not be kept until it was better than what nobody can read."""
    store = CheckpointStore(tmp_path, keep=1)
    truncate(make(store, 1, loss=1.5).path)
    for round, loss in ((2, 1.6), (3, 1.7), (4, 1.8)):
        make(store, round, loss=loss)
    assert names(store) == ["ckpt-00000002", "ckpt-00000004"]
    assert store.best() == tmp_path / "ckpt-00000002"


def test_one_that_was_found_damaged_holds_no_place_as_the_best(tmp_path: Path) -> None:
    """As a power cut leaves the newest one: as long as it was, with other bytes."""
    before = CheckpointStore(tmp_path)
    for round, loss in ((1, 1.7), (2, 1.5)):
        path = make(before, round, loss=loss).path / "outer.safetensors"
    path.write_bytes(bytes(path.stat().st_size))
    store = CheckpointStore(tmp_path, keep=1)
    found = store.latest().checkpoint
    assert found is not None
    assert (found.facts.round, store.best()) == (1, found.path)
    make(store, 3, loss=1.8)
    assert names(store) == ["ckpt-00000001", "ckpt-00000003"]
    make(store, 2, loss=1.6)  # in its place, and whole
    make(store, 4, loss=1.8)
    assert names(store) == ["ckpt-00000002", "ckpt-00000004"]


def test_one_that_says_nothing_of_its_loss_is_read_as_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = make(store, 1).path / INDEX
    index = json.loads(path.read_text())
    del index["validation"], index["digest"]
    path.write_text(json.dumps(index))
    found = store.latest().checkpoint
    assert found is not None
    assert found.facts.validation is None
    assert store.best() is None
