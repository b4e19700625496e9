"""What keeps the experts of models of transformers equally busy: as strong as the library's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_kit import MIXTRAL, QWEN

from bootstrap.manifest import Data, Manifest
from node.data.supply import Given, make
from node.trainer.computing import Computing
from node.trainer.engine import Engine
from node.trainer.foreign import cut_stage
from node.trainer.foreign_balance import balance_of, check_balance, keep_busy
from node.trainer.hf import ForeignDecoder, build_foreign, model_of
from node.trainer.parallel import Ranks
from protocols.errors import OperatorError

ALONE = Ranks.alone(torch.device("cpu"))
EXPERTS = MIXTRAL | {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "router_aux_loss_coef": 0.1,
}  # fmt: skip
JAMBA = {
    "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 1, "attn_layer_offset": 0,
    "expert_layer_period": 1, "expert_layer_offset": 0, "pad_token_id": 0,
}  # fmt: skip
FAMILIES = {
    "mixtral": {}, "qwen2_moe": {}, "qwen3_moe": {}, "olmoe": {"pad_token_id": 0}, "gpt_oss": {},
    "granitemoe": {}, "jamba": JAMBA,
}  # fmt: skip


def made(family: str, *, initial: str = "", **changes: Any) -> ForeignDecoder:
    plain = EXPERTS | FAMILIES.get(family, {}) | {"model_type": family} | changes
    return build_foreign(model_of(plain, initial=initial), 0)


def gradients(model: ForeignDecoder, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    named = model.named_parameters()
    return {name: one.grad.clone() for name, one in named if one.grad is not None}


def tokens(rows: int, length: int = 16) -> torch.Tensor:
    return torch.randint(300, (rows, length), generator=torch.Generator().manual_seed(0))


def hung(model: ForeignDecoder, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """The gradient of nothing but what hangs on the layers."""
    return gradients(model, model(x).sum() * 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_of_one_layer_and_sequence_it_is_the_librarys(family: str) -> None:
    model, x = made(family, num_hidden_layers=1), tokens(1)
    out = model.lm(input_ids=x, labels=x, output_router_logits=True, use_cache=False)
    theirs = gradients(model, out.aux_loss * 0.1)
    balance = balance_of(model)
    assert balance is not None
    keep_busy(model, balance, ALONE, 1, 16)
    ours = hung(model, x)
    assert theirs
    assert all(torch.allclose(ours[name], one, atol=1e-7) for name, one in theirs.items())
    with torch.no_grad():
        assert torch.equal(model(x), made(family, num_hidden_layers=1)(x))


def test_a_sequence_that_only_keeps_ranks_together_trains_no_router() -> None:
    """Where ranks do not divide the batch some take a sequence of zeros instead."""
    model, x = made("qwen3_moe"), tokens(1)
    balance = balance_of(model)
    assert balance is not None
    counts = keep_busy(model, balance, ALONE, 1, 16)
    name = "lm.model.layers.0.mlp.gate.weight"
    counts(False)
    assert not hung(model, x)[name].any()
    counts(True)
    assert hung(model, x)[name].any()


def test_a_layer_counts_the_same_in_a_stage() -> None:
    whole, stage, x = made("qwen3_moe"), made("qwen3_moe"), tokens(2)
    balance = balance_of(whole)
    assert balance is not None
    assert balance.weight == pytest.approx(0.1 * 2 / 2)  # two experts a token, two layers
    keep_busy(whole, balance, ALONE, 2, 16)
    of_stage = balance_of(stage)
    assert of_stage == balance
    cut_stage(stage, 0, 2)
    keep_busy(stage, balance, ALONE, 2, 16)
    name = "lm.model.layers.0.mlp.gate.weight"
    first = hung(stage, x)[name]
    assert first.abs().max() > 0
    del whole.get_submodule("lm.model.layers.1.mlp.gate").forward  # the other stage's
    torch.testing.assert_close(hung(whole, x)[name], first)


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_an_island_adds_it_however_its_batch_is_cut(recompute: Any) -> None:
    data = Data(seq_len=16, batch_size=4)

    def step(coefficient: float, micro_batch: int) -> tuple[float, torch.Tensor]:
        plain = EXPERTS | {"model_type": "qwen3_moe", "router_aux_loss_coef": coefficient}
        run = Manifest(model=model_of(plain), data=data)
        engine, windows = Engine(run, ALONE, Computing(recompute=recompute)), tokens(4, 17)
        loss = engine.gradients(
            lambda rows: (
                windows[rows.start : rows.stop, :-1],
                windows[rows.start : rows.stop, 1:],
            ),
            micro_batch,
        )
        gradient = engine.parts[0].get_parameter("lm.model.layers.0.mlp.gate.weight").grad
        assert gradient is not None
        return loss, gradient

    (bare, without), (loss, whole), (_, parts) = step(0.0, 4), step(1.0, 4), step(1.0, 1)
    assert loss == pytest.approx(bare)  # what is told is the loss of the text
    assert (whole - without).abs().max() > 1e-3
    torch.testing.assert_close(parts, whole, rtol=1e-4, atol=1e-7)


def test_where_nothing_asks_for_it_there_is_none() -> None:
    assert balance_of(made("qwen3_moe", router_aux_loss_coef=0.0)) is None
    assert balance_of(build_foreign(model_of(QWEN), 0)) is None


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "jetmoe"])
def test_routers_that_come_with_weights_are_trained_as_by_the_library(family: str) -> None:
    """It has the loss where its switch is on, and published configurations have it off."""
    assert balance_of(made(family)) is not None
    assert balance_of(made(family, initial="0" * 64)) is None
    switched_on = made(family, initial="0" * 64, output_router_logits=True)
    assert balance_of(switched_on) == balance_of(made(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_librarys_own_loss_is_computed_by_nobody(family: str) -> None:
    """It cannot be where documents are kept apart, by a mask of more dimensions than it knows."""
    plain = EXPERTS | FAMILIES[family] | {"model_type": family, "output_router_logits": True}
    x = tokens(2)
    x[:, 5] = 1
    logits = [
        build_foreign(model_of(one, attention="document", document_end=1), 0)(x)
        for one in (plain, plain | {"output_router_logits": False})
    ]
    assert torch.equal(*logits)


def test_a_family_that_chooses_in_another_way_is_refused() -> None:
    """When the model is built: in its first step the node would take part already."""
    plain = EXPERTS | {"model_type": "doge", "is_moe": True, "num_experts": 16}
    run = Manifest(model=model_of(plain), data=Data(seq_len=16, batch_size=4))
    with pytest.raises(OperatorError, match="experts of doge equally busy") as caught:
        Engine(run, ALONE, Computing())
    assert caught.value.code == "E606"


def no_kernel(*_: object) -> None:
    raise RuntimeError("no kernel for this device")


def on_a_gpu_alone(family: str, **more: Any) -> ForeignDecoder:
    """What is built is on the CPU, where its kernels do not run."""
    model = made(family, **more)
    model.blocks[0].register_forward_pre_hook(no_kernel)
    return model


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "granitemoe"])
def test_of_a_family_that_computes_on_a_gpu_alone_the_routers_are_looked_at(family: str) -> None:
    assert balance_of(on_a_gpu_alone(family)) == balance_of(made(family))


def test_a_family_that_computes_on_a_gpu_alone_is_refused_before_its_first_step() -> None:
    """Its node would take part already."""
    with pytest.raises(OperatorError, match="experts of doge equally busy"):
        balance_of(on_a_gpu_alone("doge", is_moe=True, num_experts=16))


def test_routers_that_need_a_gpu_themselves_are_refused() -> None:
    model = on_a_gpu_alone("qwen3_moe")
    for module in model.modules():
        if type(module).__name__.endswith("Router"):
            module.register_forward_pre_hook(no_kernel)
    with pytest.raises(OperatorError, match="can only be seen on a GPU") as caught:
        balance_of(model)
    assert caught.value.code == "E606"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_run_may_have_a_family_that_is_known(family: str) -> None:
    check_balance(model_of(EXPERTS | FAMILIES[family] | {"model_type": family}))
    check_balance(model_of(QWEN))


def test_a_run_does_not_come_to_be_with_a_family_that_would_be_refused(tmp_path: Path) -> None:
    """The model is as large as it may: nothing of it is built."""
    plain = {"model_type": "doge", "is_moe": True, "hidden_size": 8192, "intermediate_size": 65536}
    run = Manifest(model=model_of(plain), data=Data(seq_len=16, batch_size=4))
    with pytest.raises(OperatorError, match="experts of doge equally busy") as caught:
        make(run, "", Given(), tmp_path, lambda done, total: None)
    assert caught.value.code == "E606"
    with_weights = {"initial": "0" * 64}  # whose routers are trained
    check_balance(run.model.model_copy(update=with_weights))


def test_looking_at_what_a_model_returns_leaves_nothing_behind_and_ends_at_the_first_layer() -> (
    None
):
    model, ran = made("qwen3_moe"), list[int]()
    for number, block in enumerate(model.blocks):
        block.register_forward_pre_hook(lambda *_, number=number: ran.append(number))
    assert balance_of(model) is not None
    assert ran == [0]
    assert not any(module._forward_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
