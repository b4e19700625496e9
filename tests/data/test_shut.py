"""Folders that this user may not enter, as another user's home: told, whoever is to read there."""

import os
from pathlib import Path

import pytest
import torch

from bootstrap.manifest import Data, Manifest, Model
from node.checkpoints.outer_files import find_checkpoint
from node.data.documents import find_inputs
from node.data.supply import Given, make, usable
from node.hf.export import export_hf
from node.hf.likeness import files_like
from node.trainer.layout import Layout
from protocols.errors import OperatorError

MANIFEST = Manifest(name="r", data=Data(seq_len=16))
QUIET = lambda done, total: None  # noqa: E731


@pytest.fixture
def shut(tmp_path, monkeypatch) -> Path:
    """As the system answers whoever is not root."""
    folder, stat = tmp_path / "shut", os.stat

    def refusing(path, *args, **options):
        if not isinstance(path, int) and folder in Path(os.fsdecode(path)).parents:
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refusing)
    folder.mkdir()
    return folder


@pytest.mark.parametrize("what", ["folder", "text.txt"])
def test_training_text(shut, what, tmp_path):
    with pytest.raises(OperatorError) as caught:
        make(MANIFEST, str(shut / what), Given(), tmp_path, QUIET)
    assert caught.value.code == "E601"
    with pytest.raises(OperatorError, match="denied") as caught:
        find_inputs([str(shut / what)])
    assert caught.value.code == "E601"
    assert not usable(str(shut / what))


def test_a_model_to_start_from(shut, tmp_path):
    with pytest.raises(OperatorError) as caught:
        make(MANIFEST, "", Given(init_from=shut / "model"), tmp_path, QUIET)
    assert caught.value.code == "E606"


def test_a_checkpoint_to_export(shut):
    with pytest.raises(OperatorError, match="denied") as caught:
        find_checkpoint(shut / "state")
    assert caught.value.code == "E404"


def test_where_to_export_and_like_what(shut):
    model = Model()
    with pytest.raises(OperatorError, match="denied") as caught:
        export_hf(model, torch.zeros(Layout.of_config(model).size), shut / "out")
    assert caught.value.code == "E602"
    with pytest.raises(OperatorError, match="denied") as caught:
        files_like(shut / "model", b"")
    assert caught.value.code == "E604"
