"""Streaming: the model in fragments that take turns, sent and merged while inner steps go on.

Streaming DiLoCo (Douillard et al., 2501.18512) cuts the model into P fragments. Each is merged
once in H inner steps, at a moment of its own, so that the link carries a P-th of the model at a
time and is never idle. What is sent of fragment p after inner step t is merged by the others
while τ more inner steps are taken; then::

    Δ_p = G_p − θ_p(t)                        sent after step t
    G_p ← Outer(G_p, mean Δ_p)                after step t + τ
    θ_p ← α θ_p(t + τ) + (1 − α) G_p          α = 0: take the common one; 1: never meet

α between keeps part of what the island found out in these τ steps and lets islands differ a
little. Fragments are *strided*: layer l belongs to fragment l mod P, so that each has early and
late layers, which the paper prefers to consecutive ones.

>>> schedule = Schedule(inner_steps=24, fragments=4, delay=2)
>>> [schedule.offset(fragment) for fragment in range(4)]
[6, 12, 18, 24]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

BLEND = 0.5  # α
DELAY_SHARE = 4  # τ is at most H over this: later, a result tells of a model that is gone


def assign(layers: Sequence[int | None], sizes: Sequence[int], count: int) -> list[int]:
    """The fragment of each tensor, given its layer (None: of no layer) and its elements.

    Layers are strided. Tensors outside of layers (embeddings, the last norm), the largest first,
    go where the fewest elements are, so that all fragments take about as long to send. Everybody
    gets the same answer. Raises :class:`ValueError` for fewer layers than fragments.
    """
    numbers = sorted({layer for layer in layers if layer is not None})
    if not 1 <= count <= max(1, len(numbers)):
        raise ValueError(f"{count} fragments of {len(numbers)} layers: some would be empty")
    place = {layer: index % count for index, layer in enumerate(numbers)}
    found = [0 if layer is None else place[layer] for layer in layers]
    load = [0] * count
    for fragment, layer, size in zip(found, layers, sizes, strict=True):
        load[fragment] += 0 if layer is None else size
    loose = [index for index, layer in enumerate(layers) if layer is None]
    for index in sorted(loose, key=lambda index: (-sizes[index], index)):
        found[index] = load.index(min(load))
        load[found[index]] += sizes[index]
    return found


@dataclass(frozen=True, slots=True)
class Schedule:
    """When which fragment travels. Steps are counted from 1; fragment p's turns are evenly spread.

    Raises :class:`ValueError` where a result would be due after the fragment's next turn, or τ
    exceeds H / 4.
    """

    inner_steps: int  # H, between two turns of one fragment
    fragments: int = 1  # P
    delay: int = 0  # τ, inner steps between sending and applying

    def __post_init__(self) -> None:
        if not 1 <= self.fragments <= self.inner_steps:
            raise ValueError(f"{self.fragments} fragments do not fit in {self.inner_steps} steps")
        if not 0 <= self.delay <= self.inner_steps // DELAY_SHARE:
            raise ValueError(
                f"a delay of {self.delay} steps exceeds a quarter of {self.inner_steps}: "
                "results would be merged into a model that has moved on"
            )

    def offset(self, fragment: int) -> int:
        """The step in each H, from 1 to H, after which a fragment is sent; the last one's is H."""
        return (fragment + 1) * self.inner_steps // self.fragments


def delay_for(transfer_s: float, step_s: float, inner_steps: int) -> int:
    """τ = ⌈t_comm / t_step⌉, so that the transfer hides behind steps: at least 1, at most ⌊H / 4⌋.

    Where H is below 4 that is 0: the result is waited for.

    Raises :class:`ValueError` unless both times are finite, ``step_s`` above zero.
    """
    if not (0 <= transfer_s < math.inf and 0 < step_s < math.inf):
        raise ValueError(f"no delay follows from {transfer_s} s a transfer and {step_s} s a step")
    return max(
        min(1, inner_steps // DELAY_SHARE),
        min(math.ceil(transfer_s / step_s), inner_steps // DELAY_SHARE),
    )


@torch.no_grad()
def blend(local: Tensor, common: Tensor, alpha: float = BLEND) -> Tensor:
    """``local`` ← α local + (1 − α) common in place, float32 [n]; returns it.

    Both products are rounded before they are added; α = 0 gives ``common`` bit for bit.
    Raises :class:`ValueError` for an α outside [0, 1].
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be from 0 to 1, not {alpha}")
    if alpha == 0:
        return local.copy_(common)
    return local.mul_(alpha).add_(common * (1 - alpha))
