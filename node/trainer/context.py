"""Ranks that share one sequence: which tokens each has, and attention across them.

Both ways here replace ``attend`` of the model's attention: a function of queries [B, H, S, E],
keys and values [B, G, S, E] of this rank's S = T / cp tokens, with rotary positions applied.

*Ulysses* (2309.14509): before attention each rank swaps tokens for heads, and back after it. Two
exchanges a layer, as many ranks as key/value heads at most.

*Ring* (2310.01889): keys and values travel round, and each rank folds what passes into a running
softmax (2112.05682). As many ranks as there are tokens. A rank has the r-th part from the front
and the r-th from the back, so that all have equally much to do under the causal mask.

Where packed documents are apart, every rank knows the documents of the whole sequence, which it has
read. With Ulysses their mask is that of whole sequences; a ring compares the numbers of the
documents block by block, and has no mask of T x T anywhere.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from node.trainer.dims import Attention
from node.trainer.model import Attend, causal_attention


def positions(length: int, rank: int, ranks: int, kind: Attention) -> Tensor:
    """Positions int64 [T / cp] of the tokens that a rank has, ascending."""
    if kind == "ulysses":
        return torch.arange(length).chunk(ranks)[rank]
    parts = torch.arange(length).chunk(2 * ranks)
    return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]))


def attention_over(mesh: DeviceMesh, kind: Attention) -> Attend:
    """Causal attention over all tokens of the ranks of a mesh of one axis."""
    return partial(_ulysses if kind == "ulysses" else _ring, group=mesh.get_group())


class AllToAll(torch.autograd.Function):
    """``all_to_all_single`` over dim 0 with uneven parts; its gradient goes the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        """Parts of ``sent`` rows go out, parts of ``received`` rows come in, by rank."""
        ctx.parts, ctx.group = (received, sent), group
        return _all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        """Send the rows' gradients back to the ranks that the rows came from."""
        received, sent = ctx.parts
        return _all_to_all(grads[0], sent, received, ctx.group), None, None, None


def _all_to_all(
    x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    """As an operator that returns what came, which selective recomputation can keep."""
    return funcol.wait_tensor(funcol.all_to_all_single(x.contiguous(), received, sent, group))


def all_to_all(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Rows [n, ...] to other ranks and theirs to us, with gradient."""
    return AllToAll.apply(x, received, sent, group)


def _ulysses(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, group: dist.ProcessGroup
) -> Tensor:
    """``mask``: bool [B, 1, T, T], of all tokens of a sequence."""
    ranks = dist.get_world_size(group)

    def heads_for_tokens(x: Tensor) -> Tensor:  # [B, H, S, E] -> [B, H / cp, T, E]
        parts = torch.stack(x.chunk(ranks, dim=1))  # [cp, B, H / cp, S, E]
        return torch.cat(all_to_all(parts, [1] * ranks, [1] * ranks, group).unbind(), dim=2)

    def tokens_for_heads(x: Tensor) -> Tensor:  # [B, H / cp, T, E] -> [B, H, S, E]
        parts = torch.stack(x.chunk(ranks, dim=2))
        return torch.cat(all_to_all(parts, [1] * ranks, [1] * ranks, group).unbind(), dim=1)

    q, k, v = heads_for_tokens(q), heads_for_tokens(k), heads_for_tokens(v)
    return tokens_for_heads(causal_attention(q, k, v, mask))


class Shift(torch.autograd.Function):
    """A tensor to the next rank of a ring, and the previous one's to us; gradients backwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The previous rank's ``x``, which has the shape of ours."""
        ctx.group = group
        return _shift(x, group, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """The gradient of what we sent, from the rank that got it."""
        return _shift(grads[0], ctx.group, -1), None


def _shift(x: Tensor, group: dist.ProcessGroup, by: int) -> Tensor:
    ranks, me = dist.get_world_size(group), dist.get_rank(group)
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    to = dist.get_global_rank(group, (me + by) % ranks)
    source = dist.get_global_rank(group, (me - by) % ranks)
    moves = [dist.P2POp(dist.isend, x, to, group), dist.P2POp(dist.irecv, out, source, group)]
    for move in dist.batch_isend_irecv(moves):
        move.wait()
    return out


def _ring(
    q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None = None, *, group: dist.ProcessGroup
) -> Tensor:
    """``documents``: numbers of the documents of all tokens of a sequence, [B, T]."""
    ranks, me = dist.get_world_size(group), dist.get_rank(group)

    def numbers(rank: int) -> Tensor | None:  # of a rank's tokens, [B, S]
        if documents is None:
            return None
        parts = documents.chunk(2 * ranks, dim=1)
        return torch.cat((parts[rank], parts[2 * ranks - 1 - rank]), dim=1)

    own = numbers(me)
    # one type, that of the values: under autocast rotary positions may have left the others in fp32
    q, keys_values = q.to(v.dtype), torch.stack((k.to(v.dtype), v))
    groups = q.shape[1] // k.shape[1]
    best = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)  # running maximum [B, H, S]
    total = torch.zeros_like(best)  # of the exponentials
    out = torch.zeros_like(q, dtype=torch.float32)
    half = q.shape[2] // 2
    for step in range(ranks):
        source = (me - step) % ranks
        # The causal mask in parts: an earlier rank's first part is seen by all our rows, its last
        # by none; a later rank's tokens are all seen by our last part, none by our first.
        rows = slice(half, None) if source > me else slice(None)
        columns = slice(None, half) if source < me else slice(None)
        theirs, apart = numbers(source), None
        if own is not None and theirs is not None:
            apart = own[:, rows, None] != theirs[:, None, columns]
        more: tuple[Tensor, Tensor, Tensor] = (
            checkpoint(  # recomputes the scores in backward: no S x S matrix is kept
                _block,
                q[:, :, rows],
                keys_values[:, :, :, columns].repeat_interleave(groups, dim=2),
                best[:, :, rows],
                source == me,
                apart,
                use_reentrant=False,
            )
        )
        fresh_best, fresh_total, fresh_out = more
        scale = (best[:, :, rows] - fresh_best).exp()  # 0 where there was nothing before
        new_total = total[:, :, rows] * scale + fresh_total
        new_out = out[:, :, rows] * scale[..., None] + fresh_out
        if source > me:
            best = torch.cat((best[:, :, :half], fresh_best), dim=2)
            total = torch.cat((total[:, :, :half], new_total), dim=2)
            out = torch.cat((out[:, :, :half], new_out), dim=2)
        else:
            best, total, out = fresh_best, new_total, new_out
        if step + 1 < ranks:
            keys_values = Shift.apply(keys_values, group)
    return (out / total[..., None]).to(q.dtype)


def _block(
    q: Tensor, keys_values: Tensor, best: Tensor, diagonal: bool, apart: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One block's new maximum [B, H, S], sum of exponentials, and values weighted by them.

    On the diagonal rows and columns are the same tokens, in ascending order; this block comes
    first, so every row's maximum is finite. ``apart`` [B, rows, columns]: which row does not see
    which column, being of another document. As in flash attention (2205.14135), products take the
    inputs' type, to which weights are rounded too, and scores and sums stay fp32.
    """
    scores = product(q, keys_values[0].transpose(-2, -1)) * q.shape[-1] ** -0.5
    if diagonal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(mask, -torch.inf)
    if apart is not None:
        scores = scores.masked_fill(apart[:, None], -torch.inf)
    best = torch.maximum(best, scores.amax(dim=-1)).detach()  # the result does not depend on it
    weights = (scores - best[..., None]).exp()
    return best, weights.sum(dim=-1), product(weights.to(q.dtype), keys_values[1])


def product(a: Tensor, b: Tensor) -> Tensor:
    """Of matrices [B, H, M, K] and [B, H, K, N] of one type, in fp32, also under autocast."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b if a.dtype == torch.float32 else _Product.apply(a, b)


class _Product(torch.autograd.Function):
    """The product of half-precision matrices, in fp32; gradients have the matrices' types."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        if a.device.type != "cuda":  # elsewhere torch has none that leaves its result unrounded
            return a.float() @ b.float()
        flat = torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32)
        return flat.unflatten(0, a.shape[:2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = grads[0].to(a.dtype)
        return grad @ b.transpose(-2, -1), a.transpose(-2, -1) @ grad
