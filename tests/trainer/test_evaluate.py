"""The validation loss: its value, its independence of batching, its shard."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from bootstrap.manifest import Model
from node.trainer.cross_entropy import mean_loss, summed_loss
from node.trainer.evaluate import evaluate, shard_tokens
from node.trainer.model import build

TINY = Model(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=24, max_seq_len=16)


def shard(windows: int) -> torch.Tensor:
    return shard_tokens(bytes(i * 37 % 256 for i in range(windows * 9)), seq_len=8)


def loss_of(
    model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor, at_once: int = 16
) -> float:
    def sums(windows: torch.Tensor) -> torch.Tensor:
        return summed_loss(model(windows[:, :-1]), windows[:, 1:], by_sequence=True)

    return evaluate(sums, tokens, at_once)


def test_a_shard_is_cut_into_windows():
    tokens = shard_tokens(bytes(range(18)), seq_len=8)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == [list(range(9)), list(range(9, 18))]
    for wrong in (b"", bytes(17)):
        with pytest.raises(ValueError, match="no whole number"):
            shard_tokens(wrong, seq_len=8)


def test_it_is_the_mean_over_all_tokens():
    model, tokens = build(TINY, 0), shard(37)
    loss = loss_of(model, tokens)
    assert loss == pytest.approx(mean_loss(model(tokens[:, :-1]), tokens[:, 1:]).item())
    for at_once in (1, 5, 64):
        assert loss_of(model, tokens, at_once) == pytest.approx(loss, abs=1e-6)


def test_known_losses():
    tokens = shard(20)
    assert loss_of(lambda x: torch.zeros(*x.shape, 256), tokens) == pytest.approx(math.log(256))
    following = {int(a): int(b) for row in tokens for a, b in pairwise(row)}

    def oracle(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x.apply_(following.__getitem__), 256) * 100.0

    assert loss_of(lambda x: oracle(x.clone()), tokens) == pytest.approx(0, abs=1e-6)


def test_it_repeats_bit_for_bit_and_leaves_no_gradient():
    model, tokens = build(TINY, 0), shard(20)
    assert loss_of(model, tokens) == loss_of(model, tokens)
    assert all(p.grad is None for p in model.parameters())
