"""Models of transformers whose packed documents are to be kept apart (``model.attention``).

The library has no word for that: it is given a mask of who sees whom. What a family makes of one is
its own business; some put it in the place of their window, some have states or convolutions that
know of no mask. So a few tokens are tried before a model is taken.
"""

from __future__ import annotations

import torch

from node.trainer.foreign_context import PROBED, close, short_window
from node.trainer.foreign_storage import lent
from node.trainer.hf import ForeignDecoder, family, unfit
from protocols.errors import OperatorError

LEAK = 1e-5  # of the largest logit: the same mask with other tokens behind it changes hardly a bit


def check_documents(model: ForeignDecoder, seq_len: int) -> None:
    """Raises OperatorError E606 where a whole model of the CPU would not keep documents apart."""
    window = short_window(model.lm.config.get_text_config(), seq_len)
    if window is not None:
        raise _refused(model, f"a layer sees {window} tokens, fewer than a sequence has")
    length = min(seq_len, PROBED, model.config.max_seq_len)
    generator = torch.Generator().manual_seed(0)
    x, other = torch.randint(model.config.vocab_size, (2, 1, length), generator=generator)
    one = torch.zeros(1, length, dtype=torch.int64)
    half, late = length // 2, torch.arange(length) >= length // 2
    two = one + late
    before = model.config
    try:
        with lent(model), torch.no_grad():
            packed = model(x, documents=one)
            ahead = model(torch.where(late, other, x), documents=one)
            apart, behind = (model(y, documents=two) for y in (x, torch.where(late, x, other)))
            model.config = before.model_copy(update={"attention": "causal"})
            plain = model(x)
    except Exception as error:  # whatever a family makes of a mask that it does not expect
        why = f"it takes no mask of them ({type(error).__name__}: {error})"
        raise _refused(model, why[:300]) from error
    finally:
        model.config = before
    if not close(packed, plain):
        raise _refused(model, "with one document it computes something else than without")
    if not close(ahead[:, :half], packed[:, :half], LEAK):
        raise _refused(model, "tokens would see those behind them")
    if not close(behind[:, half:], apart[:, half:], LEAK):
        raise _refused(model, "tokens would see those of the document before theirs")


def _refused(model: ForeignDecoder, why: str) -> OperatorError:
    kind = family(model.config)
    return unfit(f'{kind} cannot keep documents apart (model.attention = "document"): {why}')
