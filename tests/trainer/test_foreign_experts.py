"""Experts of transformers' models on two ranks: the same logits and gradients, or a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hf_kit import MIXTRAL, QWEN
from ranks_kit import forked
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from bootstrap.manifest import Data
from node.trainer.computing import Computing, Recompute
from node.trainer.dims import ParallelDims
from node.trainer.foreign_experts import _by_row, deal_out, experts_of, try_experts
from node.trainer.hf import ForeignDecoder, build_foreign, model_of
from node.trainer.weights import local

SPARSE = QWEN | {"tie_word_embeddings": False, "num_experts_per_tok": 2}
FAMILIES: list[dict[str, Any]] = [
    MIXTRAL | {"num_local_experts": 4},
    SPARSE | {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 16},
    SPARSE | {"model_type": "olmoe", "num_experts": 4},
    SPARSE | {"model_type": "gpt_oss", "num_local_experts": 4, "head_dim": 8},  # has biases
]
RANKS = 2
TOKENS = torch.randint(0, 300, (RANKS, 1, 17), generator=torch.Generator().manual_seed(0))


def _loss(model: ForeignDecoder, rows: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(rows[:, :-1])
    return logits.detach(), torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"
    )


def _rank(rank: int, directory: Path) -> None:
    """Its row alone through experts of both; then the gradients of the whole model's slices."""
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    for plain in FAMILIES:
        config = model_of(plain)
        whole, dealt = build_foreign(config, 0), build_foreign(config, 0)
        wanted = [_loss(whole, rows) for rows in TOKENS]
        sum(loss for _, loss in wanted).backward()  # type: ignore[union-attr]
        try_experts(dealt, RANKS)
        deal_out(dealt, mesh)
        logits, loss = _loss(dealt, TOKENS[rank])
        loss.backward()
        torch.testing.assert_close(logits, wanted[rank][0], rtol=0, atol=1e-5)
        experts = {id(p) for one in experts_of(dealt) for p in one.parameters()}
        assert len(experts) == sum(len(list(e.parameters())) for e in experts_of(whole))
        for (name, mine), (_, theirs) in zip(
            dealt.named_parameters(), whole.named_parameters(), strict=True
        ):
            assert mine.grad is not None, name
            assert theirs.grad is not None, name
            gradient = local(mine.grad)
            if id(mine) in experts:  # of the tokens of all ranks
                want = theirs.grad.chunk(RANKS)[rank]
                assert local(mine).shape == want.shape, name
                assert local(mine).untyped_storage().nbytes() == local(mine).nbytes
            else:
                dist.all_reduce(gradient)
                want = theirs.grad
            assert torch.allclose(gradient, want, rtol=0, atol=2e-5), (plain, name)


def test_two_ranks_with_half_of_the_experts_each_compute_what_one_does(tmp_path: Path) -> None:
    forked(_rank, RANKS, tmp_path)


def test_an_expert_without_rows_has_a_gradient_of_zeros() -> None:
    (experts, *_) = experts_of(build_foreign(model_of(FAMILIES[0]), 0))
    x = torch.zeros(0, 32, requires_grad=True)
    out = _by_row(experts.forward, x, torch.zeros(4, dtype=torch.int64))
    assert out.shape == (0, 32)
    out.sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and not p.grad.any() for p in experts.parameters())


@pytest.mark.parametrize(
    ("plain", "ep", "why"),
    [
        (QWEN, 2, "--ep 2: the experts of qwen2 cannot be dealt out: .*base_model_ep_plan"),
        (FAMILIES[0], 3, "--ep 3 does not divide num_experts 4"),
        (
            FAMILIES[1] | {"mlp_only_layers": [0, 1]},
            2,
            "--ep 2: .*qwen3_moe.* no layer with experts",
        ),
    ],
)
def test_what_cannot_be_dealt_out_is_named_by_the_flag(
    plain: dict[str, Any], ep: int, why: str
) -> None:
    data = Data(seq_len=64, batch_size=12)
    with pytest.raises(ValueError, match=why):
        ParallelDims(dp_shard=6, ep=ep).check(model_of(plain), data)
    with pytest.raises(ValueError, match="--ep 4 does not divide --dp-shard 6"):
        ParallelDims(dp_shard=6, ep=4).check(model_of(FAMILIES[0]), data)
    with pytest.raises(ValueError, match=r"--ep 2 with --tp 2: experts .* are dealt out whole"):
        ParallelDims(dp_shard=6, ep=2, tp=2).check(model_of(FAMILIES[0]), data)
    ParallelDims(dp_shard=6, ep=2).check(model_of(FAMILIES[0]), data)


def test_experts_that_are_not_just_added_up_are_refused() -> None:
    model = build_foreign(model_of(FAMILIES[0]), 0)
    try_experts(model, 2)
    (experts, *_) = experts_of(model)
    forward = experts.forward
    experts.forward = lambda *given: forward(*given).relu()  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"--ep 2: .*mixtral.*not just added up"):
        try_experts(model, 2)


@pytest.mark.parametrize("config", FAMILIES, ids=lambda config: config["model_type"])
def test_layers_that_are_made_again_have_the_same_gradient(config: dict[str, Any]) -> None:
    """Also where the library adds to a product in place, which cannot be kept then."""
    found = []
    ways: tuple[Recompute, ...] = ("none", "selective", "full")
    for how in ways:
        model = build_foreign(model_of(config), 0)
        for block in model.blocks:
            Computing(recompute=how).prepare(block)
        _loss(model, TOKENS[0])[1].backward()
        found.append([one.grad for one in model.parameters() if one.grad is not None])
    for again in found[1:]:
        assert len(again) == len(found[0])
        for one, plain in zip(again, found[0], strict=True):
            torch.testing.assert_close(one, plain)
