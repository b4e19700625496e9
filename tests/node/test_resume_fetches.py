"""``--resume`` after a lost disk: what it says while a checkpoint comes from the second place."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node import headway
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, write_outer
from node.checkpoints.restoring import restore
from node.headway import Headway, from_here_on
from node.monitor.event_log import EventLog
from node.monitor.events import Notice
from node.trainer.layout import Layout
from protocols.identity import Identity


def copies(at: Path, losses: dict[int, float]) -> CheckpointCopy:
    """A second place with checkpoints of these rounds; the last is the newest."""
    signed = SignedManifest.create(Manifest(), Identity.from_seed(bytes(32)))
    size = Layout.of_manifest(signed.manifest).size
    store, copy = CheckpointStore(at / "lost"), CheckpointCopy(str(at / "there"), 1)
    for round_, loss in losses.items():
        with store.draft() as draft:
            write_outer(draft, OuterFiles(torch.ones(size), {"v": torch.zeros(size)}, signed))
            run = signed.run_id.hex()
            facts = Facts(run=run, round=round_, step=0, tokens=0, validation=loss)
            copy.put(store.commit(draft, facts).path)
    return copy


def test_it_says_how_far_each_checkpoint_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model it would say nothing for hours."""
    monkeypatch.setattr(headway, "FIRST_S", 0.0)
    copy, events = copies(tmp_path, {3: 1.5, 0: 2.0}), list[Any]()
    log = cast(EventLog, SimpleNamespace(emit=events.append))
    assert restore(CheckpointStore(tmp_path / "here"), log, copy) is not None
    said = [event.text for event in events if isinstance(event, Notice)]
    assert len(said) == len(events)
    for name in ("ckpt-00000000", "ckpt-00000003"):
        assert any(text.startswith(f"fetches {name} from {copy.url}: 0%, 0.0 of ") for text in said)
    assert "ckpt-00000000" in said[0], "the newest comes first"


def test_what_was_here_before_says_nothing_of_the_speed() -> None:
    now, said = [0.0], list[str]()
    came = from_here_on(Headway(said.append, clock=lambda: now[0]))
    for seconds, done in ((0.0, 9), (10.0, 10)):
        now[0] = seconds
        came(done * 10**9, 20 * 10**9)
    assert said == ["50%, 10.0 of 20.0 GB, 100.0 MB/s, 1m left"]
