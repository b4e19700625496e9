"""DiLoCo from top to bottom, in one process: the file to read first.

Run it with ``python -m diloco.loop``; it takes a few seconds on a CPU.

K islands train copies of one model, each on text of its own, for H inner steps without a word to
each other. Then they compare how far each has come from the common starting point, average these
differences (the *pseudo-gradients*), and let an outer optimizer take one step with the average.
All start again from the result. That is a round; what travels per round is one vector per
island, instead of one per inner step. Everything else in Atoll serves to do this over the
internet: encode the vectors, agree on who takes part, survive those who leave.

The papers:
    DiLoCo                  Douillard et al. 2023, 2311.08105 (the algorithm)
    Local SGD               Stich 2018, 1805.09767 (why infrequent averaging converges)
    Nesterov's method       Sutskever et al. 2013 (the form of momentum that torch uses)
    The model               Bengio et al. 2003, A Neural Probabilistic Language Model
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from diloco import merge, outer
from diloco.pseudo_gradient import pseudo_gradient


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run that shows the effect in seconds."""

    islands: int = 4  # K
    inner_steps: int = 40  # H
    rounds: int = 15
    batch: int = 64
    inner_lr: float = 3e-3
    outer_lr: float = 0.7  # η
    outer_momentum: float = 0.9  # μ
    warmup_rounds: int = 10  # towards η and μ, from 1.0 and 0.5
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """What a round has come to, in nats a byte."""

    round: int
    training: float  # mean over the islands' inner steps
    validation: float  # of the common model, on text that nobody trains on


# --- a model and data small enough to forget about ---------------------------------------------

CONTEXT = 12  # bytes the model looks back
WIDTH = 24  # numbers per byte
HIDDEN = 192


def new_model(seed: int, hidden: int = HIDDEN) -> nn.Sequential:
    """Bytes [batch, CONTEXT] to logits of the next byte [batch, 256]."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Embedding(256, WIDTH),
        nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, hidden),
        nn.GELU(),
        nn.Linear(hidden, 256),
    )


def texts(count: int, size: int = 200_000) -> list[Tensor]:
    """``count`` disjoint texts, from the Python sources of the standard library."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    whole = b"".join(file.read_bytes() for file in files)
    size = min(size, len(whole) // count)
    return [torch.tensor(list(whole[i * size : (i + 1) * size])) for i in range(count)]


def batch_of(text: Tensor, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random places of a text: contexts [size, CONTEXT] and the bytes that follow [size]."""
    places = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    window = text[places + torch.arange(CONTEXT + 1)]
    return window[:, :-1], window[:, -1]


@torch.no_grad()
def load(model: nn.Module, vector: Tensor) -> None:
    """Copy a flat vector into the parameters (torch's vector_to_parameters would share memory)."""
    sizes = [parameter.numel() for parameter in model.parameters()]
    for parameter, part in zip(model.parameters(), torch.split(vector, sizes), strict=True):
        parameter.copy_(part.view_as(parameter))


# --- DiLoCo ------------------------------------------------------------------------------------


class Island:
    """One participant: a copy of the model, an inner optimizer, and text that stays at home."""

    def __init__(self, number: int, text: Tensor, settings: Settings) -> None:
        self.model = new_model(settings.seed)
        # Its moments live on from round to round and are never sent (DiLoCo, section 2).
        self.optimizer = torch.optim.AdamW(self.model.parameters(), settings.inner_lr)
        self.text = text
        self.batch = settings.batch
        self.random = torch.Generator().manual_seed(settings.seed + number)

    def train(self, start: Tensor, steps: int) -> tuple[Tensor, float]:
        """Start from the common parameters; return θ_local and the mean loss on the way."""
        load(self.model, start)
        total = 0.0
        for _ in range(steps):
            context, target = batch_of(self.text, self.batch, self.random)
            loss = nn.functional.cross_entropy(self.model(context), target)
            self.optimizer.zero_grad()
            torch.autograd.backward(loss)
            self.optimizer.step()
            total += loss.item()
        return parameters_to_vector(self.model.parameters()).detach(), total / steps


def train(settings: Settings) -> Iterator[Report]:
    """Yield a report per round."""
    *parts, held_out = texts(settings.islands + 1)
    islands = [Island(number, text, settings) for number, text in enumerate(parts)]
    common = new_model(settings.seed)
    base = parameters_to_vector(common.parameters()).detach().clone()  # G, equal on all islands
    state = outer.init(base)  # v, equal on all islands as well
    merged = torch.empty_like(base)

    for round_ in range(settings.rounds):
        # 1. Inner steps. On the internet this is where islands work side by side for minutes.
        ends = [island.train(base, settings.inner_steps) for island in islands]

        # 2. Pseudo-gradients Δ = G − θ_local, and their mean. This is all that travels. Atoll
        #    weighs by tokens; here all have seen as many.
        deltas = [pseudo_gradient(base, local, torch.empty_like(base)) for local, _ in ends]
        merge.weighted_mean(deltas, [1.0] * len(deltas), out=merged)

        # 3. The outer step. η = 1 and μ = 0 would be plain averaging of the models; momentum
        #    carries on in the direction that several rounds agree on.
        lr, momentum = outer.outer_rates(
            round_,
            lr=settings.outer_lr,
            momentum=settings.outer_momentum,
            lr_start=1.0,
            momentum_start=0.5,
            warmup_rounds=settings.warmup_rounds,
        )
        outer.update(state, merged, base, lr=lr, momentum=momentum)

        load(common, base)
        yield Report(round_, sum(loss for _, loss in ends) / len(ends), evaluate(common, held_out))


@torch.no_grad()
def evaluate(model: nn.Module, text: Tensor) -> float:
    """Loss at the same 4096 places every time."""
    context, target = batch_of(text, 4096, torch.Generator().manual_seed(0))
    return nn.functional.cross_entropy(model(context), target).item()


def main() -> None:
    """Train with the defaults and write a line per round."""
    torch.set_num_threads(1)  # tensors this small only lose time to more
    for report in train(Settings()):
        sys.stdout.write(
            f"round {report.round:2d}   training loss {report.training:.3f}   "
            f"validation loss {report.validation:.3f}\n"
        )


if __name__ == "__main__":
    main()
