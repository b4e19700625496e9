"""``node export --from URL`` of a state directory, and of a web server that lists no folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_kit import make
from data_kit import serving
from fsspec.implementations.memory import MemoryFileSystem

from node.checkpoints import fetched
from node.checkpoints.checkpoint import CheckpointStore
from node.statedir import StateDir
from protocols.errors import OperatorError


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state directory with two checkpoints, of which the older is the better."""
    monkeypatch.setattr(fetched, "read_outer", lambda checkpoint, verified: None)
    store = CheckpointStore(StateDir(tmp_path / "home").checkpoints)
    for round_ in (1, 2):
        make(store, round_, loss=float(round_))
    yield tmp_path / "home"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def exported(url: str, home: Path, *, best: bool = False) -> str:
    def warn(problem: OperatorError) -> None:
        raise AssertionError(problem)

    to = home.parent / "out"
    with fetched.outer_at(url, to, best=best, warn=warn, tell=str) as (checkpoint, _):
        return checkpoint.name


def test_as_on_this_machine_the_newest_of_it_is_taken_or_the_best(home: Path) -> None:
    MemoryFileSystem().put(str(home), "/far", recursive=True)
    assert exported("memory://far", home) == "ckpt-00000002"
    assert exported("memory://far", home, best=True) == "ckpt-00000001"
    with serving(home) as server:
        assert exported(server.url, home) == "ckpt-00000002"


def test_what_a_web_server_that_lists_nothing_needs_is_said(home: Path) -> None:
    checkpoints = StateDir(home).checkpoints
    (checkpoints / "index.html").write_text("no list of what is in here")
    with serving(checkpoints) as server:
        with pytest.raises(OperatorError, match="no checkpoint") as caught:
            exported(server.url, home)
        assert caught.value.code == "E404"
        assert "or of a checkpoint where a web server lists no folders" in caught.value.fix
        assert exported(f"{server.url}/ckpt-00000001", home) == "ckpt-00000001"
