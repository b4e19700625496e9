"""What a start reads back: here, or from the second place, and every file once."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from checkpoint_kit import files_read

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, read_newest, write_outer
from node.checkpoints.restoring import restore
from node.monitor.event_log import EventLog
from node.monitor.events import Problem
from node.statedir import StateDir
from node.trainer.layout import Layout
from protocols.errors import OperatorError
from protocols.identity import Identity


def made(store: CheckpointStore, round_: int = 0, loss: float | None = None) -> Path:
    """A checkpoint whose parameters are all one."""
    signed = SignedManifest.create(Manifest(), Identity.from_seed(bytes(32)))
    size = Layout.of_manifest(signed.manifest).size
    with store.draft() as draft:
        write_outer(draft, OuterFiles(torch.ones(size), {"v": torch.zeros(size)}, signed))
        run = signed.run_id.hex()
        facts = Facts(run=run, round=round_, step=0, tokens=0, validation=loss)
        return store.commit(draft, facts).path


@pytest.mark.parametrize("damaged", ["ckpt-00000000", "ckpt-00000001"])
def test_where_none_here_is_whole_the_second_place_has_one(tmp_path: Path, damaged: str) -> None:
    store = CheckpointStore(tmp_path / "here")
    copy = CheckpointCopy(str(tmp_path / "there"), keep=2)
    path = made(store)
    copy.put(path)
    os.truncate(path / "outer.safetensors", 100)
    path.rename(path.with_name(damaged))
    events: list[Any] = []
    log = cast(EventLog, SimpleNamespace(emit=events.append))
    with pytest.raises(OperatorError, match="no checkpoint in"):
        restore(store, log)
    restored = restore(store, log, copy)
    assert restored is not None
    assert restored.base.unique().tolist() == [1]
    assert {type(event) for event in events} == {Problem}


def test_the_best_comes_back_from_the_second_place_as_well(tmp_path: Path) -> None:
    store, copy = CheckpointStore(tmp_path / "lost"), CheckpointCopy(str(tmp_path / "there"), 1)
    for round_, loss in ((3, 1.5), (0, 2.0)):  # that of a split's other side, and its own
        copy.put(made(store, round_, loss))
    here = CheckpointStore(tmp_path / "here")
    restored = restore(here, cast(EventLog, SimpleNamespace(emit=None)), copy)
    assert restored is not None
    assert (restored.facts.round, here.best()) == (0, here.directory / "ckpt-00000003")


@pytest.mark.parametrize("resumes", [True, False])
def test_what_is_read_back_is_read_through_once_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    """Hundreds of GB of a large model take minutes each time."""
    store = CheckpointStore(StateDir(tmp_path).checkpoints)
    made(store)
    read = files_read(monkeypatch)
    if resumes:
        assert restore(store, cast(EventLog, SimpleNamespace(emit=None))) is not None
    else:
        read_newest(tmp_path)
    assert len(read) == len(set(read)) > 1
