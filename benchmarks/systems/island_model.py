"""The model that islands are compared with: 3.4 M parameters, and one inner step of it.

The bare loop and torchft's take steps of the very model, optimizer and batch that an island of
Atoll has, so that only what is around the step differs.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from bootstrap.manifest import Manifest
from node.trainer.cross_entropy import mean_loss
from node.trainer.model import build
from node.trainer.optim import clip_gradients, make_optimizer

MANIFEST = Manifest.model_validate(
    {
        "name": "island-bench",
        "model": {"d_model": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "d_ff": 736},
        "data": {"seq_len": 128, "batch_size": 4},
        "inner": {"lr": 1e-3},
        "rounds": {"inner_steps": 10, "overlap_steps": 2, "total_rounds": 10_000, "eval_every": 0},
    }
)
TOKENS = MANIFEST.data.seq_len * MANIFEST.data.batch_size  # of one inner step


def new_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Model and inner optimizer, as the trainer makes them."""
    model = build(MANIFEST.model, MANIFEST.seed)
    return model, make_optimizer(model, MANIFEST.inner)


def batches(text: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of a text: inputs and targets, int64 [batch, seq_len] each."""
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)
    length = MANIFEST.data.seq_len
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(
            len(tokens) - length - 1, (MANIFEST.data.batch_size,), generator=generator
        )
        windows = torch.stack([tokens[s : s + length + 1] for s in starts.tolist()]).long()
        yield windows[:, :-1], windows[:, 1:]


def gradients(model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Forward, backward, clipping: all of a step but the optimizer's part. The loss."""
    loss = mean_loss(model(inputs), targets)
    loss.backward()
    clip_gradients(model.parameters(), MANIFEST.inner.clip_norm)
    return float(loss.detach())


def report(steps: list[float], elapsed: float, cpu: float = 0.0, tokens: int = TOKENS) -> None:
    """Tell the benchmark the seconds of each step, those of all together, and of the processor.

    ``tokens``: of one step.
    """
    told = {"steps": steps, "elapsed": elapsed, "tokens": tokens * len(steps)}
    print(json.dumps(told | {"cpu_s_a_step": cpu / max(1, len(steps))}))


def until(seconds: float) -> Iterator[None]:
    """Once a step, for so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        yield
