"""Muon: directions that are orthogonal, and AdamW for everything that is no matrix of a layer."""

from __future__ import annotations

import math

import torch

from bootstrap.manifest import Inner, Model
from node.trainer.model import build
from node.trainer.muon import MOMENTUM, Muon, orthogonalised
from node.trainer.optim import make_optimizer, set_learning_rate

TINY = Model(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=24)


def test_singular_values_end_near_one_and_vectors_stay() -> None:
    torch.manual_seed(0)
    for shape in ((8, 8), (6, 20), (20, 6), (3, 12, 5)):
        matrices = torch.randn(shape)
        found = orthogonalised(matrices)
        values = torch.linalg.svdvals(found)
        assert found.shape == shape
        assert values.max() < 1.3
        assert values.min() > 0.3
        u, _, vt = torch.linalg.svd(matrices, full_matrices=False)
        inner = u.mT @ found @ vt.mT  # diagonal: the same singular vectors
        assert (inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4


def test_it_is_torchs_muon_up_to_rounding() -> None:
    """torch's own iterates in bf16, so the direction is compared, not the bits."""
    torch.manual_seed(0)
    ours, theirs = (torch.nn.Parameter(torch.ones(12, 20)) for _ in range(2))
    gradients = torch.randn(3, 12, 20)
    mine = Muon([{"params": [ours], "muon": True}], lr=0.1, weight_decay=0.1)
    reference = torch.optim.Muon(
        [theirs], lr=0.1, weight_decay=0.1, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    for gradient in gradients:
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        mine.step()
        reference.step()
    moved, expected = (ours - 1).detach().flatten(), (theirs - 1).detach().flatten()
    assert torch.cosine_similarity(moved, expected, dim=0) > 0.995
    assert math.isclose(moved.norm(), expected.norm(), rel_tol=0.03)


def test_what_is_no_matrix_of_a_layer_is_adamws() -> None:
    inner = Inner(optimizer="muon")
    model, twin = build(TINY, 0), build(TINY, 0)
    optimizer = make_optimizer(model, inner)
    adamw = make_optimizer(twin, Inner())
    for parameters in (model.named_parameters(), twin.named_parameters()):
        for _, parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.01)
    for each in (optimizer, adamw):
        set_learning_rate(each, 1e-2)
        each.step()
    others = dict(twin.named_parameters())
    for name, parameter in model.named_parameters():
        same = torch.equal(parameter, others[name])
        assert same == (parameter.ndim < 2 or not name.startswith("layers.")), name
    states = {name: set(optimizer.state[p]) for name, p in model.named_parameters()}
    assert states["layers.0.mlp.up_proj.weight"] == {"step", "exp_avg"}
    assert "exp_avg_sq" in states["embed_tokens.weight"]
