"""What a simulated island trains with is what a node's trainer trains with."""

from __future__ import annotations

from typing import Literal

import pytest

from node.simulate.learner import DECAY, Learner
from node.simulate.scenario import Scenario


def _groups(
    model: Literal["bytes", "llama"], inner: Literal["adamw", "muon"]
) -> dict[str, tuple[float, bool]]:
    """By parameter: its weight decay, and whether Muon has it."""
    learner = Learner(Scenario(model=model, hidden=16, inner=inner, islands=1), 0, 0)
    names = {id(parameter): name for name, parameter in learner.model.named_parameters()}
    return {
        names[id(parameter)]: (group["weight_decay"], group["muon"])
        for group in learner.optimizer.param_groups
        for parameter in group["params"]
    }


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_matrices_decay_and_norms_do_not(inner: Literal["adamw", "muon"]) -> None:
    groups = _groups("llama", inner)
    norms = {name for name in groups if "norm" in name}
    assert norms
    assert norms < groups.keys()
    for name, (decay, muon) in groups.items():
        assert decay == (0.0 if name in norms else DECAY["llama"])
        assert muon == (inner == "muon" and "layers." in name and name not in norms)


def test_the_first_and_the_last_matrix_of_the_small_model_are_not_muons() -> None:
    groups = _groups("bytes", "muon")
    assert {name for name, (_, muon) in groups.items() if muon} == {"layers.2.weight"}
    assert {name for name, (decay, _) in groups.items() if decay} == {
        f"layers.{number}.weight" for number in (0, 2, 4)
    }
