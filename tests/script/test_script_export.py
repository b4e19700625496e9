"""``node export`` of a script's run: what it trains, by its own names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from script_kit import Played, silent

from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, write_outer
from node.trainer.channel import Save
from node.trainer.trainer_state import FOLDER, MOMENTS
from protocols.identity import Identity

pytestmark = pytest.mark.usefixtures("own_directory")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def played() -> Played:
    return Played(silent)


def checkpoint(played: Played, home: Path, folder: str = FOLDER) -> Path:
    """One of this script's run; ``folder``: which has the trainer's files, empty for none."""
    layout = played.layout
    script = {"layout": layout.digest, "parameters": layout.size, "dense": layout.dense}
    manifest = Manifest.model_validate({"name": "script", "script": script})
    signed = SignedManifest.create(manifest, Identity.from_seed(bytes(32)))
    store = CheckpointStore(home / "checkpoints")
    with store.draft() as draft:
        write_outer(draft, OuterFiles(played.base, {"v": torch.zeros(layout.size)}, signed))
        if folder:
            played.joined._progress.checkpoint(Save(str(draft)))
            played.joined._progress.files.finish()
            (draft / FOLDER).rename(draft / folder)
        facts = Facts(run=manifest.run_id.hex(), round=3, step=30, tokens=300)
        return store.commit(draft, facts).path


@pytest.mark.parametrize("folder", [FOLDER, MOMENTS])
def test_the_outer_parameters_are_written_by_the_script_s_names(
    command: Command, played: Played, tmp_path: Path, folder: str
) -> None:
    """Also of a checkpoint made when the script had been killed, which has its earlier moments."""
    made = checkpoint(played, tmp_path / "state", folder)
    status, out, told = command("export", tmp_path / "out", "--from", tmp_path / "state")
    assert (status, told) == (0, "")
    size = played.layout.size
    assert out == f"{tmp_path / 'out'}: {size} parameters of {made.name} in 1 file\n"
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    outer = played.joined.outer_parameters()
    assert written.keys() == outer.keys()
    assert all(tensor.equal(outer[name]) for name, tensor in written.items())
    played.model.load_state_dict(written)
    usual = tmp_path / "usual"
    usual.touch()
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode == usual.stat().st_mode


def test_where_the_names_are_not_known_it_is_said_how_to_have_them(
    command: Command, played: Played, tmp_path: Path
) -> None:
    checkpoint(played, tmp_path / "state", "")
    status, _, told = command("export", tmp_path / "out", "--from", tmp_path / "state")
    assert status == 1
    assert told.startswith("error E602")
    assert "this run's model is its script's" in told
    assert "node.join(..., resume=True)" in told
    assert "island.outer_parameters()" in told
    assert not (tmp_path / "out").exists()


def test_what_belongs_to_a_model_of_the_library_is_not_asked_of_a_script_s(
    command: Command, played: Played, tmp_path: Path
) -> None:
    made = checkpoint(played, tmp_path / "state")
    status, _, told = command("export", tmp_path / "out", "--from", made, "--like", tmp_path)
    assert status != 0
    assert told.startswith("error E204")
