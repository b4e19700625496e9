"""Ranks that share the experts of a mixture: each has some, and tokens travel to theirs.

The router runs where the tokens are. Their hidden states go to the experts' ranks and come back
by one exchange each (Switch, 2101.03961); how many go where is exchanged first.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from node.trainer.context import all_to_all
from node.trainer.model_moe import Experts, run_experts
from node.trainer.weights import local


def share_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Leave each rank of a mesh of one axis its slice of the experts, in place."""
    for name, parameter in list(experts.named_parameters(recurse=False)):
        slices = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(experts, name, nn.Parameter(slices))
    # FSDP's hooks are around the call of the module, not in `forward`
    experts.forward = partial(_forward, experts, mesh.get_group())  # type: ignore[method-assign]


def _forward(experts: Experts, group: dist.ProcessGroup, x: Tensor, counts: Tensor) -> Tensor:
    """What :meth:`Experts.forward` does, with the rows of all ranks."""
    ranks = dist.get_world_size(group)
    theirs = torch.empty_like(counts)  # by source and expert of ours
    dist.all_to_all_single(theirs, counts, group=group)
    sent = counts.view(ranks, -1).sum(dim=1).tolist()
    received = theirs.view(ranks, -1).sum(dim=1).tolist()
    rows = all_to_all(x, received, sent, group)  # sorted by source, then by expert
    mine = theirs.numel() // ranks
    expert = torch.arange(mine, device=x.device).repeat(ranks).repeat_interleave(theirs)
    order = expert.argsort(stable=True)
    out = run_experts(
        rows[order],
        theirs.view(ranks, -1).sum(dim=0),
        local(experts.gate_proj),
        local(experts.up_proj),
        local(experts.down_proj),
    )
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return all_to_all(out[back], sent, received, group)
