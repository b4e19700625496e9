"""What the ranks of an island share of an evaluation, and over which group tied gradients go."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_kit import fake_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from trainer_kit import Bench, committing, tiny_manifest

from node.trainer.dims import ParallelDims
from node.trainer.engine import Engine
from node.trainer.parallel import Ranks

CPU = torch.device("cpu")


class OneOf(Ranks):
    """A data rank that is played by this process: what the others have is added by the test."""

    number = 0

    @property
    def data_rank(self) -> int:
        return self.number


@pytest.mark.parametrize("windows", [1, 2, 7, 8])
@pytest.mark.parametrize("data", [1, 2, 3])
def test_each_data_rank_computes_its_share_of_the_windows(
    tmp_path: Path, windows: int, data: int
) -> None:
    trainer = Bench(tmp_path, committing(1)).trainer
    engine, tokens = trainer.engine, trainer.validation
    assert tokens is not None
    tokens = tokens[:windows]
    whole = engine._sums(tokens)
    assert (whole > 0).all()
    forwarded: list[int] = []
    engine.parts[0].register_forward_hook(lambda _, args, out: forwarded.append(len(out)))
    engine.dims = ParallelDims(dp_replicate=data)
    total, calls = torch.zeros_like(whole), []
    for number in range(data):
        ranks = OneOf(0, 1, CPU, None, engine.dims)
        object.__setattr__(ranks, "number", number)
        engine.ranks = ranks
        total += engine._sums(tokens)
        engine.evaluate(tokens, at_once=2)
        calls.append(tuple(forwarded))
        forwarded.clear()
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)
    assert len(set(calls)) == 1  # they are collective: as many, of as many windows, on every rank
    most = -(-windows // data)
    assert calls[0][0] == most
    assert len(calls[0]) == 1 + -(-windows // (2 * data))
    assert max(calls[0][1:]) <= 2


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("data", [1, 2, 3])
def test_data_ranks_with_unequal_shares_have_the_gradient_of_one(
    tmp_path: Path, experts: int, data: int
) -> None:
    """Of 4 sequences one at a time three ranks have 2, 1 and 1: two wait for the first."""
    manifest = tiny_manifest()
    if experts:
        manifest = manifest.model_copy(
            update={"model": manifest.model.model_copy(update={"experts": experts, "top_k": 2})}
        )
    trainer = Bench(tmp_path, committing(1), manifest=manifest).trainer
    engine = trainer.engine
    loss = engine.gradients(trainer._rows, 4)
    wanted = [parameter.grad.clone() for parameter in engine.models.parameters()]
    engine.models.zero_grad()
    forwarded: list[int] = []
    engine.parts[0].register_forward_hook(lambda _, args, out: forwarded.append(len(out)))
    engine.dims = ParallelDims(dp_replicate=data)
    losses = 0.0
    for number in range(data):
        engine.ranks = OneOf(0, 1, CPU, None, engine.dims)
        object.__setattr__(engine.ranks, "number", number)
        losses += engine.gradients(trainer._rows, 1)
    assert forwarded == [1] * (-(-4 // data) * data)
    assert losses == pytest.approx(loss, rel=1e-6)
    for parameter, whole in zip(engine.models.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad / data, whole, rtol=1e-4, atol=1e-7)


@pytest.fixture
def four() -> Iterator[None]:
    with fake_ranks(4):
        yield


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
