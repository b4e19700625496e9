"""One picture of what :mod:`benchmarks.soak` found.

    python -m benchmarks.plot_soak benchmarks/results/soak.json docs/images/soak.png

Rounds and memory of the island that was left alone, and what happened to the others. Needs
matplotlib (``pip install -e ".[bench]"``).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt


def draw(found: dict[str, Any], where: Path) -> None:
    """Write the picture of one result."""
    samples, course = found["samples"], found["course"]
    minutes = [sample["s"] / 60 for sample in samples]
    figure, (rounds, memory, troubles) = plt.subplots(
        3, 1, figsize=(10, 8), sharex=True, height_ratios=(1, 1, 1.4), layout="constrained"
    )
    rounds.plot(minutes, [sample["rounds"] for sample in samples])
    rounds.set_ylabel("rounds committed")
    for kind in ("daemon", "trainer"):
        mib = [sample[kind].get("mib", float("nan")) for sample in samples]
        memory.plot(minutes, mib, label=f"{kind} of the first island")
    memory.set_ylim(bottom=0)
    memory.set_ylabel("private memory, MiB")
    memory.legend(loc="lower right")
    kinds = sorted({trouble["kind"] for trouble in course}, reverse=True)
    for trouble in course:
        begin, end = trouble["began"] / 60, trouble["ended"] / 60
        back = trouble["back_s"] is not None
        colour = "tab:blue" if back else "tab:red"
        troubles.barh(kinds.index(trouble["kind"]), end - begin, left=begin, color=colour)
    troubles.set_yticks(range(len(kinds)), kinds)
    troubles.set_xlabel("minutes; a bar ends when the island has merged again")
    rounds.set_xlim(0, minutes[-1])
    islands, count = found["islands"], len(course)
    figure.suptitle(f"{islands} islands, {found['rounds']} rounds, {count} times one is in trouble")
    figure.savefig(where, dpi=110)


def main() -> None:
    """Draw one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("json", type=Path)
    parser.add_argument("picture", type=Path)
    given = parser.parse_args()
    draw(json.loads(given.json.read_text()), given.picture)


if __name__ == "__main__":
    main()
