"""What a checkpoint says of itself: as it was written, or damaged; and what other versions say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_kit import LinkDown, make, say, there
from export_kit import made
from fsspec.implementations.local import LocalFileSystem

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.checkpoint_copy import CheckpointCopy
from node.checkpoints.index import Index, UnknownFormError, parse_index, said_by
from node.checkpoints.names import INDEX
from node.checkpoints.outer_files import read_newest
from protocols.errors import OperatorError


def flips(raw: bytes) -> Iterator[bytes]:
    """It, with each of its bits flipped in turn."""
    for at in range(len(raw)):
        for bit in range(8):
            yield raw[:at] + bytes([raw[at] ^ 1 << bit]) + raw[at + 1 :]


def flip_in(checkpoint: Path, text: str, at: int = -1) -> None:
    """The lowest bit of a byte of that text in its index."""
    data = bytearray((checkpoint / INDEX).read_bytes())
    data[data.index(text.encode()) + at % len(text)] ^= 1
    (checkpoint / INDEX).write_bytes(data)


def test_no_flipped_bit_changes_what_it_says(store: CheckpointStore) -> None:
    """Another run kept the node from starting, and another round or head went unseen."""
    path = make(store, 6, run="ca433a12", peer="12D3KooW", loss=3.25).path
    said, outcomes = said_by(path), Counter[str]()
    assert said is not None
    for flipped in flips((path / INDEX).read_bytes()):
        try:
            outcomes["the same" if parse_index(flipped) == said else "another"] += 1
        except UnknownFormError:
            outcomes["of another version"] += 1
        except ValueError:
            outcomes["damaged"] += 1
    assert set(outcomes) <= {"damaged", "the same"}
    assert outcomes["the same"] < 10, "of the time's last digit, as which it may read the same"


@pytest.mark.parametrize(
    "text",
    ['"run": "r', '"round": 2', '"step": 2', '"tokens": 0', '"created": 1', "diges", '"digest": "'],
)
def test_where_a_bit_of_it_is_flipped_the_one_before_it_is_used(
    store: CheckpointStore, text: str
) -> None:
    make(store, 1)
    flip_in(make(store, 2).path, text)
    found = CheckpointStore(store.directory).latest()
    assert found.checkpoint is not None
    assert found.checkpoint.path.name == "ckpt-00000001"
    (told,) = found.damaged
    assert (told.code, told.path.name) == ("E404", "ckpt-00000002")
    assert "ckpt-00000001 is tried" in told.fix
    make(store, 3)
    assert "ckpt-00000003" in there(store.directory)


@pytest.mark.parametrize("raw", [b"[" * 100_000, b'{"round": NaN}', b"\xff{}", b"[]", b"7"])
def test_what_is_no_index_at_all_is_damaged(raw: bytes) -> None:
    with pytest.raises(ValueError, match="does not parse"):
        parse_index(raw)


def test_one_of_before_it_had_a_hash_is_read(store: CheckpointStore) -> None:
    path = make(store, 1).path
    index = json.loads((path / INDEX).read_text())
    assert len(index.pop("digest")) == 64
    (path / INDEX).write_text(json.dumps(index))
    found = store.latest()
    assert (found.damaged, found.checkpoint is not None) == ((), True)
    index = {"run": "r", "round": 1, "step": 10, "tokens": 0, "created": 0.5, "files": {}}
    assert parse_index(json.dumps(index).encode()) == Index.model_validate(index)


@pytest.mark.parametrize("said", [{"later": [1.5, {"é": None}]}, {"format": 2}, {"files": 7}])
def test_one_of_a_later_version_is_not_taken_for_damaged(
    store: CheckpointStore, tmp_path: Path, said: dict[str, Any]
) -> None:
    """An older one would take its place, and push it out."""
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    for round_ in (1, 2):
        copy.put(make(store, round_).path)
    newest = store.directory / "ckpt-00000002"
    for place in (newest, tmp_path / "copy" / "ckpt-00000002"):
        say(place, **said)
    other = CheckpointStore(tmp_path / "other")
    for read in (
        store.latest,
        lambda: read_newest(store.directory),
        lambda: copy.get_newest(other),
    ):
        with pytest.raises(OperatorError, match="another version of Atoll") as caught:
            read()
        assert (caught.value.code, "ckpt-00000002" in caught.value.what) == ("E202", True)
        assert "use the version of Atoll that made it" in caught.value.fix
    flip_in(newest, '"run": "r')
    assert store.latest().checkpoint is not None, "it is damaged, whichever version's it is"


def test_one_of_a_later_version_that_is_named_is_not_taken_for_damaged(tmp_path: Path) -> None:
    path = made(tmp_path, 3)
    assert read_newest(path)[0] == path
    say(path, later=1)
    with pytest.raises(OperatorError, match="another version of Atoll") as caught:
        read_newest(path)
    assert caught.value.code == "E202"


def test_a_copy_whose_index_has_a_flipped_bit_is_told_of_and_the_next_is_fetched_once(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = CheckpointCopy(str(tmp_path / "copy"), keep=2)
    for round_ in (1, 2):
        copy.put(make(store, round_).path)
    flip_in(tmp_path / "copy" / "ckpt-00000002", '"round": 2')
    other, told = CheckpointStore(tmp_path / "other"), list[OperatorError]()
    opened, came = LocalFileSystem.open, 0

    def broken(files: Any, path: str, mode: str = "rb") -> Any:
        file = opened(files, path, mode)
        return LinkDown(file, 100) if path.endswith("outer.safetensors") else file

    with monkeypatch.context() as first:
        first.setattr(LocalFileSystem, "open", broken)
        with pytest.raises(OperatorError, match="cannot read"):
            copy.get_newest(other, told.append)

    def begun(name: str) -> Any:
        def further(done: int, total: int) -> None:
            nonlocal came
            came = came or done

        return further

    found = copy.get_newest(other, told.append, begun)
    assert found is not None
    assert (found.name, came) == ("ckpt-00000001", 100)
    assert [(one.code, "ckpt-00000002" in one.what) for one in told] == [("E404", True)] * 2
    assert "another hash" in told[0].why
    assert "ckpt-00000001 is tried" in told[0].fix
    assert there(other.directory) == ["ckpt-00000001"]
