"""What decays in rounds of gradients is what decays in a single process."""

from __future__ import annotations

import pytest
import torch
from hf_kit import MIXTRAL, QWEN
from mode_swarm import Plain
from replica_kit import ME, OTHER, normal
from test_each_step_state import commit

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import OF_GRADIENTS
from node.replicas.gradient_state import GradientReplica, decaying
from node.run_rules import kind_of
from node.trainer.hf import build_foreign, model_of
from node.trainer.layout import Layout
from node.trainer.optim import make_optimizer
from protocols.codecs import RangeCodec
from protocols.memory.virtual_time import inline

MAMBA = {
    "model_type": "mamba", "vocab_size": 300, "hidden_size": 32, "state_size": 4,
    "num_hidden_layers": 2,
}  # fmt: skip
GPT_OSS = MIXTRAL | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize("optimizer", OF_GRADIENTS)
@pytest.mark.parametrize("plain", [MAMBA, GPT_OSS, QWEN], ids=lambda plain: plain["model_type"])
async def test_what_is_no_matrix_stands_still_where_gradients_are_zero(plain, optimizer):
    """Also of two dims and more: how fast states decay, and the biases of stacked experts."""
    model = model_of(plain)
    inner = {"lr": 0.01, "weight_decay": 0.5, "warmup_steps": 0, "schedule": "constant"}
    manifest = Manifest.model_validate(
        {
            "mode": "allreduce",
            "model": model.model_dump(),
            "data": {"batch_size": 8, "seq_len": 32},
            "inner": inner,
            "outer": {"optimizer": optimizer},
        }
    )
    layout = Layout.of_manifest(manifest)
    codec = RangeCodec("fp32", layout.dense)
    state = kind_of(manifest, layout)(manifest, ME, Plain(layout.size), codec, inline, (ME, OTHER))
    state.base.copy_(normal(1, layout.size))
    before = state.base.clone()
    await commit(state, torch.zeros(state.size), mine=True)

    lm = build_foreign(model, 0)
    groups = make_optimizer(lm, manifest.inner).param_groups
    decay = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    named = dict(lm.named_parameters())
    was = layout.views(before)
    still = set()
    for name, now in layout.views(state.base).items():
        rate = decay[id(named[name])]
        assert now.equal(was[name] * (1 - 0.01 * rate)), name
        if not rate and now.dim() >= 2:
            still.add(name.rpartition(".")[2])
    assert (
        still
        == {
            "mamba": {"A_log"},
            "gpt_oss": {"gate_up_proj_bias", "down_proj_bias"},
            "qwen2": set(),
        }[plain["model_type"]]
    )


def test_where_decay_begins_and_ends():
    shapes = {"a.weight": (2, 3), "b.weight": (4, 2), "c_bias": (3, 2), "d": (2, 2), "norm": (5,)}
    layout = Layout.of_shapes((name, torch.Size(shape)) for name, shape in shapes.items())
    assert decaying(layout.entries) == [0, 14, 20, 24]
    assert decaying(Layout.of_shapes([("bias", torch.Size([3, 2]))]).entries) == []


@pytest.mark.parametrize("cuts", [[], [1], [13, 14, 15], [7, 19, 23, 28]])
def test_where_parts_begin_changes_nothing(cuts):
    manifest = Manifest(mode="allreduce")
    expected = None
    for at in ([], cuts):
        state = GradientReplica(
            manifest, ME, Plain(29), RangeCodec("fp32", 24), inline, (ME,), edges=[0, 14, 20, 24]
        )
        state.base.copy_(normal(1, 29))
        mean, rates = normal(2, 29), state._rates_of(50)
        for start, stop in zip([0, *at], [*at, 29], strict=True):
            state._merge(slice(start, stop), mean[start:stop], rates)
        expected = state.base.clone() if expected is None else expected
        assert state.base.equal(expected)
