"""Token files and batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.trainer.data import TrainingData, encode, gather, open_tokens
from node.trainer.sampler import Sampler


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_bytes_are_a_lossless_tokenizer(text):
    assert encode(text).decode() == text


def test_a_lone_surrogate_does_not_stop_encoding():
    assert encode("a\ud800b") == b"a?b"


@pytest.mark.parametrize(
    ("vocab_size", "dtype"), [(256, np.uint8), (257, "<u2"), (65_536, "<u2"), (65_537, "<u4")]
)
def test_open_tokens(tmp_path, vocab_size, dtype):
    ids = np.arange(1000) % vocab_size
    path = tmp_path / "tokens.bin"
    path.write_bytes(ids.astype(dtype).tobytes())
    tokens = open_tokens(path, vocab_size)
    assert np.array_equal(tokens, ids)
    assert not tokens.flags.writeable


def test_open_tokens_refuses(tmp_path):
    path = tmp_path / "tokens.bin"
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="0 bytes"):
        open_tokens(path)
    path.write_bytes(b"abc")
    with pytest.raises(ValueError, match="3 bytes"):
        open_tokens(path, 1000)


def test_gather():
    got = gather(np.arange(20, dtype=np.uint16), np.array([3, 0, 16]), 4)
    assert got.dtype == torch.int64
    assert got.tolist() == [[3, 4, 5, 6], [0, 1, 2, 3], [16, 17, 18, 19]]


def test_targets_are_inputs_moved_by_one():
    tokens = np.arange(1000, dtype=np.uint16)
    x, y = TrainingData(tokens, Sampler(len(tokens), seq_len=16, batch_size=4, seed=0)).batch(
        0, 0, 1, 0
    )
    assert x.shape == y.shape == (4, 16)
    assert torch.equal(y, x + 1)


def test_ranks_split_a_batch():
    tokens = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    data = TrainingData(tokens, Sampler(len(tokens), seq_len=16, batch_size=6, seed=0))
    whole, _ = data.batch(2, 1, 3, 4)
    ranks = [data.batch(2, 1, 3, 4, range(2 * rank, 2 * rank + 2))[0] for rank in range(3)]
    assert torch.equal(torch.cat(ranks), whole)
