"""Islands whose gradients travel as thin factors, without a network, and a model of some shapes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from diloco import lowrank
from diloco.lowrank import Plan

SHAPES = [(96, 20), (60, 20), (20, 20), (2, 30, 20), (20, 60), (5, 40), (20,), (3,)]
RANK = 4


def entries(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[tuple[int, tuple[int, ...]]]:
    found, at = [], 0
    for shape in shapes:
        found.append((at, shape))
        at += torch.Size(shape).numel()
    return found


class Islands:
    """Islands that take rounds, some of which may miss one."""

    def __init__(self, count: int, shapes: Sequence[tuple[int, ...]] = SHAPES, rank: int = RANK):
        self.plan = Plan.of(entries(shapes), rank)
        self.size = sum(torch.Size(shape).numel() for shape in shapes)
        self.bases = lowrank.first_bases(self.plan, 7)
        self.errors = [torch.zeros(self.size) for _ in range(count)]
        self.round = 0

    def take(self, gradients: Sequence[Tensor], absent: Sequence[int] = ()) -> Tensor:
        """One round; returns the common gradient."""
        plan, round_ = self.plan, self.round
        there = [i for i in range(len(gradients)) if i not in absent]
        sent = {
            i: lowrank.contribution(plan, round_, self.bases, gradients[i], self.errors[i], 1.0)
            for i in there
        }
        mean = torch.stack(list(sent.values())).mean(0)
        common = torch.full((self.size,), torch.nan)
        for here, values in lowrank.expanded(plan, round_, self.bases, mean):
            assert common[here].isnan().all()
            common[here] = values
        for i in there:
            lowrank.keep_lost(plan, round_, self.bases, gradients[i], sent[i], self.errors[i], 1.0)
        lowrank.turn(plan, round_, self.bases, mean, 7)
        self.round += 1
        return common
