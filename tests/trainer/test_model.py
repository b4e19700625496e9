"""The decoder: causality, grouping, ties, seeded initial values, pipeline stages."""

import math
import subprocess
import sys

import pytest
import torch
from blake3 import blake3
from places import ROOT

from bootstrap.manifest import Model
from node.trainer.cross_entropy import mean_loss
from node.trainer.layout import Layout
from node.trainer.model import (
    Decoder,
    RMSNorm,
    build,
    initial_value,
    rope_tables,
    rotate,
)

TINY = Model(
    vocab_size=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, max_seq_len=16
)


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 32, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_logits_shape_and_initial_loss_is_little_above_a_uniform_guess():
    model = build(Model(tied_embeddings=False), seed=0)
    x = torch.randint(0, 256, (4, 65), generator=torch.Generator().manual_seed(0))
    logits = model(x[:, :-1])
    assert logits.shape == (4, 64, 256)
    # unit-variance logits that know nothing cost half a nat
    assert abs(mean_loss(logits, x[:, 1:]).item() - math.log(256) - 0.5) < 0.15


def test_a_later_token_changes_no_earlier_logits():
    model = build(TINY, seed=0)
    x = tokens(2, 12)
    y = x.clone()
    y[:, 7] = (y[:, 7] + 1) % 32
    a, b = model(x), model(y)
    torch.testing.assert_close(a[:, :7], b[:, :7])
    assert (a[:, 7:] - b[:, 7:]).abs().amax(dim=-1).min() > 1e-4


def test_grouped_queries_equal_full_heads_with_repeated_keys_and_values():
    grouped = build(TINY, seed=1)
    full = Decoder(TINY.model_copy(update={"n_kv_heads": TINY.n_heads}))
    state = grouped.state_dict()
    head = TINY.d_model // TINY.n_heads
    for name in list(state):
        if "k_proj" in name or "v_proj" in name:
            heads = state[name].view(TINY.n_kv_heads, head, TINY.d_model)
            state[name] = heads.repeat_interleave(2, dim=0).reshape(-1, TINY.d_model)
    full.load_state_dict(state)
    x = tokens(2, 10)
    torch.testing.assert_close(grouped(x), full(x))


def test_rotary_scores_depend_on_distance_alone():
    rope = rope_tables(torch.arange(12), 8, 10_000.0)
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 8, generator=generator).unbind()
    turned_q, turned_k = rotate(q.expand(12, 8), rope), rotate(k.expand(12, 8), rope)
    scores = turned_q @ turned_k.T
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert scores[:, 0].std() > 1e-3


def test_rms_norm_is_the_formula():
    norm = RMSNorm(8, 1e-5)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 2, 8))
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight
    torch.testing.assert_close(norm(x), expected)


@pytest.mark.parametrize("tied", [True, False])
def test_ties(tied: bool):
    model = build(TINY.model_copy(update={"tied_embeddings": tied}), seed=0)
    assert model.lm_head is not None
    assert model.embed_tokens is not None
    assert (model.lm_head.weight is model.embed_tokens.weight) == tied
    assert ("lm_head.weight" in dict(model.named_parameters())) == (not tied)


def test_every_parameter_has_a_gradient():
    model = build(TINY.model_copy(update={"tied_embeddings": False}), seed=0)
    x = tokens(4, 13)
    mean_loss(model(x[:, :-1]), x[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.norm() > 0, name


def digest_of(model: Decoder) -> str:
    layout = Layout.of_module(model)
    vector = layout.flatten_into(model, torch.empty(layout.size))
    return blake3(vector.numpy().tobytes()).hexdigest()


def test_initial_values_are_keyed_by_seed_and_name_only():
    torch.manual_seed(123)
    first = build(TINY, seed=5)
    torch.rand(7)  # the global generator has no part in it
    assert digest_of(build(TINY, seed=5)) == digest_of(first)
    assert digest_of(build(TINY, seed=6)) != digest_of(first)
    name = "layers.1.mlp.up_proj.weight"
    alone = initial_value(TINY, name, torch.Size((24, 16)), 5)
    assert torch.equal(alone, dict(first.named_parameters())[name])


def test_initial_values_are_equal_in_another_process_with_other_threads():
    program = (
        "import torch; torch.set_num_threads(2)\n"
        "from bootstrap.manifest import Model\n"
        "import sys; sys.path[:0] = ['tests/trainer', 'tests/kits']\n"
        "from test_model import TINY, build, digest_of\n"
        "print(digest_of(build(TINY, seed=5)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        cwd=ROOT,
    )
    assert out.stdout.strip() == digest_of(build(TINY, seed=5))


def test_initial_spread():
    config = Model(d_model=128, d_ff=512, n_layers=8)
    for name, shape, std in [
        ("embed_tokens.weight", (256, 128), 128**-0.5),
        ("layers.0.self_attn.q_proj.weight", (128, 128), 128**-0.5),
        ("layers.0.mlp.down_proj.weight", (128, 512), 512**-0.5 / 4),
    ]:
        value = initial_value(config, name, torch.Size(shape), 0)
        assert value.std().item() == pytest.approx(std, rel=0.02)
        assert abs(value.mean().item()) < 0.02 * std


def test_pipeline_stages_compose_to_the_whole():
    config = TINY.model_copy(update={"tied_embeddings": False})
    whole, first, last = (build(config, seed=2) for _ in range(3))
    del first.layers["1"]
    first.norm = first.lm_head = None
    del last.layers["0"]
    last.embed_tokens = None
    names = dict(whole.named_parameters()).keys()
    assert names == dict(first.named_parameters()).keys() | dict(last.named_parameters()).keys()
    x = tokens(2, 9)
    torch.testing.assert_close(last(first(x)), whole(x))


def test_a_meta_model_allocates_nothing():
    with torch.device("meta"):
        model = Decoder(Model(d_model=8192, n_layers=2, n_heads=64, n_kv_heads=8, d_ff=28_672))
    assert all(p.is_meta for p in model.parameters())
    assert model(torch.zeros((1, 8), dtype=torch.long, device="meta")).shape == (1, 8, 256)


def test_it_learns_to_repeat():
    model = build(TINY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = tokens(2, 5).repeat(1, 3)[:, :13]
    for _ in range(60):
        loss = mean_loss(model(x[:, :-1]), x[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.5


def test_bfloat16_by_autocast_and_by_weights_stays_close():
    model = build(Model(), seed=0)
    x = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))
    exact = mean_loss(model(x[:, :-1]), x[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        cast = mean_loss(model(x[:, :-1]), x[:, 1:])
    cast.backward()
    low = mean_loss(model.to(torch.bfloat16)(x[:, :-1]), x[:, 1:])
    assert cast.dtype == low.dtype == torch.float32
    assert abs(cast.item() - exact.item()) < 0.02
    assert abs(low.item() - exact.item()) < 0.02
