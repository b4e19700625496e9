"""Outer optimizers by name: pairs of ``init`` and ``update`` on the merged pseudo-gradient D.

D points like a gradient, so each is an ordinary optimizer that sees one gradient a round. State is
plain data: vectors of the parameters' shape, and at most a few numbers. Each ``step`` is
elementwise, so it may be taken slice by slice; where a rule does something once a round as well,
that is its ``end``.

================ =================================================== =========================
name             rule (t counts rounds from 1)                       source
================ =================================================== =========================
sgd              θ ← θ − η D                                         FedAvg, 1602.05629: η = 1
nesterov         v ← μ v + D; θ ← θ − η (D + μ v)                    DiLoCo, 2311.08105
heavyball        v ← μ v + D; θ ← θ − η v                            FedAvgM, 1909.06335
adam             m ← β₁ m + (1 − β₁) D; s ← β₂ s + (1 − β₂) D²       FedAdam, 2003.00295 alg. 2
yogi             m as above; s ← s − (1 − β₂) D² sign(s − D²)        FedYogi, the same
sparseloco       θ ← θ − η D, D of sparse codes with error feedback  SparseLoCo, 2508.15706
delayed-nesterov nesterov of D's share s of N arrivals; momentum     2401.09135, see
                 once the shares add up to one                       :mod:`diloco.asynchronous`
adamw            adam, where D is a gradient, after θ ← (1 − η λ) θ  1711.05101
onebit-adam      adamw at first; then D is the momentum              2102.02888, see
                                                                     :mod:`diloco.onebit`
powersgd         adamw, where D is a gradient that came as factors   1905.13727, see
                                                                     :mod:`diloco.lowrank`
================ =================================================== =========================

adam and yogi end with θ ← θ − η m̂ / (√ŝ + ε), where m̂ and ŝ are corrected for their start at zero
(1412.6980; for yogi ŝ starts at an element's first D² that is not 0, as its authors start it at the
first batch's). The federated paper starts s at ε² in place of a correction; then the first rounds
are as long as ε makes them.

All islands must get the same bits (:mod:`diloco.outer`): products are rounded before they are
added; nothing is divided by a number, which some devices do by its inverse; powers are products;
and roots are :func:`diloco.exact.root_`.

>>> rule = named("nesterov")
>>> state = rule.init(params)
>>> rule.update(state, merged, params, lr=0.7, momentum=0.9)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from diloco import asynchronous, onebit, outer
from diloco.exact import root_

BETA2 = 0.99  # FedAdam's and FedYogi's, as published
EPSILON = 1e-3  # their τ: large, since D is long and changes little from round to round
WARM = 1000  # rounds of Adam, before 1-bit Adam
ENOUGH = 1 - 1e-4  # shares of up to 512 arrivals that add up to this much, in fp32, count as one


@dataclass(slots=True)
class State:
    """What an outer optimizer keeps between rounds."""

    count: int = 0  # rounds taken
    vectors: dict[str, Tensor] = field(default_factory=dict)  # float32 [n] each


@dataclass(frozen=True, slots=True)
class Rates:
    """The numbers of one outer step."""

    lr: float  # η
    momentum: float  # μ, or β₁ of adam and yogi
    count: int = 1  # rounds with this one: t
    share: float = 1.0  # of the islands whose work is in D, for delayed-nesterov, and
    weight: float = 0.0  # what that work was worth, on average
    beta2: float = BETA2
    epsilon: float = EPSILON
    decay: float = 0.0  # λ, of those that see gradients
    warmup: int = WARM  # rounds before onebit-adam freezes its second moments
    carried: float = (
        1.0  # what is left of v after a far longer round (:func:`diloco.outer.carried`)
    )


Vectors = Mapping[str, Tensor]
OuterStep = Callable[[Vectors, Tensor, Tensor, Rates], None]
"""(vectors, merged, params, rates): vectors and params in place, ``merged`` is left alone."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One outer optimizer; ``lr`` and ``momentum`` are what its paper sets (η, and μ or β₁)."""

    name: str
    # of the parameters' shape; where it has momentum, the first is that (``rounds.align``)
    vectors: tuple[str, ...]
    step: OuterStep
    lr: float
    momentum: float = 0.0
    numbers: tuple[str, ...] = ()  # vectors of a single element; steps see them whole
    end: Callable[[Vectors, Tensor, Rates], None] | None = None  # after all slices of a round
    # what an island sends in place of its D: (vectors, D, rates), D in place
    brings: Callable[[Vectors, Tensor, Rates], None] | None = None
    carries: bool = False  # vector ``v`` shrinks after a far longer round (diloco.outer.carried)
    factors: bool = False  # D comes as factors, of which bases are kept besides (diloco.lowrank)

    def init(self, params: Tensor) -> State:
        """The state before the first round of ``params`` [n]: zeros, float32 [n] or [1]."""
        sizes = [(name, len(params)) for name in self.vectors] + [(n, 1) for n in self.numbers]
        return State(vectors={n: torch.zeros(size, device=params.device) for n, size in sizes})

    def update(
        self, state: State, merged: Tensor, params: Tensor, *, lr: float, momentum: float
    ) -> None:
        """One outer step on ``params`` and ``state``, both in place; ``merged`` is left alone.

        All vectors are float32 [n], ``lr`` is η and ``momentum`` μ or β₁.
        """
        state.count += 1
        self.take(state.vectors, merged, params, Rates(lr, momentum, state.count))

    def take(self, vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
        """As :meth:`update`, with all the numbers of a step."""
        self.step(vectors, merged, params, rates)
        if self.end is not None:
            self.end(vectors, params, rates)


def named(name: str) -> Rule:
    """The outer optimizer of that name; raises :class:`ValueError` for another one."""
    try:
        return RULES[name]
    except KeyError:
        raise ValueError(f"outer optimizer {name!r} is none of {', '.join(RULES)}") from None


def highest_rate(rule: str, momentum: float) -> float:
    """η beyond which a rule overshoots more each round where inner steps reach an optimum.

    There D = θ − θ*. On that line the steps of nesterov are linear in (θ − θ*, v), with the trace
    1 + μ − η (1 + μ) and the determinant μ (1 − η); both eigenvalues stay within the unit circle as
    long as η < 2 (1 + μ) / (1 + 2 μ), and those of heavyball while η < 2 (1 + μ). Where inner steps
    come a share of the way alone, as nearly everywhere in short runs, more is borne. Infinite for
    rules that scale D by what it was before.
    """
    if rule in ("nesterov", "delayed-nesterov"):
        return 2 * (1 + momentum) / (1 + 2 * momentum)
    return 2 * (1 + momentum) if rule in ("sgd", "heavyball", "sparseloco") else math.inf


@torch.no_grad()
def _sgd(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    params.sub_(merged * rates.lr)


def _nesterov(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    state = outer.OuterState(vectors["v"])
    outer.update(state, merged, params, lr=rates.lr, momentum=rates.momentum, carried=rates.carried)


@torch.no_grad()
def _heavy_ball(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    velocity = vectors["v"].mul_(rates.momentum * rates.carried).add_(merged)
    params.sub_(velocity * rates.lr)


@torch.no_grad()
def _adam(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    square = merged.square()
    second = vectors["s"].mul_(rates.beta2).add_(square.mul_(1 - rates.beta2))
    corrected = second * (1 / (1 - _power(rates.beta2, rates.count)))
    _adaptive_step(vectors["m"], merged, params, rates, corrected)


@torch.no_grad()
def _yogi(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    square, second = merged.square(), vectors["s"]
    change = (square * (1 - rates.beta2)).mul_(torch.sign(second - square))
    # nothing seen of an element yet: whatever round that is, a part may have come out empty before
    second.copy_(torch.where(second == 0, square, second - change))
    _adaptive_step(vectors["m"], merged, params, rates, second.clone())


def _adaptive_step(
    first: Tensor, merged: Tensor, params: Tensor, rates: Rates, second: Tensor
) -> None:
    """m ← β₁ m + (1 − β₁) D; θ ← θ − η m̂ / (√ŝ + ε), with ŝ in ``second``, which is used up."""
    beta1 = rates.momentum
    first.mul_(beta1).add_(merged * (1 - beta1))
    step = first * (rates.lr / (1 - _power(beta1, rates.count)))
    params.sub_(step.div_(root_(second).add_(rates.epsilon)))


@torch.no_grad()
def _adamw(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    if rates.decay:
        params.mul_(1 - rates.lr * rates.decay)
    _adam(vectors, merged, params, rates)


@torch.no_grad()
def _onebit(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    if rates.count <= rates.warmup:
        _adamw(vectors, merged, params, rates)
        return
    if rates.decay:
        params.mul_(1 - rates.lr * rates.decay)
    onebit.step(vectors["m"], vectors["s"], merged, params, lr=rates.lr)


@torch.no_grad()
def _freeze(vectors: Vectors, params: Tensor, rates: Rates) -> None:
    """After the last round of Adam: its moments become those of the rounds of signs.

    Both are corrected for their start at zero, which no later step does any more.
    """
    if rates.count == rates.warmup:
        right = 1 / (1 - _power(rates.momentum, rates.count))
        vectors["m"].mul_(right)
        onebit.freeze(vectors["s"].mul_(1 / (1 - _power(rates.beta2, rates.count))), rates.epsilon)


@torch.no_grad()
def _bring_momentum(vectors: Vectors, gradient: Tensor, rates: Rates) -> None:
    if rates.count > rates.warmup:
        onebit.own_momentum(vectors["m"], gradient, rates.momentum)


def _power(base: float, exponent: int) -> float:
    """By products alone: what a library's pow gives may differ in its last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def _delayed(vectors: Vectors, merged: Tensor, params: Tensor, rates: Rates) -> None:
    share = rates.share * asynchronous.counted(rates.weight, vectors["usual"].item())
    asynchronous.arrive(vectors["gathered"], merged, params, lr=rates.lr, share=share)


def _carry_on(vectors: Vectors, params: Tensor, rates: Rates) -> None:
    usual, weight = vectors["usual"].item(), rates.weight
    whole = vectors["shares"].item() + rates.share * asynchronous.counted(weight, usual)
    vectors["usual"].fill_(asynchronous.usually(usual, weight, rates.share))
    vectors["shares"].fill_(whole if whole < ENOUGH else 0.0)
    if whole < ENOUGH:
        return
    vectors["turns"].add_(1)
    for start in range(0, len(params), outer.TILE):
        here = slice(start, start + outer.TILE)
        asynchronous.carry_on(
            vectors["v"][here],
            vectors["gathered"][here],
            params[here],
            lr=rates.lr,
            momentum=rates.momentum,
            whole=whole,
        )


RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", (), _sgd, lr=1.0),
        Rule("nesterov", ("v",), _nesterov, lr=0.7, momentum=0.9, carries=True),
        Rule("heavyball", ("v",), _heavy_ball, lr=1.0, momentum=0.9, carries=True),
        Rule("adam", ("m", "s"), _adam, lr=0.01, momentum=0.9),
        Rule("yogi", ("m", "s"), _yogi, lr=0.01, momentum=0.9),
        Rule("sparseloco", (), _sgd, lr=1.0),
        Rule("adamw", ("m", "s"), _adamw, lr=1e-3, momentum=0.9),
        Rule(
            "onebit-adam",
            ("m", "s"),
            _onebit,
            lr=1e-3,
            momentum=0.9,
            end=_freeze,
            brings=_bring_momentum,
        ),
        Rule("powersgd", ("m", "s"), _adamw, lr=1e-3, momentum=0.9, factors=True),
        Rule(
            "delayed-nesterov",
            ("v", "gathered"),
            _delayed,
            lr=0.7,
            momentum=0.9,
            numbers=("shares", "usual", "turns"),
            end=_carry_on,
        ),
    )
}
