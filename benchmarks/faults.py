"""The fault matrix as a table: what each cell of ``make test-faults`` has measured.

    make test-faults

runs all cells and then ``python -m benchmarks.faults build/faults.xml --json FILE``, which shows
the table and writes every cell, if all of them were run. Of a cell that is in several files the
newest counts; all of them are counted as tries.

Stalls are seconds from the fault until all survivors had committed the round; bounds are what the
engine's own deadlines allow there, from what that run has measured, and what these may be at most
on such links, whatever was measured. Elements are what survivors sent each other more than once:
needless where it, or the sum it was for, was there already, broken where the transfer before had
broken off. The share is of the work of the survivor of whom the least was merged, in the round or,
where it came late, the next it was in; the outcome is whether the round merged anything or was
certified to merge nothing. Digests are equal where all who have applied a round, the victim as well
where it comes back, have the same outcome and state.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.output import write

CELL = re.compile(r"test_survivors_agree_and_go_on\[(\w+)-([\w ]+)-([\w ]+)\]")
CELLS = 84


@dataclass
class Cell:
    """One cell, as its newest run was."""

    role: str
    stage: str
    fault: str
    passed: bool
    tries: int
    failures: int
    digests_equal: bool | None = None
    stall_s: float | None = None
    bound_s: float | None = None
    patience_s: float | None = None
    most_patience_s: float | None = None
    needless_elements: int | None = None
    broken_elements: int | None = None
    least_share: float | None = None
    outcome: str | None = None


def read(paths: list[Path]) -> list[Cell]:
    """All cells in junit files, in the order of role, stage and fault as tested."""
    cells: dict[tuple[str, str, str], Cell] = {}
    for path in sorted(paths, key=lambda path: path.stat().st_mtime):
        for case in ElementTree.parse(path).iter("testcase"):
            found = CELL.fullmatch(case.get("name", ""))
            if found is None or case.find("skipped") is not None:
                continue
            key = (found[1], found[2], found[3])
            before = cells.get(key)
            passed = case.find("failure") is None and case.find("error") is None
            told = {p.get("name"): p.get("value", "") for p in case.iter("property")}
            cell = Cell(
                *key,
                passed,
                1 + (before.tries if before else 0),
                (not passed) + (before.failures if before else 0),
            )
            if "digests_equal" in told:
                cell.digests_equal = told["digests_equal"] == "True"
            if "stall_s" in told:
                cell.stall_s, cell.bound_s = float(told["stall_s"]), float(told["bound_s"])
            if "patience_s" in told:
                cell.patience_s = float(told["patience_s"])
                cell.most_patience_s = float(told["most_patience_s"])
            if "needless" in told:
                cell.needless_elements = int(told["needless"])
                cell.broken_elements = int(told["broken"])
            if "least_share" in told:
                cell.least_share, cell.outcome = float(told["least_share"]), told["outcome"]
            cells[key] = cell
    return list(cells.values())


def table(cells: list[Cell]) -> str:
    """By fault: how many passed, and how long survivors were held up."""
    lines = [
        "| fault | passed | digests equal | stall, median (s) | most (s) | most of its bound | "
        "most sent again | least merged | committed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for fault in dict.fromkeys(cell.fault for cell in cells):
        of = [cell for cell in cells if cell.fault == fault]
        equal = sum(bool(c.digests_equal) for c in of)
        stalls = [c.stall_s for c in of if c.stall_s is not None] or [math.nan]
        shares = [c.stall_s / c.bound_s for c in of if c.stall_s is not None and c.bound_s]
        again = [(c.needless_elements or 0) + (c.broken_elements or 0) for c in of]
        least = min((c.least_share for c in of if c.least_share is not None), default=math.nan)
        committed = sum(c.outcome == "committed" for c in of)
        lines.append(
            f"| {fault} | {sum(c.passed for c in of)} of {len(of)} | {equal} of {len(of)} | "
            f"{statistics.median(stalls):.2f} | {max(stalls):.2f} | "
            f"{max(shares, default=math.nan):.0%} | "
            f"{max(again) / 1000:.0f} K elements | {least:.0%} | {committed} of {len(of)} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read junit files, show the table, write the cells."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("junit", nargs="+", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    cells = read(given.junit)
    passed = sum(cell.passed for cell in cells)
    print(f"{passed} of {CELLS} cells passed, {sum(c.failures for c in cells)} failed tries\n")
    print(table(cells))
    if given.json and len(cells) < CELLS:
        print(f"\n{given.json} stays as it is: only {len(cells)} cells were run")
    elif given.json:
        found = {"cells": CELLS, "passed": passed, "runs": [asdict(cell) for cell in cells]}
        write(found, given.json)


if __name__ == "__main__":
    main()
