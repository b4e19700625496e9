"""The learning rate as a pure function of the step; equal to the last bit on all machines.

Where islands send gradients the outer optimizer has this rate, and all of them must come to the
same bits. So the cosine is made of products and sums, which IEEE 754 rounds alike everywhere; what
a library's gives may differ in its last bit.
"""

from __future__ import annotations

import math

from bootstrap.manifest import Inner

TERMS = 12  # of the cosine's series: the next one is below 1e-15 up to π / 2


def learning_rate(inner: Inner, step: int) -> float:
    """The learning rate of inner step ``step`` (0 is the first) of the run.

    Linear warm-up over ``warmup_steps``, then by ``schedule``: "constant"; "cosine" down to
    ``min_lr_ratio * lr`` at ``total_steps``; "wsd" (warm-up, stable, decay: 2404.06395), constant
    and then linear down to the same over the last ``decay_fraction`` of ``total_steps``. Beyond
    ``total_steps`` it stays there.
    """
    span: float
    if step < inner.warmup_steps:
        return inner.lr * (step + 1) / inner.warmup_steps
    floor = inner.min_lr_ratio
    if inner.schedule == "constant":
        share = 1.0
    elif inner.schedule == "cosine":
        span = max(1, inner.total_steps - inner.warmup_steps)
        done = min(1.0, (step - inner.warmup_steps) / span)
        share = floor + (1 - floor) * (1 + cosine(done)) / 2
    else:
        span = max(1.0, inner.decay_fraction * inner.total_steps)
        left = min(1.0, max(0.0, inner.total_steps - step) / span)
        share = floor + (1 - floor) * left
    return inner.lr * share


def cosine(x: float) -> float:
    """cos(π x) of x in [0, 1], by its series in [0, π / 2]."""
    if x > 0.5:
        return -cosine(1 - x)
    square = (math.pi * x) * (math.pi * x)
    total = 0.0
    for term in range(TERMS, 0, -1):  # Horner's scheme, from the smallest
        total = (1 - total) * square / (2 * term * (2 * term - 1))
    return 1 - total
