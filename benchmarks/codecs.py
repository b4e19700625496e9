"""Speed and error of every codec, on one thread: ``python -m benchmarks.codecs --json FILE``.

Each codec encodes, decodes and accumulates one vector that does not fit into any cache; the
codecs take turns, and the median of the turns counts. Figures are GB of float32 a second, so that
they compare with copying (``copy``) and adding (``add``) the same vector.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.output import write
from protocols.codecs import NAMES, RangeCodec, codec

Job = Callable[[], object]


def jobs(values: torch.Tensor) -> dict[tuple[str, str], Job]:
    """What is measured, by codec and direction."""
    out, accumulator = torch.zeros_like(values), torch.zeros_like(values)
    found: dict[tuple[str, str], Job] = {
        ("baseline", "copy"): lambda: out.copy_(values),
        ("baseline", "add"): lambda: accumulator.add_(values),
    }
    for name in NAMES:
        one = RangeCodec(name, len(values))
        data = torch.empty(one.encoded_size(0, len(values)), dtype=torch.uint8)
        found[name, "encode"] = partial(one.encode, 0, values, data)
        found[name, "decode"] = partial(one.decode, 0, data, out)
        found[name, "decode_add"] = partial(decode_add, one, data, accumulator)
    return found


def decode_add(one: RangeCodec, data: torch.Tensor, accumulator: torch.Tensor) -> None:
    """Add a quarter of what is encoded, chunk by chunk, as an owner does."""
    for chunk in one.chunks(0, len(accumulator)):
        piece = data[chunk.span]
        one.decode_add_chunk(chunk, piece, 0.25, accumulator[chunk.start : chunk.stop])


def relative_error(name: str, values: torch.Tensor) -> float:
    """‖decoded − values‖ / ‖values‖."""
    one, out = RangeCodec(name, len(values)), torch.empty_like(values)
    data = torch.empty(one.encoded_size(0, len(values)), dtype=torch.uint8)
    one.encode(0, values, data)
    one.decode(0, data, out)
    return float((out.sub_(values).norm() / values.norm()).item())


def measure(elements: int, turns: int) -> dict[str, Any]:
    """Run everything; the result is what ``--json`` writes."""
    torch.set_num_threads(1)
    values = torch.randn(elements, generator=torch.Generator().manual_seed(0)) * 1e-3
    todo = jobs(values)
    for job in todo.values():
        job()
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in todo}
    for _ in range(turns):
        for key, job in todo.items():
            started = time.perf_counter()
            job()
            seconds[key].append(time.perf_counter() - started)
    rates = {key: 4 * elements / statistics.median(taken) / 1e9 for key, taken in seconds.items()}
    sample = values[: 2**20]
    return {
        "elements": elements,
        "turns": turns,
        "threads": 1,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "processor": platform.processor() or platform.machine(),
        "unit": "GB of float32 a second",
        "baseline": {what: round(rates["baseline", what], 2) for what in ("copy", "add")},
        "codecs": {
            name: {
                "bits": round(codec(name).bits, 4),
                "relative_error": round(relative_error(name, sample), 5),
                **{
                    what: round(rates[name, what], 2) for what in ("encode", "decode", "decode_add")
                },
            }
            for name in NAMES
        },
    }


def plot(result: dict[str, Any], path: Path) -> None:
    """Bars by codec, with copying as the line to reach."""
    from matplotlib.figure import Figure  # pip install atoll[bench]

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    names = list(result["codecs"])
    for at, what in enumerate(("encode", "decode", "decode_add")):
        places = [index + (at - 1) * 0.27 for index in range(len(names))]
        axes.bar(places, [result["codecs"][name][what] for name in names], 0.25, label=what)
    axes.axhline(result["baseline"]["copy"], color="grey", linewidth=1, label="copy")
    labels = [f"{name}\n{result['codecs'][name]['bits']:.3g} bits" for name in names]
    axes.set_xticks(range(len(names)), labels)
    axes.set_ylabel("GB of float32 a second, one thread")
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, print a table, write what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plot", type=Path, help="write a picture there (PNG)")
    parser.add_argument("--quick", action="store_true", help="a smaller vector, fewer turns")
    options = parser.parse_args()
    result = measure(*((2**22, 3) if options.quick else (25_000_000, 7)))
    print(f"copy {result['baseline']['copy']:.1f} GB/s, add {result['baseline']['add']:.1f} GB/s")
    for name, row in result["codecs"].items():
        print(f"{name:6}", "  ".join(f"{key} {value:8.3f}" for key, value in row.items()))
    if options.json:
        write(result, options.json)
    if options.plot:
        plot(result, options.plot)


if __name__ == "__main__":
    main()
