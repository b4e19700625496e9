"""The checkpoint of before a start without --resume: it stays a while, in case it was a slip."""

from __future__ import annotations

import errno
import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_kit import make

from node.checkpoints import spared
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore, DiskFullError
from node.checkpoints.index import bytes_in, said_by, verify
from node.checkpoints.names import DRAFT_PREFIX
from node.participation import Participation

AT = "before-ckpt-00000260"


def started(directory: Path) -> CheckpointStore:
    store = CheckpointStore(directory, keep=1)
    store.begin_anew()
    return store


@pytest.fixture
def anew(tmp_path: Path) -> CheckpointStore:
    make(CheckpointStore(tmp_path), 260)
    return started(tmp_path)


@pytest.mark.parametrize("first", [260, 272])  # the same round: as who leaves again at once
def test_it_is_kept_aside_whole_and_once(anew: CheckpointStore, first: int) -> None:
    said = said_by(anew.directory / "ckpt-00000260")
    assert said is not None
    assert (said.run, os.listdir(anew.directory)) == ("r", ["ckpt-00000260"])
    for round_ in (first, 278, 284):
        make(anew, round_)
        assert sorted(os.listdir(anew.directory)) == [AT, f"ckpt-{round_:08d}"]
        assert verify(anew.directory / AT).round == 260
    again = started(anew.directory)  # by somebody who starts it so each time
    make(again, 290)
    assert sorted(os.listdir(anew.directory)) == [AT, "ckpt-00000290"]


@pytest.mark.parametrize("first", [260, 272])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("loss", [None, 1.5])  # the latter: it is the best as well
def test_it_is_kept_at_whatever_instant_the_node_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int, after: bool, loss: float | None
) -> None:
    """Before or after each change of a name."""

    def killed_at(number: int, directory: Path) -> bool:
        """In its first checkpoint since it began anew; False: it made no so many changes."""
        earlier = CheckpointStore(directory)
        for round_ in (254, 260):
            make(earlier, round_, peer="earlier", loss=loss)
        store, rename, left = started(directory), Path.rename, number

        def kill(path: Path, target: Path) -> Path:
            nonlocal left
            left -= path.exists()  # else nothing changes
            if not left and not after:
                raise KeyboardInterrupt
            renamed = rename(path, target)
            if not left:
                raise KeyboardInterrupt
            return renamed

        with monkeypatch.context() as patched, suppress(KeyboardInterrupt):
            patched.setattr(Path, "rename", kill)
            make(store, first, loss=2.0)
            return False
        return True

    number = 1
    while killed_at(number, directory := tmp_path / str(number)):
        again = CheckpointStore(directory).paths()[0]  # as who resumes now would find it
        said = said_by(again)
        assert said is not None
        kept = again if said.peer else directory / AT
        assert verify(kept).peer == "earlier"
        make(started(directory), 278, loss=2.0)
        assert verify(directory / AT).peer == "earlier"
        best = CheckpointStore(directory).best()
        assert best is not None
        assert verify(best).validation == (loss or 2.0)
        number += 1
    assert number > 2


@pytest.fixture
def best_anew(tmp_path: Path) -> CheckpointStore:
    """What is here of before is the best of the run as well."""
    earlier = CheckpointStore(tmp_path)
    for round_, loss in ((254, 2.0), (260, 1.5)):
        make(earlier, round_, loss=loss)
    return started(tmp_path)


@pytest.mark.parametrize("first", [260, 272])
def test_as_the_best_it_stays_for_longer_than_a_day(best_anew: CheckpointStore, first: int) -> None:
    """The state that a run which gets worse is to go back to was gone with it."""
    make(best_anew, first, loss=3.0)
    for round_ in (278, 284):
        found = best_anew.latest(best=True).checkpoint, best_anew.latest().checkpoint
        assert [one.facts.validation for one in found if one is not None] == [1.5, 3.0]
        assert AT in os.listdir(best_anew.directory)
        make(best_anew, round_, loss=3.0)
    old = time.time() - spared.KEPT_S - 1
    os.utime(best_anew.directory / AT, (old, old))
    make(best_anew, 290, loss=3.0)
    assert AT not in os.listdir(best_anew.directory)
    found = best_anew.latest(best=True).checkpoint, best_anew.latest().checkpoint
    assert [one.facts.validation for one in found if one is not None] == [1.5, 3.0]
    make(best_anew, 296, loss=1.4)
    assert os.listdir(best_anew.directory) == ["ckpt-00000296"], "then it goes as any other"


@pytest.mark.parametrize(("loss", "run"), [(1.4, "r"), (3.0, "other")])
def test_it_is_kept_once_where_it_is_not_the_best_any_more(
    best_anew: CheckpointStore, loss: float, run: str
) -> None:
    make(best_anew, 272, loss=loss, run=run)
    assert sorted(os.listdir(best_anew.directory)) == [AT, "ckpt-00000272"]
    assert verify(best_anew.directory / AT).validation == 1.5


def test_a_better_one_within_the_day_leaves_it(best_anew: CheckpointStore) -> None:
    make(best_anew, 272, loss=3.0)
    make(best_anew, 278, loss=1.4)
    assert sorted(os.listdir(best_anew.directory)) == [AT, "ckpt-00000278"]
    assert verify(best_anew.directory / AT).validation == 1.5


def test_both_of_its_names_take_the_room_of_one(best_anew: CheckpointStore) -> None:
    made = make(best_anew, 272, loss=3.0)
    assert {AT, "ckpt-00000260"} < set(os.listdir(best_anew.directory))
    there = bytes_in(made.path) + bytes_in(best_anew.directory / AT)
    assert best_anew.held() == there


def test_where_there_are_no_hard_links_it_stays_as_the_best(
    best_anew: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    for round_ in (272, 278):
        make(best_anew, round_, loss=3.0)
    assert sorted(os.listdir(best_anew.directory)) == ["ckpt-00000260", "ckpt-00000278"]


@pytest.mark.parametrize("loss", [None, 1.5])
def test_one_that_cannot_take_its_place_gives_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loss: float | None
) -> None:
    make(CheckpointStore(tmp_path), 260, loss=loss)
    anew = started(tmp_path)

    def refuse(path: Path, target: Path, rename: Any = Path.rename) -> Path:
        if path.name.startswith(DRAFT_PREFIX):
            raise OSError(errno.EIO, "Input/output error")
        return Path(rename(path, target))

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", refuse)
        with pytest.raises(CheckpointError):
            make(anew, 272)
    assert os.listdir(tmp_path) == ["ckpt-00000260"]
    make(anew, 278)
    best = ["ckpt-00000260"] if loss else []
    assert sorted(os.listdir(anew.directory)) == [AT, *best, "ckpt-00000278"]


def test_who_resumes_keeps_no_more_than_before(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    for round_ in (260, 272):
        make(store, round_)
    assert os.listdir(tmp_path) == ["ckpt-00000272"]


@pytest.mark.parametrize("days", [-1, 1])  # later than now: kept before the clock was put right
def test_it_goes_after_a_day(anew: CheckpointStore, days: int) -> None:
    make(anew, 272)
    old = time.time() - days * (spared.KEPT_S + 1)
    os.utime(anew.directory / AT, (old, old))
    make(anew, 278)
    assert os.listdir(anew.directory) == ["ckpt-00000278"]


def test_an_old_one_does_not_stand_in_the_way_of_the_next(anew: CheckpointStore) -> None:
    """As where a node was off for days, or made no checkpoint."""
    make(anew, 272)
    old = time.time() - spared.KEPT_S - 1
    os.utime(anew.directory / AT, (old, old))
    again = started(anew.directory)
    for round_ in (278, 284):
        make(again, round_)
        kept = ["before-ckpt-00000272", f"ckpt-{round_:08d}"]
        assert sorted(os.listdir(again.directory)) == kept


def test_it_takes_no_room_that_the_next_one_needs(
    anew: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(anew, 272)
    usage = shutil.disk_usage(anew.directory)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=100))
    anew.preflight(20_000)  # two of them, with what the two that are here take
    make(anew, 278)
    assert os.listdir(anew.directory) == ["ckpt-00000278"]


def test_a_disk_that_is_full_meanwhile_has_room_for_the_next_one(anew: CheckpointStore) -> None:
    make(anew, 272)
    with pytest.raises(DiskFullError), anew.draft():
        raise OSError(errno.ENOSPC, "No space left on device")
    assert os.listdir(anew.directory) == ["ckpt-00000272"]


@pytest.mark.parametrize("resume", [True, False])
async def test_only_a_start_that_takes_nothing_of_it_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resume: bool
) -> None:
    class Anew(Exception):
        """Far enough."""

    def begin_anew(store: CheckpointStore) -> None:
        raise Anew

    async def restored(store: CheckpointStore) -> None:
        raise KeyError

    monkeypatch.setattr(CheckpointStore, "begin_anew", begin_anew)
    part: Any = SimpleNamespace(
        config=SimpleNamespace(role="seed", resume=resume, keep_checkpoints=1),
        node=SimpleNamespace(home=SimpleNamespace(checkpoints=tmp_path)),
        _restored=restored,
    )
    with pytest.raises(KeyError if resume else Anew):
        await Participation.enter(part, None)  # type: ignore[arg-type]
