"""Outer optimizers by name: pairs of ``init`` and ``update`` on the merged pseudo-gradient D.

D points like a gradient, so each is an ordinary optimizer that sees one gradient a round. State is
plain data: vectors of the parameters' shape and a count. What is updated elementwise may be
updated slice by slice.

========== ======================================================= ===========================
name       rule (t counts rounds from 1)                           source
========== ======================================================= ===========================
sgd        θ ← θ − η D                                             FedAvg, 1602.05629: η = 1
nesterov   v ← μ v + D; θ ← θ − η (D + μ v)                        DiLoCo, 2311.08105
heavyball  v ← μ v + D; θ ← θ − η v                                FedAvgM, 1909.06335
adam       m ← β₁ m + (1 − β₁) D; s ← β₂ s + (1 − β₂) D²           FedAdam, 2003.00295 alg. 2
yogi       m as above; s ← s − (1 − β₂) D² sign(s − D²)            FedYogi, the same
sparseloco θ ← θ − η D, D of sparse codes with error feedback      SparseLoCo, 2508.15706
========== ======================================================= ===========================

adam and yogi end with θ ← θ − η m̂ / (√ŝ + ε), where m̂ and ŝ are corrected for their start at zero
(1412.6980; for yogi ŝ starts at D², as its authors start it at the first batch's). The federated
paper starts s at ε² in place of a correction; then the first rounds are as long as ε makes them.

>>> rule = named("nesterov")
>>> state = rule.init(params)
>>> rule.update(state, merged, params, lr=0.7, momentum=0.9)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from diloco import outer

BETA2 = 0.99  # FedAdam's and FedYogi's, as published
EPSILON = 1e-3  # their τ: large, since D is long and changes little from round to round


@dataclass(slots=True)
class State:
    """What an outer optimizer keeps between rounds."""

    count: int = 0  # rounds taken
    vectors: dict[str, Tensor] = field(default_factory=dict)  # float32 [n] each


class Update(Protocol):
    """One outer step on ``params`` and ``state``, both in place; ``merged`` is left alone."""

    def __call__(
        self, state: State, merged: Tensor, params: Tensor, *, lr: float, momentum: float
    ) -> None: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """One outer optimizer; ``lr`` and ``momentum`` are what its paper sets (η, and μ or β₁)."""

    name: str
    init: Callable[[Tensor], State]
    update: Update
    lr: float
    momentum: float = 0.0


def named(name: str) -> Rule:
    """The outer optimizer of that name; raises :class:`ValueError` for another one."""
    try:
        return RULES[name]
    except KeyError:
        raise ValueError(f"outer optimizer {name!r} is none of {', '.join(RULES)}") from None


def check(
    rule: str, *, momentum: float, sparse: bool, lossy: bool = False, feedback: float = 0.0
) -> None:
    """Raise :class:`ValueError` for what is known to go astray, saying why.

    ``sparse``: the codec sends a few elements of many; ``lossy``: it loses so much that what is
    lost has to be sent later, of which the share ``feedback`` is kept.
    """
    named(rule)
    if sparse and feedback and momentum:
        raise ValueError(
            f"sparse codes with error feedback and {rule}'s momentum {momentum:g}: an element "
            "that comes late would be carried on as if it were new. Feedback is the momentum of "
            "sparse codes (SparseLoCo): use outer optimizer sparseloco, or int2 with momentum"
        )
    if sparse and rule in ("adam", "yogi"):
        raise ValueError(
            f"sparse codes with {rule}: most elements of D are zero in a round, so its second "
            "moments say how often an element is sent and not how large it is"
        )
    if (sparse or lossy) and not feedback:
        raise ValueError(
            "a codec that loses a third of the length, without error feedback: what it loses is "
            "the same in every round and is never learnt; set a feedback, 0.95 say"
        )
    if rule in ("sgd", "sparseloco") and momentum:
        raise ValueError(f"{rule} has no momentum, and {momentum:g} was asked for")


def _plain(params: Tensor) -> State:
    return State()


def _velocity(params: Tensor) -> State:
    return State(vectors={"v": outer.init(params).momentum})


def _moments(params: Tensor) -> State:
    return State(vectors={"m": torch.zeros_like(params), "s": torch.zeros_like(params)})


@torch.no_grad()
def _sgd(state: State, merged: Tensor, params: Tensor, *, lr: float, momentum: float) -> None:
    state.count += 1
    params.sub_(merged * lr)


def _nesterov(state: State, merged: Tensor, params: Tensor, *, lr: float, momentum: float) -> None:
    state.count += 1
    outer.update(outer.OuterState(state.vectors["v"]), merged, params, lr=lr, momentum=momentum)


@torch.no_grad()
def _heavy_ball(
    state: State, merged: Tensor, params: Tensor, *, lr: float, momentum: float
) -> None:
    state.count += 1
    params.sub_(state.vectors["v"].mul_(momentum).add_(merged) * lr)


@torch.no_grad()
def _adam(state: State, merged: Tensor, params: Tensor, *, lr: float, momentum: float) -> None:
    square = merged.square()
    second = state.vectors["s"].mul_(BETA2).add_(square.mul_(1 - BETA2))
    _adaptive_step(state, merged, params, lr, momentum, second / (1 - BETA2 ** (state.count + 1)))


@torch.no_grad()
def _yogi(state: State, merged: Tensor, params: Tensor, *, lr: float, momentum: float) -> None:
    square, second = merged.square(), state.vectors["s"]
    if state.count == 0:
        second.copy_(square)
    else:
        second.sub_(square * (1 - BETA2) * torch.sign(second - square))
    _adaptive_step(state, merged, params, lr, momentum, second)


def _adaptive_step(
    state: State, merged: Tensor, params: Tensor, lr: float, beta1: float, second: Tensor
) -> None:
    """θ ← θ − η m̂ / (√ŝ + ε)."""
    state.count += 1
    first = state.vectors["m"].mul_(beta1).add_(merged * (1 - beta1))
    params.sub_(first / (1 - beta1**state.count) / (second.sqrt() + EPSILON) * lr)


RULES = {
    rule.name: rule
    for rule in (
        Rule("sgd", _plain, _sgd, lr=1.0),
        Rule("nesterov", _velocity, _nesterov, lr=0.7, momentum=0.9),
        Rule("heavyball", _velocity, _heavy_ball, lr=1.0, momentum=0.9),
        Rule("adam", _moments, _adam, lr=0.01, momentum=0.9),
        Rule("yogi", _moments, _yogi, lr=0.01, momentum=0.9),
        Rule("sparseloco", _plain, _sgd, lr=1.0),
    )
}
