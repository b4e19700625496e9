"""Asynchronous rounds: each island brings its work when it is done, and nobody waits for it.

Rules of Liu et al., *Asynchronous Local-SGD Training for Language Modeling* (2401.09135), and
what others added: one bound on staleness that spans from lock-step to none (Ho et al. 2013, stale
synchronous parallel), weights of tokens² / steps (Decoupled DiLoCo, 2604.21428), and late work
turned towards where the others have gone meanwhile (after HeLoCo, 2606.00271).

The outer optimizer is *delayed Nesterov* (2401.09135). Nesterov with every arrival
would apply the momentum K times a round, each time with a direction that is a round old. So an
arrival g moves the parameters at once, and momentum only with every N-th::

    θ ← θ − η g / N                                   each arrival
    v ← μ v + (g₁ + … + g_N) / N;  θ ← θ − η μ v      each N-th, as well

N arrivals together are one Nesterov step (:mod:`diloco.outer`) with their mean as D. Where rounds
bring some arrivals at a time, their mean g counts with their share s = arrivals / N; momentum
comes as soon as shares add up to one (:func:`arrive`, :func:`carry_on`). Work that is alone in its
round has nothing to be weighed against there, so s is multiplied with its weight over what the
arrivals before it usually had (:func:`counted`): a newcomer's counts for less, as everywhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MOST_COUNTED = 2.0  # times the usual weight: nobody's claim makes it a leader


@torch.no_grad()
def arrive(gathered: Tensor, arrival: Tensor, params: Tensor, *, lr: float, share: float) -> None:
    """θ ← θ − η s g at once; s g is gathered for the momentum. In place, float32 [n] each."""
    part = arrival * share
    gathered.add_(part)
    params.sub_(part.mul_(lr))


@torch.no_grad()
def carry_on(
    velocity: Tensor,
    gathered: Tensor,
    params: Tensor,
    *,
    lr: float,
    momentum: float,
    whole: float,
) -> None:
    """v ← μ v + Σ s g / Σ s; θ ← θ − η μ v. ``whole`` is Σ s; gathering begins anew.

    In place, float32 [n] each.
    """
    velocity.mul_(momentum).add_(gathered.mul_(1 / whole))
    params.sub_(velocity * (lr * momentum))
    gathered.zero_()


def counted(weight: float, usual: float) -> float:
    """What multiplies the share of arrivals of mean ``weight``; 1 for the first ones.

    ``usual`` is what :func:`usually` came to before them, 0 at first.
    """
    return min(MOST_COUNTED, weight / usual) if usual > 0 else 1.0


def usually(usual: float, weight: float, share: float) -> float:
    """The mean weight of about the last N arrivals, with those ``share`` · N of ``weight``."""
    if usual <= 0:
        return weight
    return usual + min(1.0, share) * (min(weight, MOST_COUNTED * usual) - usual)


def rate(tokens: float, steps: float) -> float:
    """The weight tokens² / steps: work on more tokens, and in larger batches, counts for more.

    Tokens alone say how much was seen; tokens a step, how little noise each step had. Zero where
    nothing was done. Raises :class:`ValueError` for a negative count.
    """
    if not (0 <= tokens < math.inf and 0 <= steps < math.inf):
        raise ValueError("tokens and steps must be finite and not negative")
    return tokens * (tokens / steps) if steps else 0.0


@torch.no_grad()
def turning(own: Tensor, way: Tensor, staleness: float) -> tuple[float, float]:
    """(p, q) so that p · own + q · way is ``own`` turned towards ``way``, float32 [n] each.

    A pseudo-gradient that is ``staleness`` rounds old may point against where the swarm went
    since. It becomes (1 − a) of its own direction plus a of the momentum's, at its own length,
    with a = s / (1 + s) · (1 − cos) / 2: fresh work and work that agrees stay as they are. The idea
    is HeLoCo's; this ramp is ours. Raises :class:`ValueError` for a negative staleness.
    """
    if not 0 <= staleness < math.inf:
        raise ValueError(f"work that is {staleness} rounds old")
    length, far = own.norm().item(), way.norm().item()
    trust = staleness / (1 + staleness)
    if not (trust and length and far and math.isfinite(length) and math.isfinite(far)):
        return 1.0, 0.0
    cosine = max(-1.0, min(1.0, torch.dot(own, way).item() / length / far))
    share = trust * (1 - cosine) / 2
    # |(1 − a) u + a w| of two unit vectors
    size = math.sqrt(max(0.0, 1 - 2 * share * (1 - share) * (1 - cosine)))
    if size < 1e-6:  # opposite, half and half: no direction is left
        return 1.0, 0.0
    return (1 - share) / size, share * length / (far * size)
