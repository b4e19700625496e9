"""A run that an earlier version made goes on, though this one would not make it any more."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from blake3 import blake3
from identity_kit import identity
from pydantic import ValidationError

import node.doctor.run
from bootstrap.manifest import Manifest
from bootstrap.manifest_modes import with_defaults
from bootstrap.signed_manifest import PURPOSE, SignedManifest
from diloco.optimizers import named
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, read_newest, write_outer
from node.checkpoints.restoring import restore
from node.config import resolve
from node.entry.entrance import Entrance
from node.modes import doubts
from node.monitor.event_log import EventLog
from node.runtime import Node
from node.statedir import StateDir
from node.trainer.layout import Layout
from node.trainer.settings import TrainerSettings
from protocols import envelope
from protocols.errors import OperatorError, OtherVersion
from protocols.identity import Identity
from protocols.messages import ManifestText

KEPT = {"mode": "async", "rounds": {"fragments": 2}}  # of which half of the work was kept before
WARMED = {"outer": {"optimizer": "adam"}}
MODEL = {"d_model": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "d_ff": 16}


def of_before(tables: dict[str, Any], **changes: dict[str, Any]) -> Manifest:
    """As an earlier version made it of these tables."""
    made = Manifest.model_validate(with_defaults(tables | {"model": MODEL}))
    changed = {
        name: getattr(made, name).model_copy(update=update) for name, update in changes.items()
    }
    return made.model_copy(update=changed)


RUNS = [
    (of_before(KEPT, rounds={"alpha": 0.5}), "rounds.alpha 0.5 where a round begins"),
    (of_before(WARMED, outer={"momentum_start": 0.5}), "one β₁ from the first round on"),
    (of_before({"mode": "async"}, outer={"optimizer": "adam"}), "full outer step"),
]


@pytest.mark.parametrize(("run", "why"), RUNS)
def test_it_is_read_and_told_of_but_made_no_more(run: Manifest, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Manifest.model_validate(run.model_dump())
    read = Manifest.parse(run.canonical())
    assert read.run_id == run.run_id
    [told] = [doubt for doubt in doubts(read, schedule=False) if why in doubt]
    assert told.startswith("an earlier version made this run")


def test_a_run_of_this_version_is_not_said_to_be_an_earlier_one_s() -> None:
    for tables in ({}, KEPT, WARMED):
        assert doubts(Manifest.model_validate(tables), schedule=False) == []


@pytest.mark.parametrize(("run", "why"), RUNS)
def test_its_ranks_and_commands_read_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, run: Manifest, why: str
) -> None:
    settings = TrainerSettings(manifest=run, tokens="x")
    again = TrainerSettings.model_validate({**dict(settings), "micro_batch": 1})
    written = again.write(tmp_path).read_bytes()
    assert TrainerSettings.model_validate_json(written).manifest == run
    plain = json.loads(run.model_dump_json())
    monkeypatch.setattr(node.doctor.run, "fetch", lambda directory: {"run": {"manifest": plain}})
    monkeypatch.setattr(StateDir, "holder", lambda home: 1)
    assert node.doctor.run.of_directory(tmp_path) == run
    here: Any = SimpleNamespace(
        state=SimpleNamespace(run=SimpleNamespace(id="", manifest=plain)),
        home=SimpleNamespace(root=tmp_path),
    )
    assert Node._flags_again(here) is None  # another like it cannot be made


def checkpoint(place: Path, signed: SignedManifest, run: bytes) -> Path:
    """A state directory with a checkpoint of this run."""
    size = Layout.of_manifest(signed.manifest).size
    rule, fragments = named(signed.manifest.outer.optimizer), signed.manifest.rounds.fragments
    vectors = {name: torch.zeros(size) for name in rule.vectors}
    vectors |= {name: torch.zeros(fragments) for name in rule.numbers}
    store = CheckpointStore(place / "checkpoints")
    with store.draft() as draft:
        write_outer(draft, OuterFiles(torch.ones(size), vectors, signed))
        facts = Facts(run=run.hex(), round=0, step=0, tokens=0)
        return store.commit(draft, facts).path


def refused(place: Path) -> list[OperatorError]:
    """What --resume and the export say of it."""
    store, log = CheckpointStore(place / "checkpoints"), cast(EventLog, SimpleNamespace(emit=None))
    found = []
    for read in (lambda: restore(store, log), lambda: read_newest(place)):
        with pytest.raises(OperatorError) as caught:
            read()
        found.append(caught.value)
    return found


def signed_as(canonical: bytes) -> tuple[SignedManifest, bytes]:
    """Anything, signed as a manifest; beside it, which run that is."""
    run = blake3(canonical).digest()
    data = envelope.seal(
        identity(1),
        ManifestText(canonical),
        purpose=PURPOSE,
        expires=253_402_300_800.0,
        sequence=0,
        run=run,
    )
    return SignedManifest(Manifest.model_validate({"model": MODEL}), identity(1).peer_id, data), run


def test_its_checkpoint_is_gone_on_from_and_exported(tmp_path: Path) -> None:
    signed = SignedManifest.create(RUNS[0][0], Identity.from_seed(bytes(32)))
    checkpoint(tmp_path, signed, signed.run_id)
    store = CheckpointStore(tmp_path / "checkpoints")
    size = Layout.of_manifest(signed.manifest).size
    outer = read_newest(tmp_path)[1]
    assert (outer.signed, len(outer.base)) == (signed, size)
    restored = restore(store, cast(EventLog, SimpleNamespace(emit=None)))
    assert restored is not None
    assert restored.signed == signed


def test_a_checkpoint_of_a_newer_version_says_which_version_is_wanted(tmp_path: Path) -> None:
    """An older checkpoint of the same run, as E404 has it, would be of no use."""
    newer = Manifest().canonical().replace(b'"align":', b'"added":1,"align":')
    checkpoint(tmp_path, *signed_as(newer))
    for error in refused(tmp_path):
        assert error.code == "E202"
        assert "rounds.added: unknown key" in error.why
        assert "the version of Atoll that made it, or upgrade this machine" in error.fix


def test_what_is_no_manifest_of_any_version_is_in_older_checkpoints_as_well(tmp_path: Path) -> None:
    checkpoint(tmp_path, *signed_as(b"{}"[:1]))
    for error in refused(tmp_path):
        assert error.code == "E404"
        assert "all checkpoints of a run have the same manifest" in error.fix


def test_a_damaged_manifest_is_damage_as_any_other(tmp_path: Path) -> None:
    signed = SignedManifest.create(Manifest.model_validate({"model": MODEL}), identity(1))
    path = checkpoint(tmp_path, signed, signed.run_id)
    (path / "manifest.envelope").write_bytes(signed.data[:-1])
    with pytest.raises(OperatorError) as caught:
        read_newest(path)
    assert (caught.value.code, caught.value.fix) == ("E404", "use an older checkpoint")


async def test_who_joins_a_run_of_a_newer_version_is_told_to_upgrade(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def fetched(*_: Any) -> SignedManifest:
        raise OtherVersion("the manifest is none of this version of Atoll: rounds.added")

    monkeypatch.setattr("node.entry.entrance.fetch_manifest", fetched)
    nothing: Any = None
    greeting: Any = SimpleNamespace(
        peer=identity(2).peer_id, welcome=SimpleNamespace(run=bytes(32))
    )
    config = resolve({"dir": str(tmp_path)}, {})
    entrance = Entrance(config, *[nothing] * 4, EventLog(), nothing, lambda peer: "", nothing)
    with pytest.raises(OperatorError, match="manifest is of another version of Atoll") as caught:
        await entrance.take([greeting], None)
    assert caught.value.code == "E202"
    assert "rounds.added" in caught.value.why
    assert "install the version the swarm uses" in caught.value.fix
