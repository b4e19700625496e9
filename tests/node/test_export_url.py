"""``node export --from URL``: what it needs of a copy of checkpoints, and nothing more, comes."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from data_kit import serving
from export_kit import OUTER, PLACE, SIZE, Command, damage, made, put, value
from fsspec.implementations.memory import MemoryFileSystem

from node import headway
from node.checkpoints import copy_reading, fetched
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.names import INDEX

pytestmark = pytest.mark.usefixtures("own_directory", "second_place")


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
