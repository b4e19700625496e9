"""The validation loss on the shared shard, summed in a fixed order so that islands agree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from node.data.tokenizer import BYTES_VOCABULARY
from node.trainer.data import IGNORED, targets, token_type

EVALUATION_BATCH = 16  # sequences at a time, where there is memory for them


def shard_tokens(shard: bytes, seq_len: int, vocab_size: int = BYTES_VOCABULARY) -> Tensor:
    """The shard's windows as int64 [n, seq_len + 1].

    Raises ValueError when the bytes are no whole, positive number of windows, or have ids that
    the vocabulary has not.
    """
    kind = token_type(vocab_size)
    window = (seq_len + 1) * kind.itemsize
    if not shard or len(shard) % window:
        raise ValueError(f"a shard of {len(shard)} bytes is no whole number of {window}")
    tokens = np.frombuffer(shard, dtype=kind).astype(np.int64)
    if tokens.max() >= vocab_size:
        raise ValueError(f"the shard has token {tokens.max()} of a vocabulary of {vocab_size}")
    return torch.from_numpy(tokens).view(-1, seq_len + 1)


@torch.no_grad()
def evaluate(
    sums: Callable[[Tensor], Tensor],
    tokens: Tensor,
    at_once: int = EVALUATION_BATCH,
    document_end: int | None = None,
) -> float:
    """Mean loss in nats a token on ``tokens``, int64 [n, T + 1].

    ``sums`` takes ``at_once`` of these windows [B, T + 1] and returns their losses summed by
    sequence, [B]; they are added up in order, in double precision. So it does not matter how many
    are taken at once, and ranks that share a model take the same collective calls. Where documents
    are apart (``document_end``: its token) it is the mean over the targets that count in training.
    """
    total = 0.0
    for windows in tokens.split(at_once):
        for loss in sums(windows).tolist():
            total += loss
    counted = int((targets(tokens, document_end) != IGNORED).sum())
    return total / max(1, counted)
