"""``node export --from URL`` of a node that runs, and removes copies while they are fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import make
from fsspec.implementations.memory import MemoryFileSystem

from node import headway
from node.checkpoints import fetched
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from protocols.errors import OperatorError

PLACE = "memory://second/place"
Removes = Callable[[int], None]


@pytest.fixture(autouse=True)
def _nothing_in_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(fetched, "read_outer", lambda checkpoint, verified: None)
    yield
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.fixture
def removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Removes:
    """As the first copies are read, ever newer ones take their places, so many times."""
    copy, store = CheckpointCopy(PLACE, keep=1), CheckpointStore(tmp_path / "node")
    copy.put(make(store, 1, loss=9.0).path)
    opened = MemoryFileSystem.open

    def begin(times: int) -> None:
        later = iter(range(2, 2 + times))

        def moving(files: Any, path: str, *given: Any, **named: Any) -> Any:
            if path.endswith("outer.safetensors") and given[:1] != ("wb",):
                for number in later:
                    copy.put(make(store, number, loss=9.0 - number).path)
                    break
            return opened(files, path, *given, **named)

        monkeypatch.setattr(MemoryFileSystem, "open", moving)

    return begin


def export(home: Path, *, best: bool = False) -> tuple[str, list[str]]:
    """The name of what came, and what was told of how far that was; nothing is warned of."""
    told: list[str] = []
    warned: list[OperatorError] = []
    with fetched.outer_at(PLACE, home / "out", best=best, warn=warned.append, tell=told.append) as (
        checkpoint,
        _,
    ):
        assert warned == []
        return checkpoint.name, told


def test_the_newest_by_then_is_begun_and_told(
    tmp_path: Path, removes: Removes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(headway, "FIRST_S", 0.0)
    removes(2)
    name, told = export(tmp_path)
    assert name == "ckpt-00000003"
    again = [text for text in told if "begins anew" in text]
    assert again == [
        f"ckpt-0000000{number} was removed there meanwhile: begins anew" for number in (1, 2)
    ]


@pytest.mark.parametrize("best", [False, True])
def test_a_download_that_is_never_fast_enough_says_so(
    tmp_path: Path, removes: Removes, best: bool
) -> None:
    """It is no matter of credentials."""
    removes(99)
    with pytest.raises(OperatorError) as caught:
        export(tmp_path, best=best)
    assert (caught.value.code, caught.value.what) == ("E404", f"checkpoint {PLACE} cannot be used")
    assert "has replaced each of 5 copies" in caught.value.why
    assert "raise --keep-checkpoints" in caught.value.fix
    assert ("--best" in caught.value.fix) is not best
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node"]


def test_an_object_store_that_lists_from_a_cache_is_listed_again(
    tmp_path: Path, removes: Removes, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: dict[str, Any] = {}
    real = MemoryFileSystem.ls

    def ls(files: Any, path: str, detail: bool = True, **named: Any) -> Any:
        if path not in listed:
            listed[path] = real(files, path, detail=True)
        return listed[path] if detail else [one["name"] for one in listed[path]]

    removes(1)
    moving = MemoryFileSystem.open

    def elsewhere(files: Any, path: str, *given: Any, **named: Any) -> Any:
        with monkeypatch.context() as other:  # another process writes: this cache does not know
            other.setattr(MemoryFileSystem, "ls", real)
            other.setattr(MemoryFileSystem, "invalidate_cache", lambda *_: None)
            return moving(files, path, *given, **named)

    monkeypatch.setattr(MemoryFileSystem, "ls", ls)
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda *_: listed.clear())
    monkeypatch.setattr(MemoryFileSystem, "open", elsewhere)
    assert export(tmp_path)[0] == "ckpt-00000002"
