"""The feed-forward layer as a mixture of experts: each token goes through ``top_k`` of them.

Routing as in Mixtral (2401.04088): softmax over the experts, the largest ``top_k``, their weights
scaled to a sum of one; no token is dropped. Experts are SwiGLU, their matrices stacked, so that
an expert is a slice. What keeps them equally busy is DeepSeek-V3's loss over single sequences
(2412.19437, equations 17 to 20), which, unlike one over a batch, is the same however the batch is
cut into micro-batches and dealt out to ranks.

Sizes: N = B T tokens, E experts, K = top_k, D = d_model, F = d_ff.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from bootstrap.manifest import Model

Whole = Callable[[Tensor], Tensor]  # a mean over this rank's tokens -> over all of the sequence


def here_alone(mean: Tensor) -> Tensor:
    """The mean as it is: no other rank has tokens of these sequences."""
    return mean


class Attach(torch.autograd.Function):
    """``x`` as it is, with a loss hung on it that is added to whatever is minimised."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        """``x``; the loss is a scalar."""
        ctx.like = loss
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of x as it comes, and one for the loss."""
        return grads[0], torch.ones_like(ctx.like)


class Experts(nn.Module):
    """E SwiGLU networks whose matrices are stacked along dim 0."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        wide, narrow = (config.d_ff, config.d_model), (config.d_model, config.d_ff)
        self.gate_proj = nn.Parameter(torch.empty(config.experts, *wide))
        self.up_proj = nn.Parameter(torch.empty(config.experts, *wide))
        self.down_proj = nn.Parameter(torch.empty(config.experts, *narrow))

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        """Rows [n, D] that are sorted by expert, ``counts`` [E] of them for each -> [n, D]."""
        return run_experts(x, counts, self.gate_proj, self.up_proj, self.down_proj)


def run_experts(x: Tensor, counts: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Each expert's rows [n, D] through its matrices [E, F, D], [E, F, D] and [E, D, F]."""
    outs = []
    for i, rows in enumerate(x.split(counts.tolist())):
        hidden = F.silu(F.linear(rows, gate[i])) * F.linear(rows, up[i])
        outs.append(F.linear(hidden, down[i]))
    return torch.cat(outs)


def logits(x: Tensor, router: Tensor) -> Tensor:
    """[..., D] by a router's weight [E, D] -> float32 [..., E], also under autocast.

    Rounded to bf16, nearly equal experts would tie, and which one is taken would depend on the
    layout (selective precision, 2101.03961 section 2.4).
    """
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.float(), router.float())


class Router(nn.Linear):
    """How much each token wants each expert."""

    def forward(self, input: Tensor) -> Tensor:
        """Hidden states [..., D] -> logits, float32 [..., E]."""
        return logits(input, self.weight)


class MixtureOfExperts(nn.Module):
    """Router and experts, in the place of a dense feed-forward layer."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.balance = config.expert_balance
        self.sequence_weight = 0.0  # of one sequence's balance loss; 0: not trained
        self.whole_sequence: Whole = here_alone
        self.gate = Router(config.d_model, config.experts, bias=False)
        self.experts = Experts(config)

    def forward(self, x: Tensor) -> Tensor:  # [B, T, D] -> [B, T, D]
        scores = self.gate(x).softmax(dim=-1)  # [B, T, E]
        weights, chosen = scores.topk(self.top_k, dim=-1)  # [B, T, K]
        weights = weights / weights.sum(dim=-1, keepdim=True)
        if self.sequence_weight and torch.is_grad_enabled():
            loss = balance_loss(scores, chosen, self.whole_sequence).sum()
            loss = loss * (self.balance * self.sequence_weight)
            x = Attach.apply(x, loss)
        flat, experts = x.flatten(0, 1), chosen.flatten()  # [N, D], [N K]
        order = experts.argsort(stable=True)
        rows = order // self.top_k  # the token of each place
        out = self.experts(flat[rows], experts.bincount(minlength=scores.shape[-1]))
        weighted = out * weights.flatten()[order, None].to(out.dtype)
        return torch.zeros_like(flat, dtype=out.dtype).index_add(0, rows, weighted).view(x.shape)


def balance_loss(scores: Tensor, chosen: Tensor, whole: Whole = here_alone) -> Tensor:
    """How unequally each sequence uses the experts, [B]; 1 where all are used alike.

    ``scores`` [B, T, E] after softmax, ``chosen`` int64 [B, T, K]. Where other ranks have tokens of
    the same sequences, the whole loss is the mean of what the ranks get.
    """
    uses = whole(torch.zeros_like(scores).scatter(-1, chosen, 1.0).mean(dim=1))  # [B, E]
    share = uses * (scores.shape[-1] / chosen.shape[-1])
    return (share * scores.mean(dim=1)).sum(dim=-1)
