"""What operators get wrong on the way in, by the real command: told in words, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3

from bootstrap.handshake import Gate, shared_token
from bootstrap.manifest import Evaluation, Manifest, Model, SignedManifest
from bootstrap.state import BlobServer
from node import outermost
from node.checkpoint import CheckpointStore, Facts
from node.errors import TABLE
from node.outer_files import OuterFiles, write_outer
from node.statedir import StateDir
from protocols.errors import RemoteRefused
from protocols.http import HttpTransport
from protocols.identity import Identity
from protocols.whereabouts import Whereabouts

CREATOR, OTHER = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
SHARD = bytes(129)


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("ATOLL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[str, list[dict[str, Any]]]]:
    """``refused(code, *arguments)``: run the command, which must fail so; its text and events."""

    def call(code: str, *arguments: object) -> tuple[str, list[dict[str, Any]]]:
        before = threading.active_count()
        status = outermost.run(list(map(str, arguments)))
        _, text = capsys.readouterr()
        assert status == TABLE[code].exit_code, text
        assert re.fullmatch(rf"error {code}: .+\n  why: (.|\n)+\n  fix: .+\n", text), text
        assert "Traceback" not in text
        assert threading.active_count() <= before
        log = tmp_path / "state" / "events.jsonl"
        assert not list((tmp_path / "state").glob("logs/crash-*"))
        lines = log.read_text().splitlines() if log.exists() else []
        return text, [json.loads(line) for line in lines]

    return call


START = ("start", "--listen", "127.0.0.1:0", "--api", "127.0.0.1:0", "--wait-s", "0.05")

Prepare = Callable[[HttpTransport, Whereabouts], None]


def island(
    manifest: Manifest, *, blob: bytes = SHARD, **gate: Any
) -> tuple[SignedManifest, Prepare]:
    """The greeting, manifest and shard of an island of this run, as others see them."""
    signed = SignedManifest.create(manifest, CREATOR)

    def prepare(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        options: dict[str, Any] = {"software": "0.1.0", "run": lambda: signed.run_id} | gate
        Gate(transport, whereabouts, **options)
        BlobServer(transport, signed.run_id, manifest=signed.data, blobs=[blob])

    return signed, prepare


@contextmanager
def peer(prepare: Prepare) -> Iterator[str]:
    """A peer in a thread of its own; yields its ``HOST:PORT``."""
    address: list[str] = []
    up, done = threading.Event(), threading.Event()

    async def live() -> None:
        async with HttpTransport(CREATOR, listen="127.0.0.1:0") as transport:
            assert transport.listening is not None
            address.append("{}:{}".format(*transport.listening))
            whereabouts = Whereabouts(transport, CREATOR, transport.book)
            whereabouts.publish(address)
            prepare(transport, whereabouts)
            up.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert up.wait(10)
        yield address[0]
    finally:
        done.set()
        thread.join(10)


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """Some other program: sends ``answer`` to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(answer)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


# --- addresses --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("203.0.113.7", "port"),
        ("203.0.113.7:0", "port"),
        ("203.0.113.7:123456", "port"),
        ("http://203.0.113.7:4390", "203.0.113.7:4390"),
        (f"/ip4/203.0.113.7/tcp/4390/p2p/{OTHER.peer_id}", f"203.0.113.7:4390/{OTHER.peer_id}"),
        ("203.0.113.7:4390/12D3KooWnot-an-id", "12D3KooWnot-an-id"),
        ("exa mple:1", ""),
        ("@/nowhere/peers.txt", "/nowhere/peers.txt"),
    ],
)
def test_an_address_that_is_none(refused, address, said, tmp_path):
    text, _ = refused("E102", *START, "--peers", address)
    assert said in text
    assert not (tmp_path / "state").exists()  # nothing was begun


def test_a_name_that_does_not_resolve(refused):
    text, events = refused("E101", *START, "--peers", "no-such-host.invalid:4390")
    assert "cannot reach no-such-host.invalid:4390" in text
    assert "does not resolve" in text
    # the reason is told at once, and again at the end
    assert [e["code"] for e in events if e["kind"] == "problem"] == ["E101"]


def test_nobody_listens_there(refused):
    text, _ = refused("E101", *START, "--peers", f"127.0.0.1:{free_port()}")
    assert "nothing listens there" in text
    assert "check that the node runs there" in text


@pytest.mark.parametrize(
    "answer", [b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi", b"SSH-2.0-OpenSSH_9.6\r\n"]
)
def test_something_else_answers(refused, answer):
    with answering(answer) as address:
        text, _ = refused("E101", *START, "--peers", address)
    assert "not Atoll" in text


def test_no_peer_of_several(refused):
    port = free_port()
    with answering(b"SSH-2.0-OpenSSH_9.6\r\n") as other:
        given = f"no-such-host.invalid:1,127.0.0.1:{port},{other}"
        text, _ = refused("E501", *START, "--peers", given)
    why = text.partition("why: ")[2].partition("fix:")[0]
    for address, reason in (
        ("no-such-host.invalid:1", "does not resolve"),
        (f"127.0.0.1:{port}", "nothing listens"),
        (other, "not Atoll"),
    ):
        assert re.search(rf"^ *{re.escape(address)}: .*{reason}", why, re.MULTILINE), text


# --- who answers ------------------------------------------------------------------------------

RUN = Manifest(evaluation=Evaluation(digest=blake3(SHARD).hexdigest(), sequences=1))
LONG = ("--wait-s", "60")  # what cannot get better is told without waiting


def quickly(call: Callable[[], Any]) -> Any:
    began = time.monotonic()
    result = call()
    assert time.monotonic() - began < 15
    return result


def test_another_identity(refused):
    _, prepare = island(RUN)
    with peer(prepare) as address:
        text, events = quickly(
            lambda: refused("E103", *START, *LONG, "--peers", f"{address}/{OTHER.peer_id}")
        )
    assert f"expected {OTHER.peer_id}, got {CREATOR.peer_id}" in text
    assert not [e for e in events if e["kind"] == "problem"]


def test_another_run(refused, tmp_path):
    _, prepare = island(RUN)
    mine = tmp_path / "run.toml"
    mine.write_text("[model]\nn_layers = 3\n[inner]\nlr = 0.25\n")
    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E201", *START, *LONG, "--peers", address, "--run", mine))
    assert "model.n_layers 3 != 2" in text
    assert "inner.lr 0.25 != 0.005" in text
    assert "evaluation.digest" not in text  # filled in by whoever creates the run


def test_another_version(refused):
    def prepare(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        async def answer(peer: str, body: bytes) -> bytes:
            raise RemoteRefused("version", "protocol 7, atoll 9.0")

        transport.on_call("hello", answer)

    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E202", *START, *LONG, "--peers", address))
    assert "this node: protocol 1, atoll " in text
    assert "protocol 7, atoll 9.0" in text


@pytest.mark.parametrize("given", [(), ("--invitation", "guessed")])
def test_no_valid_invitation(refused, given):
    _, prepare = island(RUN, admits=shared_token("the real one"))
    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E203", *START, *LONG, *given, "--peers", address))
    assert "guessed" not in text


def test_a_wrong_clock(refused):
    _, prepare = island(RUN, clock=lambda: time.time() + 60)
    with peer(prepare) as address:
        text, _ = quickly(lambda: refused("E301", *START, *LONG, "--peers", address))
    assert re.search(r"it is (59\.\d|60\.\d) s behind the median of 1 peers", text)
    assert "timedatectl" in text


def test_nobody_can_dial_back(refused):
    _, prepare = island(RUN)
    closed = f"127.0.0.1:{free_port()}"
    with peer(prepare) as address:
        text, events = quickly(
            lambda: refused("E302", *START, *LONG, "--peers", address, "--public-addr", closed)
        )
    assert closed in text
    assert "--public-addr" in text
    assert [e["name"] for e in events if e["kind"] == "join"] == ["dial", "checks"]


def test_a_manifest_that_is_not_the_runs(refused):
    """The peer says one run and serves the signed manifest of another."""
    signed, prepare = island(RUN)
    other = SignedManifest.create(RUN.model_copy(update={"seed": 77}), CREATOR)

    def lie(transport: HttpTransport, whereabouts: Whereabouts) -> None:
        prepare(transport, whereabouts)
        BlobServer(transport, signed.run_id, manifest=other.data, blobs=[SHARD])

    with peer(lie) as address:
        quickly(lambda: refused("E205", *START, *LONG, "--peers", address))


def test_a_shard_that_nobody_has(refused):
    _, prepare = island(RUN, blob=b"another")
    with peer(prepare) as address:
        refused("E502", *START, "--peers", address)


def test_while_no_peer_answers_it_tries_again_ever_more_seldom(refused):
    port = free_port()
    began = time.monotonic()
    text, events = refused("E101", *START, "--wait-s", "4", "--peers", f"127.0.0.1:{port}")
    assert 4 <= time.monotonic() - began < 15
    tries = [e for e in events if e["kind"] == "problem" and e["code"] == "E101"]
    pauses = [int(re.search(r"trying again in (\d+) s", e["fix"])[1]) for e in tries]
    assert len(pauses) >= 2
    assert pauses[0] == 1  # then up to twice as long each time, within what is left
    assert "nothing listens there" in text


def test_a_path_from_a_peer_is_never_read(refused, tmp_path):
    """The text of a run is each island's own: a creator's path means nothing here."""
    secret = tmp_path / "secret.txt"
    secret.write_text("A secret of this machine. " * 1000)
    data = RUN.data.model_copy(update={"recipe": "text", "path": str(secret)})
    _, prepare = island(RUN.model_copy(update={"data": data}))
    before = secret.stat().st_atime_ns
    with peer(prepare) as address:
        text, _ = refused("E601", *START, "--peers", address)
    assert "each island's own text" in text
    assert "--data" in text
    assert str(secret) not in text
    assert secret.stat().st_atime_ns == before
    assert not list((tmp_path / "cache").rglob("*.bin"))


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
    flipped, cut = checkpoint(state, 1) / "outer.safetensors", checkpoint(state, 2)
    data = bytearray(flipped.read_bytes())
    data[-1] ^= 1
    flipped.write_bytes(data)
    index = cut / "checkpoint.json"
    index.write_bytes(index.read_bytes()[:40])
    before = {p: p.read_bytes() for p in state.rglob("*") if p.is_file()}
    text, events = refused("E404", *START, "--resume")
    told = [e for e in events if e["kind"] == "problem"]
    assert [e["code"] for e in told] == ["E404", "E404"]
    assert "ckpt-00000002" in text
    for path, content in before.items():
        assert path.read_bytes() == content  # damaged as they are, they are not thrown away


def test_nothing_to_resume(refused):
    text, _ = refused("E404", *START, "--resume")
    assert "no checkpoint" in text
