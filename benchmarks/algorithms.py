"""Which algorithm costs how many bytes and how much loss: ``python -m benchmarks.algorithms``.

Every row is one run of :mod:`node.simulate` (a mode, a codec, K islands, a seed) on real text, all
with the same number of tokens. Rows are made one at a time and added to the JSON at once, so the
study can be stopped and started again, and run in pieces::

    python -m benchmarks.algorithms --json FILE --seconds 200    # rows until the time is over
    python -m benchmarks.algorithms --json FILE --docs docs/algorithms.md --plot docs/images/…

Data parallelism, against which all is measured, DiLoCo, NoLoCo and DiLoCo with Muon inside have
learning rates of their own (``FAMILIES``). A row whose settings are not the study's any more is
made again; so is one marked ``stale``, with the reason, which is shown until then, and compared
with rows that are stale as well. "bytes" is what an island sends a parameter over the whole run,
of tensors: what announcements, votes and certificates take does not grow with the model, and would
drown in the parameters of one that is worth training.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from node.simulate import learner
from node.simulate.scenario import Scenario
from node.simulate.world import simulate
from node.trainer import muon

ROUNDS, INNER_STEPS = 180, 20
SHORT = 60  # rounds of the tables with more islands, and of the rows with a straggler
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5)  # of the rows that a target hangs on (DECISIVE)
ALL_SEEDS = SEEDS + MORE_SEEDS
MODEL: dict[str, Any] = {"model": "llama", "hidden": 48, "layers": 2, "context": 48, "batch": 8}
# all start from what one island learnt before, as in DiLoCo (2311.08105) section 3; not counted
TRAINING: dict[str, Any] = {"schedule": "cosine", "eval_every": 30, "start_steps": 200}
WITHIN = (1.0, 3.0)  # percent of the baseline's loss

DP: dict[str, Any] = {"mode": "allreduce", "codec": "fp32"}
# with η 0.7, μ 0.9 (of runs with larger H and models) DiLoCo loses 1.4 % more, with 1.0, 0.8 0.5 %
NESTEROV = {"outer_lr": 1.0, "outer_momentum": 0.6}
# η is β there, μ is α; with the paper's 0.7 and 0.5 a run of 60 rounds loses 1.1 % more
NOLOCO: dict[str, Any] = {"mode": "gossip", "outer_lr": 0.9, "outer_momentum": 0.6}
PLAIN: dict[str, Any] = {"mode": "diloco", "codec": "int4"}
DILOCO: dict[str, Any] = PLAIN | NESTEROV
MUON: dict[str, Any] = DILOCO | {"inner": "muon", "outer_momentum": 0.4}
PAIRS: dict[str, Any] = NOLOCO | {"codec": "int8"}
SPARSE: dict[str, Any] = PLAIN | {"outer": "sparseloco", "feedback": 0.95}
# inner learning rates are tuned for these four, 4 islands and the first seed; the best one is
# taken by all rows of the family
FAMILIES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "gradients": (DP, (8e-3, 1.2e-2, 1.6e-2, 2.4e-2, 3.2e-2, 4.8e-2)),
    "AdamW": (DILOCO, (4e-3, 8e-3, 1.2e-2, 1.6e-2)),
    "NoLoCo": (PAIRS, (8e-3, 1.2e-2, 1.6e-2, 2.4e-2)),
    "Muon": (MUON, (8e-3, 1.6e-2, 2.4e-2, 3.2e-2)),
}


def every(inner_steps: int, of: int = ROUNDS) -> dict[str, Any]:
    """What another H means where the tokens stay those of so many rounds."""
    rounds = of * INNER_STEPS // inner_steps
    return {"inner_steps": inner_steps, "rounds": rounds, "warmup_rounds": min(10, rounds // 4)}


# by the name in the table: what differs from the defaults
MAIN: dict[str, dict[str, Any]] = {
    "data parallel, fp32": DP,
    "DiLoCo, int4": DILOCO,
    "NoLoCo pairs, int8": PAIRS,
    "Muon inside, int4": MUON,
    "DiLoCo, H 40, int2": DILOCO | every(40) | {"codec": "int2"},
    "DiLoCo, H 150, int2": DILOCO | every(150) | {"codec": "int2"},
    "DiLoCo, H 80, int4": DILOCO | every(80),
    # as many bytes as DiLoCo with int4 and H 20, the nearest way of spending them
    "NoLoCo pairs, H 25, int8": PAIRS | every(25),
    "Muon inside, H 40, int2": MUON | every(40) | {"codec": "int2"},
    "Muon inside, H 80, int4": MUON | every(80),
    "Muon inside, H 150, int2": MUON | every(150) | {"codec": "int2"},
    "DiLoCo, H 180, int2": DILOCO | every(180) | {"codec": "int2"},
    "DiLoCo, H 120, int1": DILOCO | every(120) | {"codec": "int1"},
    "DiLoCo, int8": DILOCO | {"codec": "int8"},
    "asynchronous, int4": NESTEROV | {"mode": "async", "codec": "int4"},
    "streaming, int4": NESTEROV
    | {"mode": "streaming", "codec": "int4", "fragments": 2, "delay": 2},
    "SparseLoCo, top12": SPARSE | {"codec": "top12"},
    "NoLoCo pairs of the paper, int8": {"mode": "gossip", "codec": "int8"},
    "SparseLoCo, Muon inside, top3": SPARSE | {"codec": "top3", "inner": "muon"},
    "branch-train-merge": {"mode": "btm", "codec": "fp32"},
    "DiLoCo, int2": DILOCO | {"codec": "int2"},
    "DiLoCo, int1": DILOCO | {"codec": "int1"},
    "DiLoCo, H 60, int2": DILOCO | every(60) | {"codec": "int2"},
    "SparseLoCo, top3": SPARSE | {"codec": "top3"},
    "DiLoCo, fp32": DILOCO | {"codec": "fp32"},
    "plain pairs, bf16": {"mode": "gossip", "pairs": "average", "codec": "bf16"},
    "NoLoCo pairs, bf16": PAIRS | {"codec": "bf16"},
    "push-sum, bf16": {"mode": "push-sum", "codec": "bf16"},
    "FedAvg, half of the clients, int4": {
        "mode": "fedavg",
        "codec": "int4",
        "outer": "sgd",
        "sample": 0.5,
    },
    "outer SGD, int4": PLAIN | {"outer": "sgd"},
    "FedAvgM, int4": PLAIN | {"outer": "heavyball", "outer_momentum": 0.5},
    "FedAdam, int4": PLAIN | {"outer": "adam"},
    "FedYogi, int4": PLAIN | {"outer": "yogi"},
    "eager, int4": NESTEROV | {"mode": "eager", "codec": "int4"},
    "server, lock-step, int4": NESTEROV | {"mode": "server", "bound": 0, "codec": "int4"},
    "SPARTA, 0.5 %, bf16": {"mode": "sparta", "codec": "bf16"},
    "data parallel, PowerSGD": {"mode": "powersgd", "codec": "bf16"},
    "data parallel, 1-bit Adam": {"mode": "onebit-adam"},
}
# targets lie within 1 % of data parallelism, whose seeds alone are further apart
DECISIVE = (
    "data parallel, fp32",
    "DiLoCo, int4",
    "NoLoCo pairs, H 25, int8",
    "Muon inside, int4",
    "Muon inside, H 40, int2",
    "Muon inside, H 150, int2",
)
STRAGGLER = {"stragglers": 1, "straggler_factor": 4.0, "rounds": SHORT, "eval_every": 2}
# what the keys beside the table come from: K, what differs
SPECIAL: dict[str, tuple[int, dict[str, Any]]] = {
    "straggler, waited for": (
        4,
        DILOCO | STRAGGLER | {"dynamic_steps": False, "quorum": 1.0},
    ),
    "straggler, fewer steps": (4, DILOCO | STRAGGLER),
    "straggler, asynchronous": (4, NESTEROV | {"mode": "async"} | STRAGGLER),
    "8 islands": (8, DILOCO),
    "6 islands": (6, DILOCO),
    "8 islands, 2 attack, open trust": (8, DILOCO | {"attackers": 2, "rule": "open"}),
    "8 islands, 2 attack, mean": (8, DILOCO | {"attackers": 2, "rule": "mean"}),
    "8 islands, 30 % replaced": (8, DILOCO | {"churn": 0.3}),
}

BASE = "data parallel, fp32"
# keys that are percents of loss: which row, of how many islands, over which (of how many)
COMPARED: dict[str, tuple[str, str, int, int]] = {
    "gossip_vs_diloco_loss": ("NoLoCo pairs, H 25, int8", "DiLoCo, int4", 4, 4),
    # two thirds of the bytes
    "gossip_vs_diloco_same_codec_loss": ("NoLoCo pairs, int8", "DiLoCo, int8", 4, 4),
    "muon_vs_dp_loss": ("Muon inside, int4", BASE, 4, 4),
    "churn_loss_pct": ("8 islands, 30 % replaced", "8 islands", 8, 8),
    "byzantine_loss_pct": ("8 islands, 2 attack, open trust", "8 islands", 8, 8),
    "byzantine_loss_over_the_honest_alone_pct": (
        "8 islands, 2 attack, open trust",
        "6 islands",
        8,
        6,
    ),
    "byzantine_mean_loss_pct": ("8 islands, 2 attack, mean", "8 islands", 8, 8),
}

Row = dict[str, Any]


def wanted(rows: dict[str, Row]) -> Iterator[tuple[str, Scenario]]:
    """Rows that are not there yet, the most telling first."""
    for family in FAMILIES:
        yield from _tunings(family)
    first = list(MAIN)
    for count, seeds, names in (
        (4, SEEDS, first[:11]),
        (0, SEEDS[:1], list(SPECIAL)),
        (4, SEEDS[:1], first[11:]),
        (8, SEEDS[:1], first[:5]),
        (16, SEEDS[:1], first[:3]),
        (4, MORE_SEEDS, list(DECISIVE)),
        (0, SEEDS[1:], list(SPECIAL)),
        (4, SEEDS[1:], first[11:18]),
        (8, SEEDS[1:], first[:5]),
        (16, SEEDS[1:], first[:3]),
        (4, SEEDS[1:], first[18:]),
    ):
        for seed in seeds:
            for name in names:
                k, changes = SPECIAL[name] if name in SPECIAL else (count, _main(name, count))
                rate = best_rate(rows, family_of(changes))
                if rate is not None:
                    yield f"{name}/{k}/{seed}", _scenario(k, seed, {"inner_lr": rate} | changes)


def _main(name: str, islands: int) -> dict[str, Any]:
    """What a row of the tables differs by: shorter with more than 4 islands, at the same H."""
    changes = MAIN[name]
    if islands == 4:
        return changes
    return changes | every(changes.get("inner_steps", INNER_STEPS), SHORT)


def family_of(changes: dict[str, Any]) -> str:
    """Whose learning rate a row has."""
    if changes.get("inner") == "muon":
        return "Muon"
    if changes["mode"] == "gossip" and changes.get("pairs") != "average":
        return "NoLoCo"
    each_step = changes["mode"] in ("allreduce", "powersgd", "onebit-adam")
    return "gradients" if each_step else "AdamW"


def best_rate(rows: dict[str, Row], family: str) -> float | None:
    """The family's learning rate; None while it is being tuned."""
    known: dict[float, float] = {}
    for lr, (key, scenario) in zip(FAMILIES[family][1], _tunings(family), strict=True):
        row = rows.get(key)
        if row is None or not is_of(row, scenario):
            return None
        known[lr] = row.get("loss", math.inf)
    return min(known, key=known.__getitem__)


def _tunings(family: str) -> Iterator[tuple[str, Scenario]]:
    changes, rates = FAMILIES[family]
    for lr in rates:
        yield f"tune {family} {lr:g}/4/0", _scenario(4, 0, changes | {"inner_lr": lr})


def _scenario(islands: int, seed: int, changes: dict[str, Any]) -> Scenario:
    plain = {"islands": islands, "seed": seed, "rounds": ROUNDS, "inner_steps": INNER_STEPS}
    return Scenario.model_validate(plain | MODEL | TRAINING | changes)


def run_for(seconds: float, path: Path, *, part: int = 0, parts: int = 1) -> None:
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
        try:
            found = next(same, None) or simulate(scenario).to_json()
        except ExceptionGroup as error:  # a mode that diverges is a result
            why = repr(error.exceptions[0])[:300]
            found = {"scenario": scenario.model_dump(mode="json"), "failed": why}
        with Path(tempfile.gettempdir(), f"atoll-{path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            rows = read(path) | {key: found}
            path.write_text(_dump(rows), encoding="utf-8")
        print(f"{key:45} {found.get('loss')} {found.get('bytes_per_parameter')}", flush=True)
        if time.monotonic() > end:
            return


def is_of(row: Row, scenario: Scenario) -> bool:
    """Whether a row was made with these settings, and stands."""
    return "stale" not in row and Scenario.model_validate(row["scenario"]) == scenario


def read(path: Path) -> dict[str, Row]:
    """The rows that are there."""
    if not path.exists():
        return {}
    rows: dict[str, Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _dump(rows: dict[str, Row]) -> str:
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
    keys = json.dumps(figures(rows), indent=1)
    return f'{{"keys": {keys},\n"rows": {{\n{lines}\n}}}}\n'


# --- figures -----------------------------------------------------------------------------------


def mean_of(rows: dict[str, Row], name: str, islands: int, what: str = "loss") -> float | None:
    """Over the seeds that are there."""
    found = [
        row[what]
        for seed in ALL_SEEDS
        if (row := rows.get(f"{name}/{islands}/{seed}")) is not None and what in row
    ]
    return statistics.mean(found) if found else None


def percents_over(
    rows: dict[str, Row], name: str, base: str, islands: int, of: int | None = None
) -> list[float]:
    """How much more loss, in percent, by each of the seeds that both have.

    ``of`` is how many islands ``base`` has, where that is another number.
    """
    of = of or islands
    both = (
        (rows.get(f"{name}/{islands}/{seed}", {}), rows.get(f"{base}/{of}/{seed}", {}))
        for seed in ALL_SEEDS
    )
    return [
        100 * (a["loss"] / b["loss"] - 1)
        for a, b in both
        if "loss" in a and "loss" in b and a.get("stale") == b.get("stale")
    ]


def percent_over(rows: dict[str, Row], name: str, base: str, islands: int) -> float | None:
    """The mean of :func:`percents_over`."""
    found = percents_over(rows, name, base, islands)
    return statistics.mean(found) if found else None


def seconds_to(rows: dict[str, Row], name: str, loss: float) -> float | None:
    """Virtual time until the validation loss was first that low (4 islands, first seed)."""
    curve = rows.get(f"{name}/4/0", {}).get("curve", [])
    return next((point[0] for point in curve if point[3] <= loss), None)


def target_loss(rows: dict[str, Row]) -> float | None:
    """Until when runs with a slow island are timed: near what waiting for it ends with."""
    waited = rows.get("straggler, waited for/4/0", {}).get("curve")
    return (1 + WITHIN[1] / 100) * waited[-1][3] if waited else None


def cheapest(rows: dict[str, Row], percent: float) -> tuple[float, str] | None:
    """How many times fewer bytes suffice for at most ``percent`` more loss, and by which row."""
    baseline = mean_of(rows, BASE, 4, "bytes_per_parameter")
    found = [
        (baseline / sent, name)
        for name in MAIN
        if name != BASE
        and (over := percent_over(rows, name, BASE, 4)) is not None
        and over <= percent
        and (sent := mean_of(rows, name, 4, "bytes_per_parameter")) is not None
        and baseline is not None
    ]
    return max(found, default=None)


def straggler_speedup(rows: dict[str, Row]) -> float | None:
    """How much sooner the target loss is reached by who does not wait for a slow island."""
    target = target_loss(rows)
    if target is None:
        return None
    slow = seconds_to(rows, "straggler, waited for", target)
    quick = [
        seconds
        for name in ("straggler, fewer steps", "straggler, asynchronous")
        if (seconds := seconds_to(rows, name, target))
    ]
    return slow / min(quick) if slow and quick else None


def figures(rows: dict[str, Row]) -> dict[str, float | None]:
    """The keys of the study; None where rows are missing."""
    found: dict[str, float | None] = {}
    for percent in WITHIN:
        best = cheapest(rows, percent)
        found[f"bytes_ratio_at_{percent:g}pct"] = best[0] if best else None
    for key, compared in COMPARED.items():
        percents = percents_over(rows, *compared)
        found[key] = statistics.mean(percents) if percents else None
    found["straggler_speedup"] = straggler_speedup(rows)
    return {key: None if value is None else round(value, 3) for key, value in found.items()}


def main() -> None:
    """Make rows, or what is shown of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, required=True, help="rows are read and added there")
    parser.add_argument("--seconds", type=float, default=math.inf, help="make rows for so long")
    parser.add_argument("--part", default="0/1", help="as in 0/3: the first of three processes")
    parser.add_argument("--compile", action="store_true", help="faster rows; needs a C++ compiler")
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
        run_for(options.seconds, options.json, part=part, parts=parts)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
