"""Rows that go to the experts of other ranks and come back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from node.trainer.experts import exchange


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


def test_the_device_is_waited_for_once(
    alone: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How many rows go and how many come is fetched from it by one copy."""
    fetched: list[Any] = []
    whole = torch.Tensor.tolist

    def tolist(self: Tensor) -> Any:
        fetched.append(whole(self))
        return fetched[-1]

    def run(rows: Tensor, counts: Tensor) -> Tensor:
        factors = torch.arange(1.0, 1 + len(counts)).repeat_interleave(counts)
        return rows * factors[:, None]

    x, counts = torch.rand(6, 2), torch.tensor([2, 0, 3, 1])
    monkeypatch.setattr(torch.Tensor, "tolist", tolist)
    assert torch.equal(exchange(run, alone, x, counts), run(x, counts))
    assert fetched == [[[6], [6]]]
