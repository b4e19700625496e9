"""``node export --from URL`` that is broken off: by its link, the disk, or who ends it."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint_kit import LinkDown
from data_kit import broken_off, serving
from export_kit import OUTER, PLACE, SIZE, Command, made, put, stored, value
from fsspec.implementations.memory import MemoryFileSystem

from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.names import INDEX
from node.data import patience

pytestmark = pytest.mark.usefixtures("own_directory", "second_place")


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
        return LinkDown(file, SIZE)

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


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_whoever_ends_it_on_the_way_finds_nothing(
    home: Path, tmp_path: Path, end: signal.Signals
) -> None:
    CheckpointCopy(str(tmp_path / "copy"), keep=1).put(made(home, 3))
    to = tmp_path / "to"
    to.mkdir()
    with serving(tmp_path / "copy", stalls=OUTER) as server:
        command = ["export", str(to / "out"), "--from", server.url]
        fetched = f".out.*/.fetched-ckpt-00000003/{OUTER}"
        broken_off(server, command, end, lambda: [*to.glob(fetched)])
    assert list(to.iterdir()) == []
