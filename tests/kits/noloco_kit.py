"""NoLoCo's step as its paper writes it (:mod:`diloco.mixing`); nodes take heavy ball for it."""

from __future__ import annotations

from torch import Tensor


def noloco(
    slow: Tensor, momentum: Tensor, mine: Tensor, theirs: Tensor, *, alpha: float, beta: float
) -> None:
    """One meeting: ``slow`` φ and ``momentum`` m in place, from θ of both, float32 [n] each.

    With nobody there (``theirs`` is ``mine``) it is the same step on the own progress alone, so
    a partner that vanished costs one exchange and no work.
    """
    mean = (mine + theirs).mul_(0.5)
    momentum.mul_(alpha).add_(mean.sub_(slow).mul_(beta))
    slow.add_(momentum)
