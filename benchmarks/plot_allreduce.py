"""One picture of what :mod:`benchmarks.allreduce` found.

    python -m benchmarks.plot_allreduce benchmarks/results/allreduce.json

The picture is written beside the file. Needs matplotlib (``pip install -e ".[bench]"``).
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from benchmarks.keys import efficiency, shown, stalls

OURS, THEIRS = "#1f77b4", "#b0b0b0"
LOOPBACK = ("fp32", "fp16", "int8", "int4", "torchft")
LINKS = (("link20", 20, "int4"), ("link100", 100, "int4"), ("link500", 500, "fp32"))


def medians(pieces: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, float]:
    """Seconds of each system, over all of these pieces together."""
    times: dict[str, list[float]] = {}
    for piece in wanted:
        for name, runs in pieces.get(piece, {"runs": {}})["runs"].items():
            times.setdefault(name, []).extend(run["seconds"] for run in runs if run["whole"])
    return {name: statistics.median(found) for name, found in times.items() if found}


def bars(axes: Axes, values: dict[str, float], title: str, unit: str) -> None:
    """Horizontal bars with their values; ours stand out."""
    names = list(values)[::-1]
    colours = [OURS if name.startswith("atoll") else THEIRS for name in names]
    drawn = axes.barh(names, [values[name] for name in names], color=colours)
    axes.bar_label(drawn, fmt="%.2f", padding=2, fontsize=8)
    axes.set_title(title, fontsize=10)
    axes.set_xlabel(unit, fontsize=8)
    axes.tick_params(labelsize=8)
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture."""
    pieces = result["runs"]
    figure, grid = plt.subplots(2, 2, figsize=(11, 7))
    size = f"{max(piece['size'] for piece in pieces.values()) / 1e6:.0f} M fp32 elements"
    loopback = dict(sorted(medians(pieces, LOOPBACK).items(), key=lambda item: item[1]))
    bars(grid[0, 0], loopback, f"4 processes, loopback, {size}", "seconds")
    bars(grid[0, 1], medians(pieces, ("link100",)), "the same over 100 Mbit/s", "seconds")
    used = {
        f"atoll {codec} tls, {mbit} Mbit/s": efficiency(piece, mbit, codec)(pieces)
        for piece, mbit, codec in LINKS
        if piece in pieces
    }
    bars(grid[1, 0], used, "share of the link that is used", "least possible time / time")
    dark = pieces.get("dark", {"runs": {}})["runs"]
    waits = {name: statistics.median(stalls(pieces, name)) for name in dark}
    bars(grid[1, 1], waits, "a member's link goes dark: the others wait", "seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})


def main() -> None:
    """Draw, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="what benchmarks.allreduce wrote")
    given = parser.parse_args()
    result = json.loads(given.result.read_text())
    draw(result, given.result.with_suffix(".png"))
    print(shown({name: value for name, value in result.items() if name != "runs"}))


if __name__ == "__main__":
    main()
