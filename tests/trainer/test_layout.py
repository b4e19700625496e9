"""The flat layout: order, ties, round trips, and agreement with the model built or not."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bootstrap.manifest import Model
from node.trainer.layout import Layout, initial_vector
from node.trainer.model import build

TINY = Model(
    vocab_size=32, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, max_seq_len=16
)

shapes = st.lists(
    st.lists(st.integers(1, 5), min_size=0, max_size=3).map(torch.Size), min_size=1, max_size=12
).map(lambda found: [(f"p{i}", shape) for i, shape in enumerate(found)])


@given(shapes)
@settings(deadline=None)
def test_entries_are_contiguous_with_matrices_first(named):
    layout = Layout.of_shapes(named)
    end = 0
    for entry in layout.entries:
        assert entry.offset == end
        end += entry.size
        assert (len(entry.shape) >= 2) == (entry.offset < layout.dense)
    assert end == layout.size
    assert {(e.name, e.shape) for e in layout.entries} == set(named)
    for wanted in (True, False):  # definition order within each group
        group = [e.name for e in layout.entries if (len(e.shape) >= 2) == wanted]
        assert group == [name for name, shape in named if (len(shape) >= 2) == wanted]


@given(shapes, st.integers(0, 2**31))
@settings(deadline=None)
def test_flatten_and_load_are_inverse(named, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in named}
    layout = Layout.of_shapes(named)
    vector = layout.flatten_into(tensors, torch.full((layout.size,), float("nan")))
    assert not vector.isnan().any()
    copies = {name: torch.empty(shape) for name, shape in named}
    layout.load_from(vector, copies)
    assert all(torch.equal(copies[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("tied", [True, False])
def test_the_daemon_and_the_trainer_see_the_same_layout(tied: bool):
    config = TINY.model_copy(update={"tied_embeddings": tied})
    built, planned = Layout.of_module(build(config, 0)), Layout.of_config(config)
    assert built == planned
    assert built.digest == planned.digest
    assert built.size == sum(p.numel() for p in build(config, 0).parameters())
    assert built.size - built.dense == 16 * (2 * config.n_layers + 1)  # the norms
    assert sum("embed" in e.name or "head" in e.name for e in built.entries) == (1 if tied else 2)


def test_digest_tells_models_apart():
    changes = [{}, {"d_ff": 32}, {"n_layers": 3}, {"n_kv_heads": 4}, {"tied_embeddings": False}]
    configs = [TINY.model_copy(update=change) for change in changes]
    assert len({Layout.of_config(config).digest for config in configs}) == len(configs)


def test_a_large_model_is_laid_out_without_memory():
    config = Model(
        vocab_size=128_256, d_model=4096, n_layers=32, n_heads=32, n_kv_heads=8, d_ff=14_336,
        tied_embeddings=False,
    )  # fmt: skip
    assert Layout.of_config(config).size == 8_030_261_248  # Llama 3 8B


def test_initial_vector_is_the_built_model():
    layout = Layout.of_config(TINY)
    told: list[tuple[int, int]] = []
    out = torch.empty(layout.size)
    vector = initial_vector(TINY, 3, out, progress=lambda *at: told.append(at))
    assert told == sorted(told)
    assert told[-1] == (layout.size, layout.size)
    flat = layout.flatten_into(build(TINY, 3), torch.empty(layout.size))
    assert torch.equal(vector, flat)


def test_loading_a_module_changes_its_output_and_keeps_the_tie():
    model, other = build(TINY, 0), build(TINY, 1)
    layout = Layout.of_module(model)
    layout.load_from(layout.flatten_into(other, torch.empty(layout.size)), model)
    x = torch.arange(8).view(1, 8)
    assert torch.equal(model(x), other(x))
    assert model.lm_head is not None
    assert model.embed_tokens is not None
    assert model.lm_head.weight is model.embed_tokens.weight


def test_flattening_lower_precision_widens():
    model = build(TINY, 0).to(torch.bfloat16)
    layout = Layout.of_module(model)
    vector = layout.flatten_into(model, torch.empty(layout.size))
    assert vector.dtype == torch.float32
    assert torch.equal(vector, vector.bfloat16().float())


def test_what_does_not_fit_is_refused():
    layout = Layout.of_shapes([("a", torch.Size((2, 3))), ("b", torch.Size((3,)))])
    with pytest.raises(ValueError, match="layout of 9"):
        layout.views(torch.zeros(8))
    with pytest.raises(ValueError, match="b is missing"):
        layout.flatten_into({"a": torch.zeros(2, 3)}, torch.zeros(9))
    with pytest.raises(ValueError, match=r"a is \(3, 2\), not \(2, 3\)"):
        layout.load_from(torch.zeros(9), {"a": torch.zeros(3, 2), "b": torch.zeros(3)})
