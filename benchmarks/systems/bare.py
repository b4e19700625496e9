"""A torch loop with nothing around it: ``python -m benchmarks.systems.bare SECONDS TEXT``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from benchmarks.systems.island_model import batches, gradients, new_model, report, until
from node.trainer.rank import set_up_arithmetic


def main() -> None:
    """Train for so many seconds."""
    set_up_arithmetic(1)
    seconds, text = float(sys.argv[1]), Path(sys.argv[2])
    model, optimizer = new_model()
    data = batches(text)
    for _ in range(3):
        gradients(model, *next(data))
        optimizer.step()
        optimizer.zero_grad()
    steps = []
    start, before = time.monotonic(), time.process_time()
    for _ in until(seconds):
        began = time.monotonic()
        gradients(model, *next(data))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(time.monotonic() - began)
    report(steps, time.monotonic() - start, time.process_time() - before)


if __name__ == "__main__":
    main()
