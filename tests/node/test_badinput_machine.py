"""What operators get wrong on this machine, by the real command: settings, ports, files."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest
import torch
from address_kit import named
from badinput_kit import CREATOR, OTHER, RUN, START
from checkpoint_kit import flip

from bootstrap.manifest import Model
from bootstrap.signed_manifest import SignedManifest
from node.checkpoints.checkpoint import CheckpointError, CheckpointStore
from node.checkpoints.index import Facts
from node.checkpoints.outer_files import OuterFiles, read_newest, write_outer
from node.config import NodeConfig
from node.daemon import Daemon
from node.entry.own_address import addresses, outward_address
from node.monitor.event_log import EventLog
from node.monitor.events import Notice
from node.statedir import StateDir

pytestmark = pytest.mark.usefixtures("own_directory")

# --- settings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[inner]\nlearning_rate = 1\n", "inner.learning_rate: unknown key"),
        ("[model]\nn_layer = 3\n", "did you mean model.n_layers?"),
        ("[model]\nd_model = 65\n", "no multiple of n_heads"),
        (
            "[rounds]\ncodec = 'int3'\n",
            "rounds.codec = 'int3': must be 'fp32', 'bf16', 'fp16', 'int8'",
        ),
        ("model = [\n", "not valid TOML"),
    ],
)
def test_a_wrong_run_file(refused, tmp_path, text, said):
    file = tmp_path / "run.toml"
    file.write_text(text)
    assert said in refused("E204", "start", "--run", file)[0]


def test_a_wrong_key_of_the_settings_file(refused, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "node.toml").write_text('peer = "a:1"\n')
    text, _ = refused("E204", "start")
    assert "did you mean peers?" in text
    assert "node.toml" in text


def test_a_wrong_environment_variable(refused, monkeypatch):
    monkeypatch.setenv("ATOLL_PEER", "a:1")
    assert "did you mean ATOLL_PEERS?" in refused("E204", "start")[0]


def test_a_wrong_change_of_a_preset(refused):
    assert "did you mean inner.eps?" in refused("E204", "start", "--set", "inner.epsi=1")[0]
    text, _ = refused("E204", "start", "--set", "inner.betas=0.9,0.95")
    assert "inner.betas is a list, and '0.9,0.95' is none: --set 'inner.betas=[0.9, 0.95]'" in text


# --- this machine -----------------------------------------------------------------------------


def test_a_port_in_use(refused):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text, _ = refused("E303", "start", "--listen", f"127.0.0.1:{port}")
        assert f"process {os.getpid()} listens there" in text
        free = re.search(r"--listen 127\.0\.0\.1:(\d+)", text)
        assert free is not None
        with socket.create_server(("127.0.0.1", int(free[1]))):
            pass  # it is free indeed
        text, _ = refused("E303", "start", "--listen", "127.0.0.1:0", "--api", f"127.0.0.1:{port}")
        assert "--api 127.0.0.1:" in text


async def test_another_port_than_the_usual_one_is_told_of(tmp_path):
    """A router forwards what the operator was told to forward."""
    log = EventLog()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = Daemon(NodeConfig(dir=tmp_path, listen=f"127.0.0.1:{port}"), None)  # as by default
        transport = await daemon._open_transport(OTHER, log)
        assert transport.listening is not None
        _, other = transport.listening
        await transport.aclose()
    (said,) = [record.event for record in log.recent]
    assert isinstance(said, Notice)
    assert f"port {port} is in use: listens on {other}, the one to forward" in said.text


async def test_a_name_that_is_loopback_here_has_a_node_listen_on_all_and_say_so(
    tmp_path, monkeypatch
):
    """As Debian has a machine's own name: others would be told of 127.0.1.1."""
    named(monkeypatch, "gpu1", "127.0.1.1")
    log = EventLog()
    config = NodeConfig(dir=tmp_path, listen="gpu1:0")
    transport = await Daemon(config, None)._open_transport(OTHER, log)
    assert transport.listening is not None
    host, port = transport.listening
    assert addresses(config, transport.listening) == [f"{outward_address()}:{port}"]
    await transport.aclose()
    assert host == "0.0.0.0"
    (said,) = [record.event for record in log.recent]
    assert isinstance(said, Notice)
    assert "on all addresses, not on gpu1 alone: that name is loopback here" in said.text


def test_an_address_that_is_not_this_machines(refused):
    text, _ = refused("E102", "start", "--listen", "203.0.113.7:4390")
    assert "cannot listen on '203.0.113.7:4390'" in text


def test_two_nodes_in_one_directory(refused, tmp_path):
    first = StateDir(tmp_path / "state")
    first.lock()
    (tmp_path / "state" / "events.jsonl").write_text("")
    text, events = refused("E105", *START)
    first.unlock()
    assert f"process {os.getpid()}" in text
    assert not events  # the other's log is not written into


def test_a_directory_that_cannot_be(refused, tmp_path):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused("E105", *START, "--dir", tmp_path / "file" / "x")[0]


@pytest.mark.parametrize("damage", ["garbage", "open to others"])
def test_a_key_that_is_none(refused, tmp_path, damage):
    key = tmp_path / "key.pem"
    if damage == "garbage":
        key.write_text("-----BEGIN NOTHING-----\n")
        key.chmod(0o600)
    else:
        OTHER.save(key)
        key.chmod(0o644)
    before = key.read_bytes()
    text, _ = refused("E104", *START, "--identity", key)
    assert str(key) in text
    assert key.read_bytes() == before


@pytest.mark.parametrize("kind", ["missing", "empty folder", "binary", "too short"])
def test_a_corpus_that_is_none(refused, tmp_path, kind):
    text_file = tmp_path / "text"
    if kind == "empty folder":
        text_file.mkdir()
    elif kind == "binary":
        text_file.write_bytes(bytes(range(256)) * 100)
    elif kind == "too short":
        text_file.write_text("Hello.")
    text, _ = refused("E601", *START, "--data", text_file)
    assert str(text_file) in text or kind == "too short"


def test_no_cuda_device(refused):
    if torch.cuda.is_available():
        devices = torch.cuda.device_count()
        arguments: tuple[object, ...] = ("--nproc", devices + 1)
    else:
        arguments = ()
    text, _ = refused("E403", *START, "--device", "cuda", *arguments)
    assert "--device cpu" in text


# --- checkpoints ------------------------------------------------------------------------------


def checkpoint(directory: Path, round_: int) -> Path:
    """A checkpoint without a trainer's part, as after ``round_`` rounds."""
    vector = torch.zeros(100)
    manifest = RUN.model_copy(update={"model": Model(n_layers=1)})
    signed = SignedManifest.create(manifest, CREATOR)
    store = CheckpointStore(directory / "checkpoints", keep=5)
    with store.draft() as draft:
        write_outer(draft, OuterFiles(vector, {"v": vector}, signed))
        facts = Facts(run=signed.run_id.hex(), round=round_, step=1, tokens=1)
        return store.commit(draft, facts).path


def test_every_checkpoint_is_damaged(refused, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    flip(checkpoint(state, 1))
    index = checkpoint(state, 2) / "checkpoint.json"
    index.write_bytes(index.read_bytes()[:40])
    before = {p: p.read_bytes() for p in state.rglob("*") if p.is_file()}
    text, events = refused("E404", *START, "--resume")
    told = [e for e in events if e["kind"] == "problem"]
    assert [e["code"] for e in told] == ["E404", "E404"]
    assert "ckpt-00000002: checkpoint.json does not parse" in text
    assert "ckpt-00000001: outer.safetensors has another hash" in text
    fix = text.rpartition("fix:")[2]  # of what ends it
    assert "--peers" in fix
    assert "nothing to do" not in fix
    with pytest.raises(CheckpointError, match=r"none in it is whole .*another hash"):
        read_newest(state)
    for path, content in before.items():
        assert path.read_bytes() == content  # damaged as they are, they are not thrown away


def test_nothing_to_resume(refused):
    text, _ = refused("E404", *START, "--resume")
    assert "no checkpoint" in text


def test_a_directory_that_was_copied_without_its_key(refused, tmp_path):
    """Nobody is there who would let a new key into the run: it would train for nothing."""
    state = tmp_path / "state"
    state.mkdir()
    checkpoint(state, 0)
    for _ in range(2):  # also when the new key has been saved
        text, _ = refused("E104", *START, "--resume")
        assert "ckpt-00000000 was made with another key" in text
        assert "--peers" in text
