"""What a checkpoint without a trainer has of the one before it, and what a trainer makes of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from saving_kit import SlowTrainer, keeper_at
from script_kit import Played
from test_moments import kept, manifest_of
from trainer_kit import Bench, begin, committing

from node.checkpoints import saving
from node.checkpoints.checkpoint import Checkpoint, CheckpointStore, DiskFullError
from node.checkpoints.earlier import moments_in, take_over
from node.checkpoints.index import Facts
from node.checkpoints.restoring import Restored
from node.checkpoints.trainer_files import Taken
from node.conductor import Conductor
from node.trainer.channel import Cold, Command, Report, Save, StepDone, Stop
from node.trainer.trainer_state import FOLDER, MOMENTS, STATE, FragmentState, TrainerState

STEPS = 4
FACTS = Facts(run="aa", round=3, step=9, tokens=9, head="bb", state="cc")


def made(store: CheckpointStore, facts: Facts, folder: str = FOLDER) -> Checkpoint:
    """A checkpoint with a trainer's files."""
    with store.draft() as draft:
        (draft / "outer.safetensors").write_bytes(b"a merge")
        (draft / folder).mkdir()
        standing = TrainerState(
            fragments=(FragmentState(round=facts.round),), round_step=0, step=1, tokens=1,
            rewarm_from=None, optimizer_steps=1,
        )  # fmt: skip
        (draft / folder / STATE).write_text(standing.model_dump_json())
        (draft / folder / "shard-1.safetensors").write_bytes(b"moments")
        return store.commit(draft, facts)


@pytest.mark.parametrize(
    ("was", "there", "becomes"),
    [
        ({}, FOLDER, FOLDER),  # of the same moment: what the trainer had then
        ({"round": 2, "head": "ab"}, FOLDER, MOMENTS),
        ({"round": 2, "head": "ab"}, MOMENTS, MOMENTS),  # of one before that
        ({}, MOMENTS, MOMENTS),
        ({"state": "cd"}, FOLDER, MOMENTS),  # of another side of a split
    ],
)
@pytest.mark.parametrize("links", [True, False])
def test_the_files_of_the_newest_are_taken_over(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    was: dict[str, Any],
    there: str,
    becomes: str,
    links: bool,
) -> None:
    if not links:
        monkeypatch.delattr(os, "link")
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError()), raising=False)
    store = CheckpointStore(tmp_path)
    newest = made(store, FACTS.model_copy(update=was), there).path
    with store.draft() as draft:
        take_over(newest, FACTS, (3,), draft)
        assert [p.name for p in draft.iterdir()] == [becomes]
        assert (draft / becomes / "shard-1.safetensors").read_bytes() == b"moments"
        found = store.commit(draft, FACTS).path
    restored = Restored(found, torch.empty(0), {}, cast(Any, None), (), FACTS)
    assert (restored.trained == found) is (becomes == FOLDER)
    assert (restored.moments is not None) is (becomes == MOMENTS)
    assert not restored.cold


def test_nothing_is_taken_of_a_damaged_one_or_of_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.draft() as draft:
        take_over(None, FACTS, (3,), draft)
        path = made(store, FACTS).path
        assert moments_in(path) == Taken(path, 0)
        (path / FOLDER / "shard-1.safetensors").write_bytes(b"garbage")
        take_over(path, FACTS, (3,), draft)
        assert not os.listdir(draft)
        assert moments_in(path) is None


@pytest.mark.parametrize("folder", [FOLDER, MOMENTS])
def test_of_a_checkpoint_no_more_is_read_than_is_taken_over(tmp_path: Path, folder: str) -> None:
    """The outer state of a large model takes as long to read as the moments do."""
    store = CheckpointStore(tmp_path)
    path = made(store, FACTS.model_copy(update={"round": 2}), folder).path
    (path / "outer.safetensors").write_bytes(b"garbage")
    assert moments_in(path) == Taken(path, 0)
    with store.draft() as draft:
        take_over(path, FACTS, (3,), draft)
        assert (draft / MOMENTS / STATE).exists()


def test_a_full_disk_without_hard_links_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*given: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    def full(*given: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = CheckpointStore(tmp_path)
    path = made(store, FACTS).path
    monkeypatch.setattr(os, "link", refuses)
    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(DiskFullError), store.draft() as draft:
        take_over(path, FACTS, (3,), draft)


def test_an_old_checkpoint_that_cannot_be_read_keeps_no_new_one_from_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(path: Path, folder: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = CheckpointStore(tmp_path)
    path = made(store, FACTS).path
    monkeypatch.setattr("node.checkpoints.earlier.verify", unreadable)
    with store.draft() as draft:
        take_over(path, FACTS, (3,), draft)
        assert not os.listdir(draft)


async def test_the_last_checkpoint_of_a_script_that_was_killed_has_moments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "write_outer", lambda draft, outer: None)
    keeper = keeper_at(tmp_path, [])
    keeper.newest = made(keeper.store, FACTS.model_copy(update={"round": 2})).path
    nothing = SimpleNamespace(checkpoint=None)
    gone = SimpleNamespace(training=False, pace=SlowTrainer().pace, beginning=nothing)
    keeper.conductor = cast(Conductor, gone)
    assert await keeper.save(wait=True)
    found = keeper.store.latest().checkpoint
    assert found is not None
    assert (found.path / MOMENTS / STATE).exists()


def saved(directory: Path, **inner: object) -> Bench:
    """A trainer that has made a checkpoint after some steps."""

    def saving(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == STEPS:
            return [Save(str(directory)), Stop()]
        return []

    bench = Bench(directory / "before", saving, manifest=manifest_of(**inner))
    bench.run(begin())
    return bench


@pytest.mark.parametrize("folder", [FOLDER, MOMENTS])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_trainer_begins_at_the_merge_with_earlier_moments(
    tmp_path: Path, optimizer: str, folder: str
) -> None:
    before = saved(tmp_path, optimizer=optimizer)
    (tmp_path / FOLDER).rename(tmp_path / folder)
    after = Bench(tmp_path / "after", committing(1), manifest=manifest_of(optimizer=optimizer))
    base = after.vectors.tensors()[0].add_(0.01)
    script = after.run(begin(round=7, step=50, moments=str(tmp_path)), Stop())
    mine, own = kept(after), kept(before)
    assert mine.keys() == own.keys()
    assert all(torch.equal(mine[key], own[key]) for key in own)
    for name, view in after.trainer.layout.views(base).items():
        assert torch.equal(after.trainer.weights.parts[name][0], view)
    assert after.trainer.step == 50
    assert after.trainer.rewarm_from is None
    assert not script.of(Cold)


def test_moments_that_were_cold_then_are_so_now(tmp_path: Path) -> None:
    saved(tmp_path)
    told = json.loads((tmp_path / FOLDER / STATE).read_text())
    (tmp_path / FOLDER / STATE).write_text(json.dumps(told | {"rewarm_from": 45}))
    after = Bench(tmp_path / "after", committing(1), manifest=manifest_of())
    after.run(begin(step=50, moments=str(tmp_path)), Stop())
    assert after.trainer.rewarm_from == 45


def test_a_checkpoint_that_is_gone_by_now_leaves_the_trainer_cold(tmp_path: Path) -> None:
    after = Bench(tmp_path / "after", committing(1), manifest=manifest_of())
    script = after.run(begin(step=50, moments=str(tmp_path / "gone")), Stop())
    assert after.trainer.rewarm_from == 50
    assert "No such file" in script.of(Cold)[0].why


def test_a_run_that_forgets_moments_takes_none(tmp_path: Path) -> None:
    saved(tmp_path)
    after = Bench(tmp_path / "after", committing(1), manifest=manifest_of())
    after.run(begin(step=50, moments=str(tmp_path), forgets=True), Stop())
    assert not kept(after)


def test_a_script_has_them_in_the_place_of_its_own(tmp_path: Path) -> None:
    def saving(played: Played, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == STEPS:
            return [Save(str(tmp_path))]
        return []

    one = Played(saving)
    for _ in range(STEPS):
        one.joined.step(8, one.inner_step())
    own = [v.clone() for p in one.model.parameters() for v in one.optimizer.state[p].values()]
    one.joined._progress.files.finish()
    shutil.move(tmp_path / FOLDER, tmp_path / MOMENTS)
    two = Played(lambda played, report: [], trained=1, moments=str(tmp_path))
    mine = [v for p in two.model.parameters() for v in two.optimizer.state[p].values()]
    assert len(mine) == len(own)
    assert all(torch.equal(a, b) for a, b in zip(mine, own, strict=True))
    assert torch.equal(two.theta, two.base)
