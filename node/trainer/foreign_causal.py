"""Whether a model of transformers sees no token behind its own, as next-token prediction needs.

The library calls some families causal language models that look ahead by default, or whose
configuration makes them do so. A few tokens are tried before such a model is taken.
"""

from __future__ import annotations

import torch

from node.trainer.foreign_context import close
from node.trainer.foreign_documents import LEAK
from node.trainer.foreign_storage import lent
from node.trainer.hf import ForeignDecoder, family, unfit

TRIED = 16  # tokens, at most: a large model is read twice for them


def check_causal(model: ForeignDecoder, seq_len: int) -> None:
    """Raises OperatorError E606 where tokens of a whole model of the CPU see those behind them."""
    length = min(seq_len, TRIED, model.config.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randint(model.config.vocab_size, (2, 1, length), generator=generator)
    half, late = length // 2, torch.arange(length) >= length // 2
    try:
        with lent(model), torch.no_grad():
            plain, ahead = model(x), model(torch.where(late, other, x))
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError):
        return  # some want sequences of another length, and inner steps tell of all else
    plain, ahead = plain[:, :half], ahead[:, :half]
    if plain.isfinite().all() and not close(ahead, plain, LEAK):
        raise unfit(f"{family(model.config)} lets tokens see those behind them, as it is set here")
