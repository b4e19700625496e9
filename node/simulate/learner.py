"""One simulated island's training: a small byte model, on text of its own.

All islands of a simulation live in one process and one thread, and take their steps one after
another: many take the sum of their times, and no more cores. Each has parameters, gradients and
moments of its own (16 bytes a parameter with AdamW), beside what its node keeps. They share the
text, of which each sees its part (:func:`shards`), what they start from, and the one model that the
observer evaluates with. With more than some thirty islands the text gets short, so that each has
less of it: 256 islands have 49 KB each.
"""

from __future__ import annotations

import functools
import math
import sysconfig
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor, nn

from bootstrap.manifest import Inner, Model
from diloco import loop
from node.simulate.scenario import HEADS, KEY_HEADS, Diverged, Scenario
from node.trainer.layout import Layout
from node.trainer.model import build
from node.trainer.optim import make_optimizer

# predicted bytes of the held-out text; with 8192, two runs that differ in rounding alone ended up
# to 1 % apart with "llama"
EVALUATED = {"bytes": 8192, "llama": 65_536}
AT_ONCE = 8192  # of them
TEXT_BYTES = 400_000  # of each island, where there is so much
COMMON = (4, 5)  # places of the texts to start from and to validate with
BETAS = {"bytes": (0.9, 0.999), "llama": (0.9, 0.95)}  # of AdamW,
DECAY = {"bytes": 0.01, "llama": 0.1}  # and what it shrinks matrices by
CLIP_NORM = 1.0  # of the "llama" model's gradients, as in the manifest's default
MAX_WIDE = 8  # d_ff comes in multiples of it


@functools.cache
def shards(count: int) -> tuple[Tensor, ...]:
    """Disjoint texts from the Python sources of the standard library.

    One for each island, one for what all start from (:func:`initial`), and the last one to
    validate with; those two are the same for any number of islands that leaves each as much text as
    :data:`TEXT_BYTES`, so that their losses can be compared. All are views of one tensor (8 bytes a
    byte of the sources, some 100 MB). Files are dealt in an order that looks random, as islands of
    one run have texts of one kind.
    """
    library = Path(sysconfig.get_path("stdlib"))
    names = [
        file.relative_to(library)
        for file in library.rglob("*.py")
        if not {"site-packages", "test", "tests"} & set(file.relative_to(library).parts)
    ]
    names.sort(key=lambda name: blake3(name.as_posix().encode()).digest())
    whole = b"".join((library / name).read_bytes() for name in names)
    size = min(TEXT_BYTES, len(whole) // (count + len(COMMON)))
    text = torch.frombuffer(bytearray(whole), dtype=torch.uint8).long()
    own = [place for place in range(count + len(COMMON)) if place not in COMMON]
    return tuple(text[place * size : (place + 1) * size] for place in (*own[:count], *COMMON))


class Layers(nn.Module):
    """A model whose parts are its layers, by the names that fragments are dealt out by."""

    def __init__(self, layers: nn.Sequential) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, context: Tensor) -> Tensor:
        """Bytes [batch, T] to logits."""
        logits: Tensor = self.layers(context)
        return logits


def new_model(scenario: Scenario) -> nn.Module:
    """Bytes [batch, T] to logits; equal for equal seeds."""
    if scenario.model == "bytes":
        return Layers(loop.new_model(scenario.seed, scenario.hidden))
    sizes = Model(
        vocab_size=256,
        d_model=scenario.hidden,
        n_layers=scenario.layers,
        n_heads=HEADS,
        n_kv_heads=KEY_HEADS,
        d_ff=scenario.hidden * 11 // 4 // MAX_WIDE * MAX_WIDE,
        max_seq_len=scenario.context,
    )
    return build(sizes, scenario.seed)


def layout_of(scenario: Scenario, model: nn.Module | None = None) -> Layout:
    """Where the parameters stand in the flat vector, as on the wire."""
    return Layout.of_module(model or new_model(scenario), scenario.pieces)


def batch_of(
    scenario: Scenario, text: Tensor, size: int, random: torch.Generator
) -> tuple[Tensor, Tensor]:
    """What the model sees, and the bytes that follow: [size, T] and [size] or [size, T]."""
    if scenario.model == "bytes":
        return loop.batch_of(text, size, random)
    places = torch.randint(len(text) - scenario.context, (size, 1), generator=random)
    window = text[places + torch.arange(scenario.context + 1)]
    return window[:, :-1], window[:, 1:]


def loss_of(model: nn.Module, context: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy in nats a byte."""
    return nn.functional.cross_entropy(model(context).flatten(0, -2), target.flatten())


class Learner:
    """A copy of the model, an inner optimizer, and text that stays at home."""

    def __init__(self, scenario: Scenario, number: int, shard: int) -> None:
        self.scenario = scenario
        self.model = new_model(scenario)
        self.layout = layout_of(scenario, self.model)
        self.optimizer = _optimizer(self.model, scenario)
        self.text = shards(scenario.islands)[shard]
        self.random = torch.Generator().manual_seed(scenario.seed * 100_003 + number)

    def params(self) -> Tensor:
        """θ, float32 [n], a copy."""
        return self.layout.flatten_into(self.model, torch.empty(self.layout.size))

    def load(self, vector: Tensor) -> None:
        """θ ← vector."""
        self.layout.load_from(vector, self.model)

    def gradient(self) -> float:
        """Put the gradient of one batch into the parameters; its loss in nats a byte.

        Raises :class:`Diverged` where it comes to no finite loss.
        """
        context, target = batch_of(self.scenario, self.text, self.scenario.batch, self.random)
        loss = loss_of(self.model, context, target)
        self.model.zero_grad()
        torch.autograd.backward(loss)
        found = loss.item()
        if not math.isfinite(found):
            raise Diverged("the training loss of an island")
        return found

    def step(self, share: float, factor: float = 1.0) -> None:
        """One step with the gradient that is there, when ``share`` of the run (0 to 1) is done.

        ``factor`` is of the learning rate.
        """
        self.clip()
        for group in self.optimizer.param_groups:
            group["lr"] = factor * self.scenario.inner_lr * rate_factor(self.scenario, share)
        self.optimizer.step()

    def clip(self) -> None:
        """Shorten the gradient that is there, as a node does before it uses or sends it."""
        if self.scenario.model == "llama":
            nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)

    def train(self, steps: int, share: float) -> float:
        """Take ``steps`` inner steps from ``share`` of the run on; returns their mean loss."""
        one, total = self.scenario, 0.0
        for step in range(steps):
            total += self.gradient()
            self.step(share + step / (one.rounds * one.inner_steps))
        return total / max(1, steps)


def rate_factor(scenario: Scenario, share: float) -> float:
    """What the learning rate is multiplied by when ``share`` of the run (0 to 1) is done."""
    if scenario.schedule == "constant":
        return 1.0
    warm = scenario.warmup
    if share < warm:
        return (share + 1 / (scenario.rounds * scenario.inner_steps)) / warm
    done = min(1.0, (share - warm) / (1 - warm))
    # to nothing: at a tenth the noise of the last steps was as large as what sets modes apart
    return 0.5 * (1 + math.cos(math.pi * done))


def initial(scenario: Scenario) -> Tensor:
    """What all islands start from, float32 [n]."""
    common, model = scenario.start(), new_model(scenario)
    layout_of(common, model).load_from(_started(common), model)
    layout = layout_of(scenario, model)
    return layout.flatten_into(model, torch.empty(layout.size))


@functools.cache
def _started(scenario: Scenario) -> Tensor:
    """The seed's parameters, and what one island learns from them on a text of its own."""
    learner = Learner(scenario, 0, 0)
    learner.text = shards(scenario.islands)[-2]
    learner.train(scenario.start_steps, 0.0)
    return learner.params()


@torch.no_grad()
def validation_loss(scenario: Scenario, vector: Tensor, model: nn.Module | None = None) -> float:
    """Of parameters [n], in nats a byte, at the same places of the held-out text every time."""
    model = model or new_model(scenario)
    layout_of(scenario, model).load_from(vector, model)
    each = 1 if scenario.model == "bytes" else scenario.context
    count = EVALUATED[scenario.model] // each
    random = torch.Generator().manual_seed(0)
    contexts, targets = batch_of(scenario, shards(scenario.islands)[-1], count, random)
    total = 0.0
    size = AT_ONCE // each
    pairs = zip(torch.split(contexts, size), torch.split(targets, size), strict=True)
    for context, target in pairs:
        total += len(context) * loss_of(model, context, target).item()
    return total / count


def _optimizer(model: nn.Module, scenario: Scenario) -> torch.optim.Optimizer:
    """A node's, with the numbers of this model; the learning rate is set before every step."""
    betas, decay = BETAS[scenario.model], DECAY[scenario.model]
    inner = Inner(optimizer=scenario.inner, betas=betas, weight_decay=decay)
    if scenario.model == "llama":
        return make_optimizer(model, inner)
    # its input table and its last layer are layers too, and AdamW's, as Muon's author advises
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim == 2]
    return make_optimizer(model, inner, (matrices[0], matrices[-1]))
