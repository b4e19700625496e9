"""What tests of a node share."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.checkpoints.checkpoint import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A node's checkpoints: none yet."""
    return CheckpointStore(tmp_path / "checkpoints")
