"""Over which group gradients of tied tensors go."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from node.trainer.dims import ParallelDims
from node.trainer.engine import Engine


@pytest.fixture
def four() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four")
def test_tied_gradients_go_over_the_pipelines_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the one of all ranks, words of ranks that fail would be taken for them."""
    sent: list[Any] = []
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda moves: sent.extend(moves) or [])
    embedding = nn.Parameter(torch.ones(2, 2))
    embedding.grad = torch.ones(2, 2)
    tied: list[Tensor] = [embedding]
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["pp"].get_group()
    dims = ParallelDims(pp=2, dp_replicate=2)
    engine: Any = SimpleNamespace(dims=dims, parts={0: None}, _tied=lambda: tied)
    Engine._add_tied(engine, SimpleNamespace(count=2, group=group))  # type: ignore[arg-type]
    assert [move.op for move in sent] == [dist.isend, dist.irecv]
    assert [(move.group, move.peer, move.group_peer) for move in sent] == [(group, 2, 1)] * 2
