"""What a node makes of the machine it is on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.config import NodeConfig
from node.island.hardware import leave_cores_to_ranks


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("role", "device", "threads"),
    [("island", "cpu", 1), ("island", "cuda", 2), ("server", "cpu", 2)],
)
def test_a_daemon_leaves_the_cores_to_ranks_that_train_on_them(
    role: str, device: str, threads: int, tmp_path: Path
) -> None:
    config = NodeConfig.model_validate({"dir": tmp_path, "role": role, "device": device})
    leave_cores_to_ranks(config)
    assert torch.get_num_threads() == threads
