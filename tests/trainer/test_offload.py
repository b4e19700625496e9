"""Parameters in the host's memory and ranks that compute elsewhere.

No GPU is at hand, so ``meta`` takes the place of one of the two devices, and ranks are of torch's
fake process group, whose collective calls do nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks_kit import fake_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from bootstrap.manifest import Model
from node.trainer.computing import Computing
from node.trainer.dims import ParallelDims
from node.trainer.hf import model_of
from node.trainer.layout import Layout
from node.trainer.model import build
from node.trainer.parallel import Ranks
from node.trainer.parallelize import lay_out
from node.trainer.weights import Weights, part_like

ELSEWHERE = torch.device("meta")
LAYOUT = Layout.of_shapes([("w", torch.Size([4, 3]))])
MOE = Model(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=24, experts=4, vocab_size=300)
QWEN_MOE = {
    "model_type": "qwen2_moe", "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "intermediate_size": 16,
}  # fmt: skip


@pytest.fixture
def two() -> Iterator[None]:
    with fake_ranks(2):
        yield


@pytest.mark.usefixtures("two")
def test_a_part_is_where_its_parameter_is() -> None:
    mesh = init_device_mesh("cpu", (2,))
    here = torch.empty(2, 3, device=ELSEWHERE)
    cut = DTensor.from_local(here, mesh, [Shard(0)], run_check=False)
    for like in (cut, here):
        part = part_like(torch.ones(4, 3), like)
        assert part.device == ELSEWHERE
    ranks = Ranks(0, 2, torch.device("cpu"), mesh)
    scattered = Weights.of({"w": cut}, LAYOUT, ranks).scatter("w", torch.ones(4, 3))
    assert scattered is not None
    assert (scattered.device, scattered.shape) == (ELSEWHERE, (2, 3))


def test_what_is_sent_to_rank_0_leaves_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """There it is received: by another library than what is in the host's memory."""
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(dist, "send", lambda tensor, to: sent.append(tensor))
    ranks: Any = SimpleNamespace(rank=1, size=2, leads=False, device=ELSEWHERE, dims=ParallelDims())
    weights = Weights.of({"w": torch.ones(4, 3)}, LAYOUT, ranks)
    weights.owners["w"] = 1
    weights.gather("w")
    assert [tensor.device for tensor in sent] == [ELSEWHERE]


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("config", [MOE, model_of(QWEN_MOE)], ids=["ours", "theirs"])
def test_all_that_is_offloaded_is_fetched_by_fsdp(config: Model) -> None:
    """Experts too, where each rank has its own and shares them with none."""
    dims = ParallelDims(dp_shard=2, ep=2)
    mesh = init_device_mesh("cpu", tuple(dims.axes.values()), mesh_dim_names=tuple(dims.axes))
    model = build(config, 0)
    ranks = Ranks(0, 2, torch.device("cpu"), mesh, dims)
    lay_out(model, ranks, Computing(offload=True), seq_len=16)
    owners = [module for module in model.modules() if isinstance(module, FSDPModule)]
    fetched = {
        id(parameter.sharded_param)
        for owner in owners
        for group in owner._get_fsdp_state()._fsdp_param_groups
        for parameter in group.fsdp_params
    }
    assert {id(parameter) for parameter in model.parameters()} == fetched
