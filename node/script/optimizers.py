"""The optimizers of a script: several as one, and whether others train the model."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import UninitializedParameter
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from node.errors import operator_error
from node.trainer.optimizer_state import bare
from protocols.errors import OperatorError

logger = logging.getLogger(__name__)
LISTED = 5  # shapes of parameters that have no names


class Several(torch.optim.Optimizer):
    """Optimizers that train a model between them, for what is kept of it; it takes no steps.

    Where several have the same parameter, the first one's moments are kept.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Groups and state stay theirs, so there is nothing to make."""
        self.optimizers = tuple(optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all, in their order."""
        return [group for one in self.optimizers for group in one.param_groups]

    @property
    def state(self) -> MutableMapping[Tensor, Any]:  # type: ignore[override]
        """What each keeps of its parameters, by reference."""
        return _States(self.optimizers)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        for one in self.optimizers:
            one.zero_grad(set_to_none)


def as_one(
    given: torch.optim.Optimizer | Iterable[torch.optim.Optimizer], parameters: Iterable[Tensor]
) -> torch.optim.Optimizer:
    """One optimizer for all that a script has given, which train these parameters.

    Raises OperatorError E204 where it is none, or where none of it trains them.
    """
    optimizers: list[Any] = [given]
    if isinstance(given, Iterable) and not hasattr(given, "param_groups"):
        optimizers = list(given)
    for one in optimizers:  # wrappers of other libraries have groups too
        if not hasattr(one, "param_groups"):
            raise _not_ours(f"a {type(one).__name__} is no optimizer", "it has no param_groups")
    trained = {p for one in optimizers for group in one.param_groups for p in group["params"]}
    if not trained.intersection(parameters):
        raise _not_ours(
            "the optimizer trains none of the model's parameters",
            "it was made of others, or before they were replaced (fully_shard, an adapter), or it "
            "trains copies of them, to which no merge would come",
        )
    return optimizers[0] if len(optimizers) == 1 else Several(optimizers)


def tell_of_others(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Warn of what the optimizer trains beside these parameters, as a layer of the loss function.

    Everything goes on as without a swarm, so nobody would see that each island has its own.
    """
    ours = set(parameters)
    trained = dict.fromkeys(p for group in optimizer.param_groups for p in group["params"])
    known = [p for p in trained if not isinstance(p, UninitializedParameter) and p.numel()]
    others = [tuple(p.shape) for p in known if p.requires_grad and p not in ours]
    if others:
        logger.warning(
            "the optimizer also trains %d parameters that are not in the model (%s%s): they are "
            "neither merged nor in a checkpoint. Give node.join one module that has all of them "
            "(nn.ModuleList), or, if these are to stay this island's own, step them by an "
            "optimizer that it is not given",
            len(others),
            ", ".join(map(str, others[:LISTED])),
            ", …" * (len(others) > LISTED),
        )


def _not_ours(what: str, why: str) -> OperatorError:
    fix = "give node.join the torch.optim.Optimizer that trains the model, or a list of several"
    return operator_error("E204", what, why=why, fix=fix)


class _States(MutableMapping[Tensor, Any]):
    """The states of several optimizers as one; nothing is made by looking."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._of: dict[Tensor, torch.optim.Optimizer] = {}
        for one in reversed(optimizers):
            self._of |= dict.fromkeys((p for g in one.param_groups for p in g["params"]), one)

    def __getitem__(self, parameter: Tensor) -> Any:
        state = self._of[parameter].state
        if parameter not in state:  # a look would make it: optimizers have a defaultdict
            raise KeyError(parameter)
        return state[parameter]

    def __setitem__(self, parameter: Tensor, value: Any) -> None:
        self._of.get(parameter, self._optimizers[0]).state[parameter] = value

    def __delitem__(self, parameter: Tensor) -> None:
        del self._of[parameter].state[parameter]

    def __iter__(self) -> Iterator[Tensor]:
        return (parameter for parameter, one in self._of.items() if parameter in one.state)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def clear(self) -> None:
        """Drop all of all of them."""
        for one in self._optimizers:
            one.state.clear()


class Watch:
    """Takes note of optimizers that train a model's parameters without being those given.

    One around a given one, or inside of it, is part of it, unless the inner one keeps moments
    that the given one has not: they would be in no checkpoint.
    """

    def __init__(self, given: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
        self._outer = list(getattr(given, "optimizers", (given,)))  # whose state is kept
        self._given = [bare(one) for one in self._outer]
        self._parameters = set(parameters)
        self._open: list[torch.optim.Optimizer] = []  # those within a step, which may call others
        self._around: set[int] = set()  # others in whose step a given one has taken its own
        self._others: dict[int, str] = {}
        self._inner: dict[int, str] = {}  # parts of given ones, with moments of their own
        self._hooks = (
            register_optimizer_step_pre_hook(self._begins),
            register_optimizer_step_post_hook(self._ends),
        )

    def check(self) -> None:
        """Raise E204 where another optimizer has taken a step since."""
        self._open.clear()  # what is open between two steps, an exception has ended
        if self._others:
            raise operator_error(
                "E204",
                "the model is trained by an optimizer that node.join was not given: "
                f"{_listed(self._others)}",
                why="its moments are in no checkpoint, and are kept where they have to be dropped",
                fix="give node.join all that train the model, in a list; to go on with another one "
                "than before, call island.leave() and node.join with it and resume=True",
            )
        if self._inner:
            raise operator_error(
                "E204",
                "the optimizer that node.join was given takes its steps by another one: "
                f"{_listed(self._inner)}",
                why="the moments are those of the inner one, and would be in no checkpoint",
                fix="give node.join the inner one instead (SAM's base_optimizer), and step the "
                "outer one as before; where that has slow weights (Lookahead), both in a list, the "
                "inner one first; instead of ZeroRedundancyOptimizer use fully_shard",
            )

    def end(self) -> None:
        """Look no more."""
        for hook in self._hooks:
            hook.remove()

    def _is_given(self, optimizer: torch.optim.Optimizer) -> bool:
        return any(optimizer is one for one in self._given)

    def _begins(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._leave_step(optimizer)  # that an exception has ended
        self._open.append(optimizer)

    def _leave_step(self, optimizer: torch.optim.Optimizer) -> None:
        at = next((n for n, one in enumerate(self._open) if one is optimizer), None)
        del self._open[len(self._open) if at is None else at :]

    def _ends(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._leave_step(optimizer)
        if self._is_given(optimizer):
            self._around |= {id(one) for one in self._open}
            if self._keeps_moments(optimizer):  # as where a wrapper has a state of its own
                self._inner[id(optimizer)] = type(optimizer).__name__
            return
        if id(optimizer) in self._around:
            self._around.discard(id(optimizer))
            return
        groups = optimizer.param_groups
        if not any(p in self._parameters for group in groups for p in group["params"]):
            return
        name = type(optimizer).__name__
        if not self._part_of_given(optimizer):
            self._others[id(optimizer)] = name
        elif self._keeps_moments(optimizer):
            self._inner[id(optimizer)] = name

    def _part_of_given(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether a given one calls it, or is made around it."""
        if any(self._is_given(one) for one in self._open):
            return True
        theirs = [own for one in self._given for own in one.param_groups]
        return any(group is own for group in optimizer.param_groups for own in theirs)

    def _keeps_moments(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it has state of the model's parameters that no given one has as well."""
        states = [one.state for one in self._outer]
        if any(optimizer.state is state for state in states):  # nearly always
            return False
        return any(
            parameter in self._parameters
            and any(isinstance(value, Tensor) for value in kept.values())
            and not any(state.get(parameter) is kept for state in states)
            for parameter, kept in optimizer.state.items()
        )


def _listed(names: Mapping[int, str]) -> str:
    return ", ".join(sorted(set(names.values())))
