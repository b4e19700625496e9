"""A torch loop on a GPU with nothing around it: ``python -m benchmarks.systems.bare_gpu``.

Arguments: SECONDS TEXT RUN, a run's manifest, and ``compile`` or nothing. What it does is what a
careful script does: fused AdamW, bf16 by autocast, torch's own clipping, batches from page-locked
memory, one look at the loss a step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.systems.island_model import report, until
from bootstrap.manifest import Data, Manifest
from node.trainer.model import build
from node.trainer.optim import make_optimizer

WARM_STEPS = 5


def batches(text: Path, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """Random windows of a text on the device: inputs and targets, int64 [batch, seq_len] each."""
    tokens = torch.frombuffer(bytearray(text.read_bytes()), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(0)
    inside = torch.arange(data.seq_len + 1)
    while True:
        starts = torch.randint(
            len(tokens) - data.seq_len - 1, (data.batch_size,), generator=generator
        )
        windows = tokens[starts[:, None] + inside].long().pin_memory()
        there = windows.to("cuda", non_blocking=True)
        yield there[:, :-1], there[:, 1:]


def main() -> None:
    """Train for so many seconds."""
    seconds, text, manifest = float(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    run = Manifest.parse(manifest.read_bytes())
    torch.set_num_threads(1)
    model = build(run.model, run.seed).to("cuda")
    optimizer = make_optimizer(model, run.inner)
    if sys.argv[4:] == ["compile"]:
        for layer in model.layers.values():
            layer.compile()
    data = batches(text, run.data)

    def step() -> float:
        inputs, targets = next(data)
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(inputs)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.inner.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    for _ in range(WARM_STEPS):
        step()
    steps = []
    start, before = time.monotonic(), time.process_time()
    for _ in until(seconds):
        began = time.monotonic()
        step()
        steps.append(time.monotonic() - began)
    tokens = run.data.seq_len * run.data.batch_size
    elapsed, cpu = time.monotonic() - start, time.process_time() - before
    report(steps, elapsed, cpu, tokens)


if __name__ == "__main__":
    main()
