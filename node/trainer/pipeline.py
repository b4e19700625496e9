"""Pipeline stages: which layers a rank has, and micro-batches on their way through all of them.

The schedules are torch's: GPipe (1811.06965), 1F1B (2104.04473), interleaved 1F1B and ZBV
(2401.10241). With the last two a rank has two stages, with ZBV the first and the last for rank 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from node.trainer.dims import ParallelDims
from node.trainer.model import Decoder
from node.trainer.parallel import Ranks

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and targets


def rank_of_stage(dims: ParallelDims, stage: int) -> int:
    """Which coordinate on the axis ``pp`` has a stage."""
    if dims.schedule == "zbv" and stage >= dims.pp:
        return 2 * dims.pp - 1 - stage
    return stage % dims.pp


def cut(model: Decoder, stage: int, stages: int) -> Decoder:
    """Remove from a whole model, in place, all that is not of a stage."""
    if stage > 0:
        model.embed_tokens = None
    if stage < stages - 1:
        model.norm = model.lm_head = None
    layers = len(model.layers)
    kept = range(layers * stage // stages, layers * (stage + 1) // stages)
    for name in list(model.layers):
        if int(name) not in kept:
            del model.layers[name]
    return model


def check_schedule(dims: ParallelDims, device: torch.device) -> None:
    """Raises ValueError where this torch cannot run a schedule on such devices."""
    # a rank with two neighbouring stages sends to itself at first, which gloo does not do
    if (
        dims.pp > 1
        and dims.schedule == "zbv"
        and device.type == "cpu"
        and torch.__version__ < "2.12"
    ):
        raise ValueError(
            f"the schedule zbv on CPUs needs torch 2.12, and this is {torch.__version__}"
        )


class Pipeline:
    """This rank's stages, by their number, and the way through all stages."""

    def __init__(self, stages: dict[int, Decoder], ranks: Ranks, width: int) -> None:
        """``width``: tokens of a sequence in the hidden states that pass from stage to stage."""
        self.stages, self.ranks, self.width = stages, ranks, width
        self.group = ranks.axis("pp").get_group()
        self.count = ranks.dims.stages
        self.dtype = torch.float32  # of the hidden states that pass between stages

    @property
    def last(self) -> Decoder | None:
        """The last stage, if it is here."""
        return self.stages.get(self.count - 1)

    def step(self, inputs: Tensor, targets: Tensor, parts: int, loss: Loss, **given: Any) -> None:
        """Forward and backward of [B, T] tokens, cut in ``parts``.

        ``given`` [B, ...] is the same on all ranks, and every stage gets its rows of it.
        """
        rows = inputs.shape[0] // parts
        stages = [self._stage(number, rows, inputs.shape[1]) for number in sorted(self.stages)]
        schedule = _schedule(self.ranks.dims, stages, parts, loss)
        # torch 2.11 wants the strides that a stage was built with; these may be slices of windows
        tokens = (inputs.contiguous(),) if 0 in self.stages else ()
        wanted = targets if self.last is not None else None
        schedule.step(*tokens, target=wanted, return_outputs=False, **given)

    def forward(self, inputs: Tensor, **given: Tensor) -> Tensor | None:
        """Logits of [B, T] tokens where the last stage is, else None; without backward."""
        x = inputs
        for number in range(self.count):
            owner = rank_of_stage(self.ranks.dims, number)
            stage = self.stages.get(number)
            if stage is not None:
                if number and rank_of_stage(self.ranks.dims, number - 1) != owner:
                    shape = (inputs.shape[0], self.width, stage.width)
                    x = torch.empty(shape, dtype=self.dtype, device=inputs.device)
                    dist.recv(x, group=self.group, group_src=self._owner(number - 1))
                x = stage(x, **given)
                if number + 1 < self.count and self._owner(number + 1) != owner:
                    dist.send(x.contiguous(), group=self.group, group_dst=self._owner(number + 1))
        return x if self.last is not None else None

    def _owner(self, stage: int) -> int:
        return rank_of_stage(self.ranks.dims, stage)

    def _stage(self, number: int, rows: int, tokens: int) -> PipelineStage:
        module, device = self.stages[number], self.ranks.device
        config = module.config
        last = number == self.count - 1

        def passing(*shape: int) -> Tensor:
            return torch.empty((rows, *shape), dtype=self.dtype, device=device, requires_grad=True)

        # logits are of all tokens, also where tp has cut the sequence between matrices
        hidden, logits = passing(self.width, module.width), passing(tokens, config.vocab_size)
        first = torch.empty((rows, tokens), dtype=torch.int64, device=device)
        return PipelineStage(
            module,
            number,
            self.count,
            device,
            input_args=first if number == 0 else hidden,
            output_args=logits if last else hidden,
            group=self.group,
        )


def _schedule(
    dims: ParallelDims, stages: list[PipelineStage], parts: int, loss: Loss
) -> ScheduleGPipe | Schedule1F1B | ScheduleInterleaved1F1B | ScheduleZBVZeroBubble:
    if dims.schedule == "gpipe":
        return ScheduleGPipe(stages[0], parts, loss, scale_grads=False)
    if dims.schedule == "1f1b":
        return Schedule1F1B(stages[0], parts, loss, scale_grads=False)
    if dims.schedule == "interleaved":
        return ScheduleInterleaved1F1B(list(stages), parts, loss, scale_grads=False)
    return ScheduleZBVZeroBubble(list(stages), parts, loss, scale_grads=False)
