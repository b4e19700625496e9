"""``node export --from URL``: what it needs of a copy of checkpoints, and nothing more, comes."""

from __future__ import annotations

import http.server
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from data_kit import serving, tokenizer_bytes
from fsspec.implementations.memory import MemoryFileSystem
from places import ROOT

from bootstrap.manifest import Data, Manifest, Model
from bootstrap.signed_manifest import SignedManifest
from node import headway
from node.checkpoints import copy_reading, fetched
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Facts
from node.checkpoints.names import INDEX
from node.checkpoints.outer_files import OuterFiles, write_beside, write_outer
from node.data import patience
from node.data.tokenizer import FileTokenizer
from node.trainer.layout import Layout
from protocols.identity import Identity

pytestmark = pytest.mark.usefixtures("own_directory")
Command = Callable[..., tuple[int, str, str]]

MODEL = Model(vocab_size=600, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=48)
SIZE = Layout.of_config(MODEL).size
PLACE = "memory://second/place"
OUTER = "outer.safetensors"


@pytest.fixture(autouse=True)
def _nothing_in_memory() -> Iterator[None]:
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A state directory of a run with a tokenizer of its own."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "tokenizer.json").write_bytes(tokenizer_bytes())
    return home


def made(home: Path, number: int, loss: float | None = None) -> Path:
    """A checkpoint as a node makes it, with a trainer's files; G is its number everywhere."""
    store = CheckpointStore(home / "checkpoints", keep=9)
    manifest = Manifest(model=MODEL, data=Data(tokenizer=FileTokenizer(tokenizer_bytes()).digest))
    signed = SignedManifest.create(manifest, Identity.from_seed(bytes(32)))
    outer = OuterFiles(torch.full((SIZE,), float(number)), {"v": torch.zeros(SIZE)}, signed)
    with store.draft() as draft:
        write_outer(draft, outer)
        write_beside(draft, home)
        (draft / "trainer").mkdir()
        (draft / "trainer" / "trainer.json").write_text("{}")
        (draft / "trainer" / "shard-0.safetensors").write_bytes(bytes(8 * SIZE))
        run = manifest.run_id.hex()
        facts = Facts(run=run, round=number, step=1, tokens=1, validation=loss)
        return store.commit(draft, facts).path


def put(home: Path, *numbers: int, losses: dict[int, float] | None = None) -> None:
    for number in numbers:
        CheckpointCopy(PLACE, keep=9).put(made(home, number, (losses or {}).get(number)))


def stored(number: int, name: str = OUTER) -> Any:
    """A file there."""
    return MemoryFileSystem.store[f"/second/place/ckpt-{number:08d}/{name}"]


def damage(number: int, name: str = OUTER) -> None:
    """A wrong byte, and the length as before."""
    file = stored(number, name)
    file.seek(-1, os.SEEK_END)
    file.write(b"\xff")


def value(out: Path) -> float:
    """What G was."""
    from safetensors.torch import load_file

    (found,) = {part.unique().item() for part in load_file(out / "model.safetensors").values()}
    return float(found)


def test_the_newest_comes_without_the_trainer_s_files(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(home, 3, 4)
    damage(4, "trainer/shard-0.safetensors")
    opened, asked = MemoryFileSystem.open, Counter[str]()

    def counted(files: Any, path: str, *given: Any, **named: Any) -> Any:
        asked[path.partition("/place/")[2]] += 1
        return opened(files, path, *given, **named)

    monkeypatch.setattr(MemoryFileSystem, "open", counted)
    before = set(os.listdir(tmp_path))
    status, out, told = command("export", tmp_path / "new" / "out", "--from", PLACE)
    assert (status, told) == (0, "")
    assert f"{SIZE:,} parameters of ckpt-00000004 in" in out
    needed = (OUTER, "manifest.envelope", "tokenizer.json", "trainer/trainer.json", INDEX)
    assert set(asked) == {f"ckpt-00000004/{name}" for name in needed} | {f"ckpt-00000003/{INDEX}"}
    assert asked[f"ckpt-00000004/{OUTER}"] == 1
    assert set(os.listdir(tmp_path)) - before == {"new"}
    assert os.listdir(tmp_path / "new") == ["out"]
    assert command("export", tmp_path / "local", "--from", home / "checkpoints")[0] == 0
    for file in (tmp_path / "local").iterdir():
        assert (tmp_path / "new" / "out" / file.name).read_bytes() == file.read_bytes()


def test_it_fills_the_folder_that_is_there(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which may be a disk of its own: so what comes lies in it meanwhile."""
    put(home, 3)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    rooms: list[Path] = []
    read = fetched.read_outer

    def noted(checkpoint: Path, *verified: Any) -> Any:
        rooms.append(checkpoint)
        return read(checkpoint, *verified)

    monkeypatch.setattr(fetched, "read_outer", noted)
    assert command("export", ".", "--from", f"{PLACE}/")[0] == 0
    assert rooms[0].parent.parent.samefile(".")
    assert "config.json" in os.listdir(".")
    assert not [name for name in os.listdir(".") if name.startswith(".")]


def test_damaged_ones_are_passed_over(command: Command, home: Path, tmp_path: Path) -> None:
    put(home, 3, 4)
    damage(4)
    status, out, told = command("export", tmp_path / "out", "--from", PLACE)
    assert status == 0
    assert "of ckpt-00000003 in" in out
    assert told.startswith(f"warning E404: the copy ckpt-00000004 at {PLACE} cannot be used\n")
    assert "another hash" in told
    assert "ckpt-00000003 is tried" in told
    damage(3)
    status, _, told = command("export", tmp_path / "none", "--from", PLACE)
    assert status == 1
    assert (
        f"error E404: checkpoint {PLACE} cannot be used\n  why: none in it is whole (ckpt-" in told
    )
    assert not (tmp_path / "none").exists()


def test_the_best(command: Command, home: Path, tmp_path: Path) -> None:
    put(home, 3)
    given = ("--from", PLACE, "--best")
    status, _, told = command("export", tmp_path / "none", *given)
    assert (status, told[:10]) == (1, "error E404")
    assert "none in it has a validation loss" in told
    assert "leave out --best" in told
    put(home, 4, 5, 6, losses={4: 1.6, 5: 1.5})
    assert "of ckpt-00000005 in" in command("export", tmp_path / "best", *given)[1]
    assert value(tmp_path / "best") == 5
    damage(5)
    _, out, told = command("export", tmp_path / "second", *given)
    assert "of ckpt-00000004 in" in out
    assert "remove it there, so that a whole one is kept as the best" in told
    damage(4)
    assert "none that was evaluated is whole" in command("export", tmp_path / "third", *given)[2]


def test_one_that_is_named(command: Command, home: Path, tmp_path: Path) -> None:
    put(home, 3, 4)
    one = f"{PLACE}/ckpt-00000003"
    assert command("export", tmp_path / "out", "--from", one)[0] == 0
    assert value(tmp_path / "out") == 3
    status, _, told = command("export", tmp_path / "none", "--from", one, "--best")
    assert (status, told[:10]) == (2, "error E204")
    status, _, told = command("export", tmp_path / "none", "--from", f"{PLACE}/ckpt-00000007")
    assert (status, told[:10]) == (1, "error E404")


def test_where_there_is_none(command: Command, tmp_path: Path) -> None:
    status, _, told = command("export", tmp_path / "out", "--from", PLACE)
    assert status == 1
    assert told.startswith(f"error E404: checkpoint {PLACE} cannot be used\n")
    assert "it is no checkpoint, and there is none in it" in told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "why"),
    [
        ("nosuch://bucket/run", "Protocol not known"),
        ("ocilake://bucket/run", "ocifs"),  # a library that is not there
        ("http://user:secret@127.0.0.1:9/run", "Connect"),
        ("memory://user:secret@second/place", "none in it"),
    ],
)
def test_a_place_that_cannot_be_read_is_told_without_credentials(
    command: Command, tmp_path: Path, place: str, why: str
) -> None:
    status, _, told = command("export", tmp_path / "out", "--from", place)
    assert status == 1
    assert told.startswith("error E404" if why == "none in it" else "error E407")
    assert why in told
    assert "secret" not in told
    assert list(tmp_path.iterdir()) == []


def test_warnings_and_progress_have_no_credentials(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headway, "FIRST_S", 0.0)
    place = "memory://user:secret@second/place"
    for number in (3, 4):
        CheckpointCopy(place, keep=9).put(made(home, number))
    file = MemoryFileSystem.store[f"/user:secret@second/place/ckpt-00000004/{OUTER}"]
    file.write(b"\0" * 9)
    status, _, told = command("export", tmp_path / "out", "--from", place)
    assert status == 0
    assert "warning E404: the copy ckpt-00000004 at memory://second/place" in told
    assert "fetches ckpt-00000003: 0%, 0.0 of 0." in told
    assert "secret" not in told


def test_a_file_url_and_odd_paths_are_read_where_they_lie(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made(home, 3)
    copy = tmp_path / "copy"
    CheckpointCopy(str(copy), keep=1).put(home / "checkpoints" / "ckpt-00000003")
    (odd := tmp_path / "C:\\runs\\s3:bucket").symlink_to(copy)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(copy_reading.CopyReader, "get_part", None)
    sources = (f"file://{copy}", f"file://{home}", f"{copy}/", "copy", odd.name, str(odd))
    for number, source in enumerate(sources):
        assert command("export", tmp_path / f"out{number}", "--from", source)[0] == 0
    told = command("export", tmp_path / "none", "--from", f"file://{tmp_path}/nowhere")[2]
    assert "why: there is no such directory\n" in told


def test_from_a_web_server(command: Command, home: Path, tmp_path: Path) -> None:
    for number in (3, 4):
        CheckpointCopy(str(tmp_path / "web" / "copy"), keep=9).put(made(home, number))
    with serving(tmp_path / "web") as server:
        place = f"{server.url}/copy"
        server.spoil[OUTER] = 1  # as the newest comes
        status, out, told = command("export", tmp_path / "out", "--from", place)
        assert status == 0
        assert "of ckpt-00000003 in" in out
        assert "warning E404: the copy ckpt-00000004" in told
        assert "shard-0.safetensors" not in server.asked
        one = f"{place}/ckpt-00000004"
        for source, away in ((place, 1), (one, 9)):  # of the list, and of an index
            server.away = away
            status, _, told = command("export", tmp_path / "none", "--from", source)
            assert (status, told[:10]) == (1, "error E407")
            assert "503" in told
        server.away = 0
        told = command("export", tmp_path / "none", "--from", f"{server.url}/nowhere")[2]
        assert told.startswith("error E404")
        (tmp_path / "web" / "copy" / "index.html").write_text("no list of what is in here")
        assert command("export", tmp_path / "one", "--from", one)[0] == 0
        assert value(tmp_path / "one") == 4


class Broken:
    """A file there, of which a piece comes before the link goes down."""

    def __init__(self, file: Any) -> None:
        self.file, self.reads = file, 0

    def __enter__(self) -> Broken:
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def seek(self, at: int) -> None:
        self.file.seek(at)

    def read(self, size: int) -> bytes:
        self.reads += 1
        if self.reads > 1:
            raise ConnectionResetError("the link went down")
        return bytes(self.file.read(min(size, SIZE)))


@pytest.mark.parametrize("after", ["a piece", "nothing"])
def test_a_link_that_goes_down_on_the_way_is_waited_for(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    """Else all that has come would have come in vain. But a wrong URL is told at once."""
    put(home, 3)
    opened, tries = MemoryFileSystem.open, list[str]()
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(patience, "LAST_PAUSE_S", 0.01)

    def broken(files: Any, path: str, *given: Any, **named: Any) -> Any:
        if not path.endswith(OUTER if after == "a piece" else INDEX):
            return opened(files, path, *given, **named)
        tries.append(path)
        file = opened(files, path, *given, **named)
        if after == "nothing":
            raise ConnectionResetError("the link went down")
        return Broken(file)

    monkeypatch.setattr(MemoryFileSystem, "open", broken)
    status, _, told = command("export", tmp_path / "out", "--from", PLACE)
    if after == "nothing":
        assert (status, told[:10], len(tries)) == (1, "error E407", 1)
    else:
        assert status == 0
        assert len(tries) == -(-len(stored(3).getvalue()) // SIZE)
        assert value(tmp_path / "out") == 3
    assert {path.name for path in tmp_path.iterdir()} <= {"home", "out"}


def test_one_that_a_node_removes_meanwhile_is_not_damaged(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And one that is kept as the best, however old, does not take its place."""
    put(home, 3, 8, losses={3: 1.0})
    opened, later = MemoryFileSystem.open, iter([9])

    def moving(files: Any, path: str, *given: Any, **named: Any) -> Any:
        if path.endswith(f"ckpt-00000008/{OUTER}"):
            for number in later:
                put(home, number)
                files.rm("/second/place/ckpt-00000008", recursive=True)
        return opened(files, path, *given, **named)

    monkeypatch.setattr(MemoryFileSystem, "open", moving)
    status, out, told = command("export", tmp_path / "out", "--from", PLACE)
    assert (status, told) == (0, "")
    assert "of ckpt-00000009 in" in out


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_full_disk_is_told_and_nothing_is_left(
    command: Command, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    put(home, 3)

    def full(path: Path, *_: object) -> None:
        raise OSError(28, "No space left on device")

    if when == "before":
        little = SimpleNamespace(free=4 * SIZE)
        monkeypatch.setattr(shutil, "disk_usage", lambda place: little)
    else:
        monkeypatch.setattr(Path, "touch", full)
    status, _, told = command("export", tmp_path / "out", "--from", PLACE)
    assert status == 1
    assert told.startswith(f"error E402: no room for a checkpoint beside {tmp_path / 'out'}\n")
    assert "name a folder on another disk" in told
    assert [path.name for path in tmp_path.iterdir()] == ["home"]


@contextmanager
def stalling(copy: Path) -> Iterator[tuple[str, threading.Event]]:
    """A web server that stands still in the middle of the outer state; told once it does."""
    stands, ended = threading.Event(), threading.Event()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(copy))

        def log_message(self, *arguments: object) -> None:
            """Quietly."""

        def copyfile(self, source: Any, outputfile: Any) -> None:
            data = source.read()
            if not self.path.endswith(OUTER):
                outputfile.write(data)
                return
            outputfile.write(data[:1000])
            outputfile.flush()
            stands.set()
            ended.wait(60)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", stands
    finally:
        ended.set()
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_on_the_way_finds_nothing(
    home: Path, tmp_path: Path, end: signal.Signals
) -> None:
    CheckpointCopy(str(tmp_path / "copy"), keep=1).put(made(home, 3))
    to = tmp_path / "to"
    to.mkdir()
    packages = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (
        stalling(tmp_path / "copy") as (url, stands),
        subprocess.Popen(
            [sys.executable, "-m", "node", "export", str(to / "out"), "--from", url],
            stderr=subprocess.PIPE,
            text=True,
            env=packages,
            cwd=tmp_path,
        ) as process,
    ):
        try:
            assert stands.wait(90)
            assert list(to.glob(f".out.*/.fetched-ckpt-00000003/{OUTER}"))
            process.send_signal(end)
            said = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert (process.returncode, said.split()[-1]) == (130, "interrupted")
    assert list(to.iterdir()) == []
