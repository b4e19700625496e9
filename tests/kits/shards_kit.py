"""A script's module in bf16 whose rows are shared by two ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from script_kit import TARGET
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from trainer_kit import Script, begin

from node.script.parameters import named_parameters
from node.script.progress import ScriptProgress
from node.trainer.layout import Layout
from node.trainer.leader import Leader
from node.trainer.parallel import Ranks
from node.trainer.shared import SharedVectors


@dataclass
class Shared:
    """What one of the two has of it; it has begun."""

    model: nn.Linear
    optimizer: torch.optim.Optimizer
    layout: Layout
    ranks: Ranks
    base: Tensor
    sent: Tensor
    progress: ScriptProgress


@contextmanager
def shared_rows(
    rank: int, store: str, optimizer_of: Callable[[Any], torch.optim.Optimizer]
) -> Iterator[Shared]:
    """One of two processes, to its end; the daemon says nothing of itself."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).bfloat16()  # three rows on two ranks
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = optimizer_of(model.parameters())
    layout, ranks = Layout.of_module(model), Ranks.met(torch.device("cpu"))
    vectors, leader = SharedVectors.create(layout.size), None
    base, sent = vectors.tensors()
    if ranks.leads:
        script = Script(lambda report: [])
        leader = Leader(script, vectors, 0.0, lambda: script.now)  # type: ignore[arg-type]
    parameters = named_parameters(model)
    progress = ScriptProgress(None, parameters, optimizer, layout, ranks, leader, 0)
    base += torch.linspace(0.5, 1.5, layout.size)
    progress.begin(begin(target_steps=TARGET))
    yield Shared(model, optimizer, layout, ranks, base, sent, progress)
    assert ranks.all_true(True)  # gloo ends a process whose peer has gone before
    dist.destroy_process_group()
