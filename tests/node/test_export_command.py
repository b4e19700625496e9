"""``node export`` of checkpoints on this machine: which one, whole or not, and where to."""

import os
import shutil

import pytest
from checkpoint_kit import flip

import node.checkpoints.checkpoint
import node.checkpoints.outer_files
from bootstrap.manifest import Manifest
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, read_newest, write_outer
from protocols.identity import Identity

pytestmark = pytest.mark.usefixtures("own_directory")


@pytest.fixture
def checkpoint(tmp_path):
    """A state directory with one checkpoint of a model that is a ramp."""
    import torch

    from node.trainer.layout import Layout

    manifest = Manifest()
    size = Layout.of_config(manifest.model).size
    signed = SignedManifest.create(manifest, Identity.from_seed(bytes(32)))
    outer = OuterFiles(torch.arange(size) / size, {"v": torch.zeros(size)}, signed)
    store = CheckpointStore(tmp_path / "state" / "checkpoints")
    with store.draft() as draft:
        write_outer(draft, outer)
        facts = Facts(run=manifest.run_id.hex(), round=3, step=30, tokens=300)
        return outer, store.commit(draft, facts).path


def test_outer_files_round_trip(checkpoint, tmp_path):
    outer, path = checkpoint
    for source in (path, tmp_path / "state"):
        back = read_newest(source)[1]
        assert back.base.equal(outer.base)
        assert back.vectors["v"].equal(outer.vectors["v"])
        assert back.signed == outer.signed


def test_export(command, checkpoint, tmp_path):
    status, out, _ = command(
        "export", "--to", "hf", tmp_path / "model", "--from", tmp_path / "state"
    )
    assert status == 0
    size = len(checkpoint[0].base)
    told = f"{tmp_path / 'model'}: {size:,} parameters of {checkpoint[1].name} in 5 files"
    assert out.strip() == told
    assert (tmp_path / "model" / "config.json").exists()
    assert command("export", tmp_path / "model", "--from", checkpoint[1])[2].startswith(
        "error E602"
    )


def test_a_checkpoint_is_exported_wherever_it_lies(command, checkpoint, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint[1], copy / checkpoint[1].name)
    kept = tmp_path / "state" / "checkpoints" / f"before-{checkpoint[1].name}"
    shutil.copytree(checkpoint[1], kept)
    for number, source in enumerate((copy, tmp_path / "state" / "checkpoints", kept)):
        status, _, told = command("export", tmp_path / f"model{number}", "--from", source)
        assert (status, told) == (0, "")
    missing = command("export", tmp_path / "other", "--from", tmp_path / "nowhere")[2]
    assert "why: there is no such directory\n" in missing


def test_an_export_fills_the_folder_that_is_there(command, checkpoint, tmp_path, monkeypatch):
    """As that of a mounted disk, which nothing can be renamed to, or the current one."""
    folder = tmp_path / "disk"
    (folder / "lost+found").mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    before = folder.stat().st_ino
    status, _, told = command("export", tmp_path / "link", "--from", tmp_path / "state")
    assert (status, told) == (0, "")
    assert (folder / "config.json").exists()
    assert folder.stat().st_ino == before
    assert [file.name for file in folder.iterdir() if file.is_dir()] == ["lost+found"]
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    status, _, _ = command("export", ".", "--from", tmp_path / "state")
    assert (status, len(os.listdir("."))) == (0, 5)


def test_what_is_in_the_way_of_an_export_is_told_before_anything_is_read(
    command, checkpoint, tmp_path
):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for place in ("full", "full/file"):
        told = command("export", tmp_path / place, "--from", tmp_path / "nowhere")[2]
        assert told.startswith("error E602")


def test_export_leaves_alone_what_a_node_is_writing(command, checkpoint, tmp_path):
    """It may be called while the node runs: nothing of the state directory is its own."""
    store = CheckpointStore(tmp_path / "state" / "checkpoints")
    with store.draft() as draft:
        write_outer(draft, checkpoint[0])
        assert command("export", tmp_path / "model", "--from", tmp_path / "state")[0] == 0
        facts = Facts(run=checkpoint[0].signed.run_id.hex(), round=4, step=40, tokens=400)
        store.commit(draft, facts)
    assert read_newest(tmp_path / "state")[1].base.equal(checkpoint[0].base)


def test_export_of_the_best(command, checkpoint, tmp_path):
    store = CheckpointStore(tmp_path / "other" / "checkpoints")
    given = ("--from", tmp_path / "other", "--best")
    for number, loss in ((7, None), (8, 1.5), (9, 1.7)):
        with store.draft() as draft:
            write_outer(draft, checkpoint[0])
            run = checkpoint[0].signed.run_id.hex()
            facts = Facts(run=run, round=number, step=1, tokens=1, validation=loss)
            store.commit(draft, facts)
        if loss is None:
            status, _, told = command("export", tmp_path / "none", *given)
            assert (status, told[:10]) == (1, "error E404")
            assert "has a validation loss" in told
    status, out, told = command("export", tmp_path / "best", *given)
    assert (status, told) == (0, "")
    assert "of ckpt-00000008 in" in out
    one = store.paths()[0]
    status, _, told = command("export", tmp_path / "one", "--from", one, "--best")
    assert (status, told[:10]) == (2, "error E204")
    flip(best := store.directory / "ckpt-00000008")
    status, out, told = command("export", tmp_path / "second", *given)
    assert status == 0
    assert "of ckpt-00000009 in" in out
    assert told.startswith("warning E404: checkpoint ckpt-00000008 cannot be used\n")
    assert f"fix: remove {best}, so that" in told
    flip(one)
    status, _, told = command("export", tmp_path / "third", *given)
    assert (status, told[:10]) == (1, "error E404")
    assert "ckpt-00000008: outer.safetensors has another hash" in told
    assert "leave out --best" in told


@pytest.mark.parametrize("when", ["verify", "read_outer"])
def test_a_checkpoint_that_goes_while_it_is_read_is_not_the_last(
    command, checkpoint, tmp_path, monkeypatch, when
):
    """Of a node whose rounds are short: the newest one may be one too many by then."""
    store = CheckpointStore(tmp_path / "state" / "checkpoints", keep=1)
    module = node.checkpoints.checkpoint if when == "verify" else node.checkpoints.outer_files
    read, rounds = getattr(module, when), iter((7, 8))

    def slow(path, *verified):
        for number in rounds:
            with store.draft() as draft:
                write_outer(draft, checkpoint[0])
                facts = Facts(run=checkpoint[0].signed.run_id.hex(), round=number, step=1, tokens=1)
                store.commit(draft, facts)
            break
        return read(path, *verified)

    monkeypatch.setattr(module, when, slow)
    status, out, told = command("export", tmp_path / "model", "--from", tmp_path / "state")
    assert (status, told) == (0, "")
    assert "of ckpt-00000008 in" in out


def test_export_in_files_of_a_size(command, checkpoint, tmp_path):
    given = ("export", tmp_path / "model", "--from", tmp_path / "state", "--max-shard-size")
    for wrong in ("0", "large", "-5MB"):
        status, _, told = command(*given, wrong)
        assert status == 2
        assert told.startswith("error E204: --max-shard-size cannot be")
    assert command(*given, "100kB")[0] == 0
    files = list((tmp_path / "model").glob("model-*-of-*.safetensors"))
    assert len(files) > 1
    assert sum(file.stat().st_size for file in files) >= 4 * len(checkpoint[0].base)


def test_export_of_what_is_not_there(command, checkpoint, tmp_path):
    assert command("export", tmp_path / "m", "--from", tmp_path)[2].startswith("error E404")
    missing = command("export", tmp_path / "m", "--from", tmp_path / "ckpt-1")[2]
    assert "why: No such file or directory\n" in missing
    assert command("export", "--to", "gguf", tmp_path / "m", "--from", tmp_path)[0] == 2
    path = checkpoint[1] / "outer.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert command("export", tmp_path / "m", "--from", checkpoint[1])[2].startswith("error E404")
    assert not (tmp_path / "m").exists()
