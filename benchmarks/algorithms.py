"""Which algorithm costs how many bytes and how much loss: ``python -m benchmarks.algorithms``.

Every row is one run of :mod:`node.simulate` (a mode, a codec, K islands, a seed) on real text, all
with the same number of tokens. Rows are made one at a time and added to the JSON at once, so the
study can be stopped and started again, and run in pieces::

    python -m benchmarks.algorithms --json FILE --seconds 200    # rows until the time is over
    # --no-compile: slower, with other bits; such rows say so
    python -m benchmarks.algorithms --json FILE --docs docs/algorithms.md --plot docs/images/…

Data parallelism, against which all is measured, DiLoCo, NoLoCo and DiLoCo with Muon inside have
learning rates of their own (:mod:`benchmarks.algorithms_rows`). A row whose settings are not the
study's any more is made again; so is one marked ``stale``, with the reason, which is shown until
then, and compared with rows that are stale as well. "bytes" is what an island sends a parameter
over the whole run, of tensors: what announcements, votes and certificates take does not grow with
the model, and would drown in the parameters of one that is worth training.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.algorithms_figures import figures
from benchmarks.algorithms_rows import Row, is_of, wanted
from benchmarks.output import machine
from node.simulate import learner
from node.simulate.scenario import Diverged, Scenario
from node.simulate.world import simulate
from node.trainer import muon


def run_for(
    seconds: float, path: Path, *, part: int = 0, parts: int = 1, compiled: bool = True
) -> None:
    """Add rows until the time is over; the one under way is finished.

    Where several processes share the work, each makes every ``parts``-th row.
    """
    end = time.monotonic() + seconds
    while True:
        rows = read(path)
        mine = itertools.islice(wanted(rows), part, None, parts)
        row = next(
            (one for one in mine if not (one[0] in rows and is_of(rows[one[0]], one[1]))), None
        )
        if row is None:
            return
        key, scenario = row
        same = (row for row in rows.values() if is_of(row, scenario))
        found = next(same, None) or _made(scenario, compiled=compiled)
        with Path(tempfile.gettempdir(), f"atoll-{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rows = read(path) | {key: found}
            whole = path.with_name(f".{path.name}.new")  # others read it, and may be killed
            whole.write_text(_dump(rows), encoding="utf-8")
            whole.replace(path)
        print(f"{key:45} {found.get('loss')} {found.get('bytes_per_parameter')}", flush=True)
        if time.monotonic() > end:
            return


def _made(scenario: Scenario, *, compiled: bool) -> Row:
    row: Row = {"scenario": scenario.model_dump(mode="json")}
    try:
        row = simulate(scenario).to_json()
    except* Diverged as error:  # a result too
        row["failed"] = repr(error.exceptions[0])
    return row | {"machine": machine()} | ({} if compiled else {"compiled": False})


def read(path: Path) -> dict[str, Row]:
    """The rows that are there."""
    if not path.exists():
        return {}
    rows: dict[str, Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _dump(rows: dict[str, Row]) -> str:
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    asked = dict(wanted(rows))  # what has other settings now is to be made again
    kept = {
        key: row
        for key, row in rows.items()
        if "stale" in row or (key in asked and is_of(row, asked[key]))
    }
    keys = json.dumps(figures(kept), indent=1)
    return f'{{"keys": {keys},\n"rows": {{\n{lines}\n}}}}\n'


def main() -> None:
    """Make rows, or what is shown of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="rows are read and added there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="make rows for so long")
    parser.add_argument("--part", default="0/1", help="as in 0/3: the first of three processes")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="faster rows; needs a C++ compiler",
    )
    parser.add_argument("--docs", type=Path, help="write the tables there, make no rows")
    parser.add_argument("--plot", type=Path, help="draw loss against bytes there, make no rows")
    options = parser.parse_args()
    if options.docs or options.plot:
        from benchmarks import algorithms_report as report

        rows = read(options.json)
        if options.plot:
            report.plot(rows, options.plot)
        if options.docs:
            options.docs.write_text(report.document(rows), encoding="utf-8")
        return
    if options.compile:  # 4.2 ms an inner step instead of 5.9; with Muon, elsewhere, 10 for 17
        learner.loss_of = torch.compile(learner.loss_of, dynamic=False)
        muon.orthogonalised = torch.compile(muon.orthogonalised, dynamic=False)
    try:
        part, parts = (int(number) for number in options.part.split("/"))
        run_for(options.seconds, options.json, part=part, parts=parts, compiled=options.compile)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
