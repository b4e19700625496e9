"""What is minimised and evaluated: cross-entropy in nats, in fp32, of the targets that count."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from node.trainer.data import IGNORED
from node.trainer.weights import local


def summed_loss(logits: Tensor, targets: Tensor, *, by_sequence: bool = False) -> Tensor:
    """Of ``logits`` [B, T, V] and ``targets`` [B, T], on this rank.

    Summed over all targets that count, or over those of each sequence, [B].
    """
    flat = logits.flatten(0, 1).float(), targets.flatten()
    if by_sequence:
        losses = F.cross_entropy(*flat, reduction="none", ignore_index=IGNORED)
        return local(losses).view(targets.shape).sum(dim=1)
    return local(F.cross_entropy(*flat, reduction="sum", ignore_index=IGNORED))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The same, as the mean over the targets that count; of whole sequences."""
    return summed_loss(logits, targets) / (targets != IGNORED).sum()
