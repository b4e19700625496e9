"""Ranks that share a mixture of experts: each has some of them, or a part of each.

*Expert parallel*: the router runs where the tokens are. Their hidden states go to the experts'
ranks and come back by one exchange each (Switch, 2101.03961); how many go where is exchanged first.

*Tensor parallel*: every rank sends the whole sequence through its part of every expert's hidden
units, and the parts of the sums are added up. So each rank's gradient of the router, and of
what goes in, is a part of a sum too.

*Context parallel* needs neither: only the balance loss is over whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from node.trainer.context import all_to_all
from node.trainer.model_moe import Experts, MixtureOfExperts, logits, run_experts
from node.trainer.parallel import Ranks
from node.trainer.weights import local

Run = Callable[[Tensor, Tensor], Tensor]  # rows [n, D] sorted by expert, how many for each


def share_mixture(mixture: MixtureOfExperts, ranks: Ranks) -> None:
    """Leave this rank its part of a mixture of experts, in place, by the axes ep, tp and cp."""
    dims, experts = ranks.dims, mixture.experts
    if dims.cp > 1:
        mixture.whole_sequence = partial(mean_over, ranks.axis("cp").get_group())
    axes = [axis for axis in ("ep", "tp") if getattr(dims, axis) > 1]
    if not axes:
        return
    assert ranks.mesh is not None
    mesh = ranks.mesh[tuple(axes)]
    for name, parameter in list(experts.named_parameters(recurse=False)):
        cut = {"ep": Shard(0), "tp": Shard(2 if name == "down_proj" else 1)}  # of [E, D, F]
        place(experts, name, parameter, mesh, [cut[axis] for axis in axes])
    # FSDP's hooks are around the call of the module, not in `forward`
    run = partial(_elsewhere, experts, ranks.axis("ep").get_group()) if dims.ep > 1 else None
    experts.forward = run or partial(_here, experts)  # type: ignore[method-assign]
    if dims.tp > 1:
        tp = ranks.axis("tp")
        place(mixture.gate, "weight", mixture.gate.weight, tp, [Replicate()])
        mixture.gate.forward = partial(_route, mixture.gate)  # type: ignore[method-assign]
        mixture.register_forward_pre_hook(_fetch_tokens)
        mixture.register_forward_hook(partial(_add_parts, tp))


def place(
    module: nn.Module, name: str, whole: Tensor, mesh: DeviceMesh, places: list[Placement]
) -> None:
    """Put this rank's part of ``whole`` in a parameter's place."""
    part = distribute_tensor(whole.detach(), mesh, places, src_data_rank=None)
    setattr(module, name, nn.Parameter(part))


def mean_over(group: dist.ProcessGroup, mine: Tensor) -> Tensor:
    """The mean of something without gradient over the ranks of a group."""
    dist.all_reduce(mine, group=group)
    return mine / dist.get_world_size(group)


def _route(gate: nn.Linear, x: Tensor) -> Tensor:
    """The router's logits; each rank's gradient of them is a part of the sum."""
    weight = gate.weight
    assert isinstance(weight, DTensor)
    return logits(x, weight.to_local(grad_placements=[Partial()]))


def _fetch_tokens(mixture: nn.Module, args: Any) -> Any:
    (x,) = args  # [B, T, D] as a DTensor, of which this rank has T / tp tokens
    return (x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]),)


def _add_parts(mesh: DeviceMesh, mixture: nn.Module, args: Any, out: Tensor) -> Tensor:
    """[B, T, D], a part of the sum -> this rank's tokens of the sum [B, T / tp, D]."""
    parts = DTensor.from_local(out, mesh, [Partial()], run_check=False)
    return parts.redistribute(placements=[Shard(1)]).to_local()


def _matrices(experts: Experts) -> tuple[Tensor, Tensor, Tensor]:
    return local(experts.gate_proj), local(experts.up_proj), local(experts.down_proj)


def _here(experts: Experts, x: Tensor, counts: Tensor) -> Tensor:
    """What :meth:`Experts.forward` does, with what this rank has of every expert."""
    return run_experts(x, counts, *_matrices(experts))


def _elsewhere(experts: Experts, group: dist.ProcessGroup, x: Tensor, counts: Tensor) -> Tensor:
    """The same with the rows of all ranks, and the experts of this one."""
    return exchange(partial(_here, experts), group, x, counts)


def exchange(run: Run, group: dist.ProcessGroup, x: Tensor, counts: Tensor) -> Tensor:
    """Rows [n, D] that are sorted by expert through the experts of all ranks -> [n, D].

    ``counts`` [E] of them are for each; ``run`` is called with rows for this rank's E / ep experts.
    """
    ranks = dist.get_world_size(group)
    theirs = torch.empty_like(counts)  # by source and expert of ours
    dist.all_to_all_single(theirs, counts, group=group)
    rows_by_rank = torch.stack((counts, theirs)).view(2, ranks, -1).sum(dim=2)
    sent, received = rows_by_rank.tolist()  # in one copy: the device is waited for
    rows = all_to_all(x, received, sent, group)  # sorted by source, then by expert
    mine = theirs.numel() // ranks
    expert = torch.arange(mine, device=x.device).repeat(ranks)
    expert = expert.repeat_interleave(theirs, output_size=sum(received))
    order = expert.argsort(stable=True)
    out = run(rows[order], theirs.view(ranks, -1).sum(dim=0))
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return all_to_all(out[back], sent, received, group)
