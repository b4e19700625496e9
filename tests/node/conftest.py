"""What tests of a node share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from data_kit import tokenizer_bytes
from fsspec.implementations.memory import MemoryFileSystem

from node.checkpoints.checkpoint import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A node's checkpoints: none yet."""
    return CheckpointStore(tmp_path / "checkpoints")


@pytest.fixture
def second_place() -> Iterator[None]:
    """A place in memory is as empty afterwards as it was before."""
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
