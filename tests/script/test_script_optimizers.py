"""Scripts with several optimizers, or others than those that have joined; who trains what."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from script_kit import TARGET, Played, committing, silent
from torch import Tensor, nn
from trainer_kit import begin

from node.script.joining import join
from node.script.optimizers import Several, Watch, _States, as_one
from node.trainer.channel import Cold, Save, StepDone
from node.trainer.layout import Layout
from node.trainer.optimizer_state import optimizer_steps, untaken
from node.trainer.parallel import Ranks
from node.trainer.resume import load, save
from node.trainer.trainer_state import FragmentState, TrainerState
from node.trainer.weights import Weights
from protocols.errors import OperatorError


class Pair:
    """A generator and a discriminator, which is trained twice as often, with an optimizer each."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleDict({"made": nn.Linear(4, 3), "judged": nn.Linear(3, 1)})
        self.optimizers = [
            torch.optim.AdamW(self.model["made"].parameters(), lr=0.1),
            torch.optim.SGD(self.model["judged"].parameters(), lr=0.1, momentum=0.9),
        ]
        self.one = as_one(self.optimizers, self.model.parameters())
        layout = Layout.of_module(self.model)
        ranks = Ranks.alone(torch.device("cpu"))
        self.weights = Weights.of(dict(self.model.named_parameters()), layout, ranks)

    def step(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.one.zero_grad()
        self.model["judged"](self.model["made"](torch.ones(2, 4))).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()

    def train(self) -> None:
        self.step(self.optimizers[1:])
        self.step(self.optimizers)

    @property
    def theta(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])


class Early(torch.optim.Optimizer):
    """It makes its state when it is made, and never looks whether that is there."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for p in self.param_groups[0]["params"]:
            self.state[p] = {"sum": torch.zeros_like(p), "root": torch.ones_like(p), "seen": 0}
            self.state[p]["step"] = torch.tensor(0.0)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["seen"] += 1
            state["step"] += 1
            state["root"].mul_(0.9).add_(p.grad.square())
            state["sum"] = state["sum"] + p.grad
            p.addcdiv_(state["sum"], state["root"].sqrt(), value=-self.param_groups[0]["lr"])


@pytest.mark.parametrize("forgets", [False, True])
@pytest.mark.parametrize("away", [0.0, 1.0])
def test_what_an_optimizer_makes_before_its_first_step_stays(
    monkeypatch: pytest.MonkeyPatch, away: float, forgets: bool
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Early)
    played = Played(committing, away=away, rewarm=True, forgets=forgets)
    assert not played.script.of(Cold)  # there were no moments to lose
    assert played.train(TARGET)
    assert played.joined.round == 1
    for parameter, state in played.optimizer.state.items():
        assert state["seen"] == float(state["step"]) == (0 if forgets else TARGET)
        if forgets:
            assert torch.equal(state["sum"], torch.zeros_like(parameter))
            assert torch.equal(state["root"], torch.ones_like(parameter))
    assert played.train(2 * TARGET)


@pytest.mark.parametrize("forgets", [False, True])
def test_what_it_has_learnt_elsewhere_is_dropped_all_the_same(
    monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", Early)
    away = 0.0 if forgets else 1.0
    played = Played(committing, away=away, trained=1, forgets=forgets)
    assert len(played.script.of(Cold)) == (not forgets)
    for parameter, state in played.optimizer.state.items():
        assert torch.equal(state["sum"], torch.zeros_like(parameter))
        assert torch.equal(state["root"], torch.ones_like(parameter))
        assert state["seen"] == float(state["step"]) == 0
    assert len(played.optimizer.state) == 2
    assert played.train(2 * TARGET)
    assert played.joined.round == 2
    for state in played.optimizer.state.values():
        assert state["seen"] == float(state["step"]) == (0 if forgets else 2 * TARGET)


@pytest.mark.parametrize(
    ("state", "unused"),
    [
        ({}, True),
        ({"step": torch.tensor(0.0), "sum": torch.ones(2), "codes": object()}, True),
        ({"step": 0, "sum": torch.ones(2)}, True),
        ({"step": torch.tensor(1.0), "sum": torch.zeros(2)}, False),
        ({"step": torch.zeros(2), "sum": torch.zeros(2), "more": None, "seen": 0}, True),
        ({"sum": torch.tensor([0.0, 1.0])}, False),
        ({"sum": torch.zeros(2), "seen": 1}, False),
        ({"sum": torch.zeros(2), "more": [0]}, False),  # nobody knows what that is
        ({"sum": torch.zeros(2), "more": np.zeros(2)}, False),
        ([0], False),
    ],
)
def test_what_has_seen_a_step(state: Any, unused: bool) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    optimizer.state[optimizer.param_groups[0]["params"][0]] = state
    assert untaken(optimizer) is unused


@pytest.mark.parametrize("one_disk", [True, False])
@pytest.mark.parametrize("rule", [torch.optim.SGD, torch.optim.RMSprop])
def test_all_optimizers_come_back_with_their_moments(
    tmp_path: Path, one_disk: bool, rule: Callable[..., torch.optim.Optimizer]
) -> None:
    pair, other = Pair(0), Pair(1)
    for each in (pair, other):
        each.optimizers[1] = rule(each.model["judged"].parameters(), lr=0.1, momentum=0.9)
        each.one = as_one(each.optimizers, each.model.parameters())
    pair.train()
    pair.train()
    standing = TrainerState(
        fragments=(FragmentState(round=1),), round_step=0, step=2, tokens=16, rewarm_from=None,
        optimizer_steps=optimizer_steps(pair.one),
    )  # fmt: skip
    assert save(tmp_path, pair.weights, pair.one, standing, one_disk=one_disk).finish() is None
    pair.train()
    other.optimizers[0].load_state_dict(other.optimizers[0].state_dict())  # another state object
    assert load(tmp_path, other.weights, other.one, one_disk=one_disk)[1] == ""
    other.train()
    assert torch.equal(other.theta, pair.theta)


def test_of_several_optimizers_nothing_is_made_by_looking() -> None:
    pair = Pair(0)
    assert not pair.one.state
    assert pair.one.state.get(pair.model["made"].weight, {}) == {}
    assert not any(optimizer.state for optimizer in pair.optimizers)
    pair.train()
    assert pair.one.state.keys() == set(pair.model.parameters())
    pair.one.state.clear()
    assert not any(optimizer.state for optimizer in pair.optimizers)


@pytest.mark.parametrize("one_disk", [True, False])
def test_the_states_of_several_are_not_put_together_for_every_parameter(
    tmp_path: Path, one_disk: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which would take seconds with a thousand of them."""
    pair, made = Pair(0), 0
    pair.train()

    class Counted(_States):
        def __init__(self, optimizers: Any) -> None:
            nonlocal made
            made += 1
            super().__init__(optimizers)

    monkeypatch.setattr("node.script.optimizers._States", Counted)
    standing = TrainerState(
        fragments=(FragmentState(round=1),), round_step=0, step=2, tokens=16, rewarm_from=None,
        optimizer_steps=optimizer_steps(pair.one),
    )  # fmt: skip
    assert save(tmp_path, pair.weights, pair.one, standing, one_disk=one_disk).finish() is None
    load(tmp_path, pair.weights, pair.one, one_disk=one_disk)
    assert made == 3


KEPT: dict[str, tuple[Callable[..., torch.optim.Optimizer], str]] = {
    "plain": (torch.optim.SGD, ""),
    "adafactor": (torch.optim.Adafactor, "cannot hold col_var, row_var, of 1 parameters"),
}


@pytest.mark.parametrize("kind", KEPT)
def test_what_no_checkpoint_holds_is_said_with_the_first_and_when_it_is_missed(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """And nothing is, where an optimizer never has anything to keep."""
    make, words = KEPT[kind]
    played = Played(silent)
    progress = played.joined._progress
    progress.optimizer = progress.files.optimizer = played.optimizer = make(
        played.model.parameters()
    )
    played.train()
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        played.script.commands.append(Save(str(tmp_path / name)))
        played.train()
        progress.files.finish()
    said = [record.getMessage() for record in caplog.records if record.name.startswith("node.")]
    assert len(said) == bool(words)
    assert all(words in text for text in said)
    progress.begin(begin(resume=str(tmp_path / "second"), step=2))
    told = played.script.of(Cold)
    assert len(told) == bool(words)
    assert all(words in one.why for one in told)


def watched(played: Played, given: Any = None) -> Watch:
    given = played.optimizer if given is None else given
    played.joined._progress.watch = watch = Watch(given, played.model.parameters())
    return watch


def test_an_optimizer_that_was_not_given_is_told_at_the_next_step() -> None:
    played = Played(silent)
    watch = watched(played)
    played.train()
    nothing = nn.Linear(2, 2)  # a probe, say, that the script trains in between
    nothing(torch.ones(1, 2)).sum().backward()
    torch.optim.SGD(nothing.parameters()).step()
    played.train()
    played.optimizer = torch.optim.SGD(played.model.parameters())  # type: ignore[assignment]
    with pytest.raises(OperatorError, match="was not given: SGD") as caught:
        played.train()
    assert caught.value.code == "E204"
    assert len(played.script.of(StepDone)) == 2
    watch.end()


class Twice(torch.optim.Optimizer):
    """Takes its steps by another one, as SAM and the sharded optimizers do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


class Around:
    """Neither an Optimizer, nor has it groups of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self) -> None:
        self.inner.step()

    def zero_grad(self) -> None:
        self.inner.zero_grad()


@pytest.mark.parametrize(
    "kind", [Twice, lambda p: Around(torch.optim.SGD(p)), lambda p: Several([torch.optim.SGD(p)])]
)
def test_an_optimizer_that_is_part_of_the_one_given_is_none_of_its_own(
    kind: Callable[[Any], Any],
) -> None:
    played = Played(silent)
    given = kind(played.model.parameters())
    played.optimizer = given.optimizers[0] if isinstance(given, Several) else given
    watch = watched(played, given)
    assert played.train(2)
    watch.end()


class Sam(torch.optim.Optimizer):
    """As sharpness-aware minimization is found everywhere: the groups are those of the inner."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old_p"] = parameter.detach().clone()
        self.base_optimizer.step()


class TwiceAdam(Twice):
    """As the sharded optimizers are."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.inner = torch.optim.AdamW(self.param_groups[0]["params"], lr=0.1)  # type: ignore[assignment]


class Lookahead(torch.optim.Optimizer):
    """As in pytorch-optimizer: the inner one goes by the name that accelerate's wrapper has."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.AdamW(parameters, lr=0.1)
        super().__init__(self.optimizer.param_groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


@pytest.mark.parametrize("kind", [Sam, TwiceAdam, Lookahead])
def test_moments_of_an_inner_optimizer_are_not_left_to_themselves(
    kind: Callable[[Any], Any],
) -> None:
    """They would be in no checkpoint, and nobody would say so."""
    played = Played(silent)
    played.optimizer = kind(played.model.parameters())
    watch = watched(played)
    with pytest.raises(OperatorError, match="by another one: AdamW") as caught:
        played.train()
    assert caught.value.code == "E204"
    watch.end()


def test_the_inner_optimizer_may_be_given_and_the_outer_one_stepped() -> None:
    played = Played(silent)
    sam = Sam(played.model.parameters())
    watch = watched(played, sam.base_optimizer)
    played.optimizer = sam  # type: ignore[assignment]
    assert played.train(2)

    def fails() -> None:
        raise ValueError("of the script's own")

    sam.base_optimizer.register_step_pre_hook(lambda *_: fails())
    with pytest.raises(ValueError, match="of the script's own"):
        played.train()
    played.joined.step(tokens=8)
    played.optimizer = torch.optim.AdamW(played.model.parameters())
    with pytest.raises(OperatorError, match="was not given: AdamW"):
        played.train()  # the step that was broken off covers nobody
    watch.end()


def test_parameters_that_are_unfrozen_are_told_at_the_next_step() -> None:
    """Else each island would train its own, for nobody, and the merged rest would not fit them."""
    played = Played(silent)
    played.model.bias.requires_grad_(False)  # frozen for a while
    assert played.train()
    played.model.bias.requires_grad_(True)
    assert played.train()
    played.model.register_parameter("gain", nn.Parameter(torch.ones(1), requires_grad=False))
    assert played.train()
    assert played.model.gain is not None
    played.model.gain.requires_grad_(True)
    with pytest.raises(OperatorError, match="1 parameters that require a gradient") as caught:
        played.train()
    assert caught.value.code == "E204"
    assert "gain" in caught.value.why


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any], str]] = {
    "lazy": (lambda: nn.LazyLinear(3), lambda m: torch.optim.SGD(m.parameters()), "no shape yet"),
    "empty": (
        lambda: nn.Linear(4, 0, bias=False),
        lambda m: torch.optim.SGD(m.parameters()),
        "no parameters to train",
    ),
    "no optimizer": (
        lambda: nn.Linear(2, 2),
        lambda m: [torch.optim.SGD(m.parameters()), None],
        "a NoneType is no optimizer",
    ),
    "not even a list": (lambda: nn.Linear(2, 2), lambda m: None, "a NoneType is no optimizer"),
    "none": (lambda: nn.Linear(2, 2), lambda m: [], "trains none of the model's parameters"),
    "of another model": (
        lambda: nn.Linear(2, 2),
        lambda m: torch.optim.SGD(nn.Linear(2, 2).parameters()),
        "trains none of the model's parameters",
    ),
}


@pytest.mark.filterwarnings("ignore")  # of layers without elements
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_take_part_is_refused_with_what_to_do(case: str) -> None:
    make, optimize, words = REFUSED[case]
    model = make()
    with pytest.raises(OperatorError, match=words) as caught:
        join(model, optimize(model))
    assert caught.value.code == "E204"
    told = "".join(traceback.format_exception(caught.value))  # of a script that does not catch it
    assert f"E204; fix: {caught.value.fix}" in told
