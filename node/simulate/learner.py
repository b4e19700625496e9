"""One simulated island's training: the small byte model of :mod:`diloco.loop` on its own text."""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from diloco.loop import batch_of, load, new_model, texts
from node.simulate.scenario import Scenario

EVALUATED = 8192  # places of the held-out text
TEXT_BYTES = 400_000  # of each island, where there is so much
MUON_LR = 6.0  # times AdamW's, for matrices (their step is orthogonal: of another length)


@functools.cache
def shards(count: int) -> tuple[Tensor, ...]:
    """Disjoint texts from the Python sources of the standard library; the last is held out."""
    return tuple(texts(count + 1, TEXT_BYTES))


class Learner:
    """A copy of the model, an inner optimizer, and text that stays at home."""

    def __init__(self, scenario: Scenario, number: int, shard: int) -> None:
        self.scenario = scenario
        self.model = new_model(scenario.seed, scenario.hidden)
        self.optimizers = _optimizers(self.model, scenario)
        self.text = shards(scenario.islands)[shard]
        self.random = torch.Generator().manual_seed(scenario.seed * 100_003 + number)

    def params(self) -> Tensor:
        """θ, float32 [n], a copy."""
        return parameters_to_vector(self.model.parameters()).detach().clone()

    def load(self, vector: Tensor) -> None:
        """θ ← vector."""
        load(self.model, vector)

    def gradient(self) -> float:
        """Put the gradient of one batch into the parameters; its loss in nats a byte."""
        context, target = batch_of(self.text, self.scenario.batch, self.random)
        loss = nn.functional.cross_entropy(self.model(context), target)
        self.model.zero_grad()
        torch.autograd.backward(loss)
        return loss.item()

    def step(self) -> None:
        """One step of the inner optimizer with the gradient that is there."""
        for optimizer in self.optimizers:
            optimizer.step()

    def train(self, steps: int) -> float:
        """So many inner steps; the mean loss on the way."""
        total = 0.0
        for _ in range(steps):
            total += self.gradient()
            self.step()
        return total / max(1, steps)

    def flat_gradient(self) -> Tensor:
        """float32 [n]."""
        return torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])

    def set_gradient(self, vector: Tensor) -> None:
        """The inverse of :meth:`flat_gradient`."""
        parameters = list(self.model.parameters())
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, part in zip(parameters, torch.split(vector, sizes), strict=True):
            parameter.grad = part.view_as(parameter).clone()


def initial(scenario: Scenario) -> Tensor:
    """What all islands start from, float32 [n]."""
    model = new_model(scenario.seed, scenario.hidden)
    return parameters_to_vector(model.parameters()).detach().clone()


@torch.no_grad()
def validation_loss(scenario: Scenario, vector: Tensor, model: nn.Module | None = None) -> float:
    """Of parameters [n], in nats a byte, at the same places of the held-out text every time."""
    model = model or new_model(scenario.seed, scenario.hidden)
    load(model, vector)
    held_out = shards(scenario.islands)[-1]
    context, target = batch_of(held_out, EVALUATED, torch.Generator().manual_seed(0))
    return nn.functional.cross_entropy(model(context), target).item()


def _optimizers(model: nn.Module, scenario: Scenario) -> list[torch.optim.Optimizer]:
    parameters = list(model.parameters())
    if scenario.inner == "adamw":
        return [torch.optim.AdamW(parameters, scenario.inner_lr, fused=True)]
    # the input table and the last layer are AdamW's, as Muon's author advises
    hidden = [p for p in parameters[1:-2] if p.ndim == 2]
    others = [p for p in parameters if all(p is not one for one in hidden)]
    return [
        torch.optim.Muon(hidden, lr=scenario.inner_lr * MUON_LR, weight_decay=0.0),
        torch.optim.AdamW(others, scenario.inner_lr, fused=True),
    ]
