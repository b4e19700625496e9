"""An optimizer begins afresh, whatever it keeps and wherever it makes that."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from node.script.optimizers import Several
from node.trainer.afresh import begin_afresh
from node.trainer.copies import Copies
from node.trainer.optimizer_state import Unused, optimizer_steps, sanitise

KINDS: dict[str, Any] = {
    name: getattr(torch.optim, name)
    for name in (
        *("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam"),
        *("RMSprop", "Rprop", "SGD"),
    )
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def groups(model: Any) -> list[dict[str, Any]]:
    """With an option for one of them that is not the default."""
    named = list(model[0].named_parameters())
    return [{"params": named, "lr": 0.03}, {"params": list(model[1].named_parameters())}]


@pytest.mark.parametrize("kind", KINDS)
def test_it_steps_as_a_new_one_does(kind: str) -> None:
    """Adagrad makes its state in the constructor, and again where that is gone."""
    used, new = model(), model()
    options = {"momentum": 0.9} if kind == "SGD" else {}
    if kind == "Adagrad":
        options = {"initial_accumulator_value": 0.25}
    optimizer = KINDS[kind](groups(used), lr=0.1, **options)
    train(used, optimizer, 3)
    used.load_state_dict(new.state_dict())
    begin_afresh(optimizer)
    fresh = KINDS[kind](groups(new), lr=0.1, **options)
    for mine, other in zip(train(used, optimizer, 3), train(new, fresh, 3), strict=True):
        assert torch.equal(mine, other)


class Elsewhere(torch.optim.Optimizer):
    """It has what it keeps in a list, too, and its state for others to look at."""

    def __init__(self, parameters: Any, start: float, *, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr, "start": start})
        self.sums = []
        for group in self.param_groups:
            for p in group["params"]:
                self.sums.append(torch.full_like(p, group["start"]))
                self.state[p] = {"sum": self.sums[-1], "codes": [1], "root": torch.ones(())}


def test_what_it_has_in_two_places_stays_in_both() -> None:
    made = model()
    optimizer = Elsewhere(made.parameters(), 0.5)
    with torch.no_grad():
        for state in optimizer.state.values():
            state["sum"].add_(1.0)
            state["root"], state["more"] = torch.zeros(2), torch.ones(2)
    begin_afresh(Several([optimizer, torch.optim.SGD(made.parameters())]))
    assert len(optimizer.state) == len(optimizer.sums) == 4
    for state, held in zip(optimizer.state.values(), optimizer.sums, strict=True):
        assert state["sum"] is held
        assert (held == 0.5).all()
        assert state.keys() == {"sum", "codes", "root"}
        assert torch.equal(state["root"], torch.ones(()))


class Demanding(torch.optim.Optimizer):
    """Nobody can make another one without knowing what it asks for."""

    def __init__(self, parameters: Any, secret: str) -> None:
        assert secret
        super().__init__(parameters, {})


def test_where_its_constructor_cannot_be_asked_all_is_dropped() -> None:
    made = model()
    optimizer = Demanding(made.parameters(), "s")
    for p in made.parameters():
        optimizer.state[p]["sum"] = torch.ones_like(p)
    optimizer.state["all"] = 1  # type: ignore[index]
    begin_afresh(optimizer)
    assert not optimizer.state


class OfMatrices(torch.optim.Optimizer):
    """What it keeps of vectors it makes in a step, and beside all of these a count."""

    def __init__(self, parameters: Any, *, lr: float = 0.1) -> None:
        super().__init__(parameters, {"lr": lr})
        self.state["k"] = torch.zeros(())  # type: ignore[index]
        for p in self.param_groups[0]["params"]:
            if p.dim() == 2:
                self.state[p]["sum"] = torch.ones_like(p)


@pytest.mark.parametrize("begins", ["afresh", "unused"])
def test_each_parameter_begins_with_what_the_constructor_makes_of_it(begins: str) -> None:
    made = model()
    optimizer = OfMatrices([*list(made.parameters())[::-1]])  # vectors first
    unused = Unused(optimizer)
    for p in made.parameters():
        optimizer.state[p]["sum"] = torch.full_like(p, math.nan)
    sanitise(optimizer)
    assert optimizer_steps(optimizer) == 1
    if begins == "afresh":
        begin_afresh(optimizer)
    else:
        unused.restore(optimizer)
    assert set(optimizer.state) == {p for p in made.parameters() if p.dim() == 2}
    assert all(bool((state["sum"] == 1.0).all()) for state in optimizer.state.values())


class Around(torch.optim.Optimizer):
    """Slow weights around another optimizer."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow_params"] = p.detach().clone()


def test_slow_weights_stay_where_they_are_as_moments_are_dropped() -> None:
    made = model()
    inner = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    outer = Around(inner)
    both = Several([inner, outer])
    unused = Unused(both)
    train(made, inner, 2)
    with torch.no_grad():
        for state in outer.state.values():
            state["slow_params"].add_(1.0)  # with a merge
    slow = {p: state["slow_params"].clone() for p, state in outer.state.items()}
    unused.restore(both)
    assert not inner.state
    for p, was in slow.items():
        assert torch.equal(outer.state[p]["slow_params"], was)


class Pulling(torch.optim.Optimizer):
    """Lookahead whose every second step also leads momentum half of the way back."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, {})
        self.optimizer, self.steps = optimizer, 0
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"cached_params": p.detach().clone(), "cached_mom": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        self.steps += 1
        for p in self.param_groups[0]["params"] if self.steps % 2 == 0 else ():
            slow, momentum = self.state[p], self.optimizer.state[p]["momentum_buffer"]
            p.copy_(slow["cached_params"].lerp_(p, 0.5))
            momentum.copy_(slow["cached_mom"].lerp_(momentum, 0.5))


@pytest.mark.parametrize("steps", [0, 3])
def test_what_pulls_momentum_back_begins_with_none_where_its_slow_weights_are(steps: int) -> None:
    made = model()
    inner = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    outer = Pulling(inner)
    both = Several([inner, outer])
    train(made, outer, steps)
    slow = {p: state["cached_params"].clone() for p, state in outer.state.items()}
    begin_afresh(both)
    assert not inner.state
    assert slow.keys() == outer.state.keys()
    for p, state in outer.state.items():
        assert torch.equal(state["cached_params"], slow[p])
        assert not state["cached_mom"].any()
    train(made, outer, 3)


def test_a_merge_moves_slow_weights_and_not_the_momentum_beside_them() -> None:
    made = model()
    inner = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    outer = Pulling(inner)
    train(made, outer, 3)
    had = {p: {n: v.clone() for n, v in state.items()} for p, state in outer.state.items()}
    with torch.no_grad(), Copies(Several([inner, outer])).follow(*made.parameters()):
        for p in made.parameters():
            p += 1.0
    for p, state in outer.state.items():
        assert torch.allclose(state["cached_params"], had[p]["cached_params"] + 1.0)
        assert torch.equal(state["cached_mom"], had[p]["cached_mom"])


def test_no_nan_stays_in_what_any_of_several_keeps() -> None:
    made = model()
    inner = torch.optim.SGD(made.parameters(), lr=0.1, momentum=0.9)
    outer = Pulling(inner)
    train(made, outer, 1)
    for one in (inner, outer):
        for state in one.state.values():
            for value in state.values():
                value.fill_(math.nan)
    sanitise(Several([inner, outer]))
    kept = [v for one in (inner, outer) for state in one.state.values() for v in state.values()]
    assert len(kept) == 12
    assert all(bool(value.isfinite().all()) for value in kept)


def test_a_point_that_a_sum_leads_on_from_is_moved_and_not_set() -> None:
    """MADGRAD's x0: with all that was learnt since, its sum would count a second time."""
    theta = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([theta])
    optimizer.state[theta] |= {"x0": torch.full((2,), -3.0), "s": torch.ones(2)}
    copies = Copies(optimizer)
    copies.set(theta)
    assert optimizer.state[theta]["x0"].tolist() == [-3.0, -3.0]
    with torch.no_grad(), copies.follow(theta):
        theta += 1.0
    assert optimizer.state[theta]["x0"].tolist() == [-2.0, -2.0]


def test_a_copy_that_two_optimizers_share_moves_once() -> None:
    theta = nn.Parameter(torch.zeros(2))
    one, other = torch.optim.SGD([theta]), torch.optim.SGD([theta])
    one.state[theta]["slow_params"] = torch.zeros(2)
    other.state = one.state
    with torch.no_grad(), Copies(Several([one, other])).follow(theta):
        theta += 1.0
    assert one.state[theta]["slow_params"].tolist() == [1.0, 1.0]
