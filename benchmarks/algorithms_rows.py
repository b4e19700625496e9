"""Which rows the study of ``benchmarks.algorithms`` has, and with which settings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from node.simulate.scenario import Scenario

ROUNDS, INNER_STEPS = 180, 20
SHORT = 60  # rounds of the tables with more islands, and of the rows with a straggler
SEEDS = (0, 1, 2)
MORE_SEEDS = (3, 4, 5)  # of the rows that a target hangs on (DECISIVE)
ALL_SEEDS = SEEDS + MORE_SEEDS
MODEL: dict[str, Any] = {"model": "llama", "hidden": 48, "layers": 2, "context": 48, "batch": 8}
# all start from a model trained on one island, as in DiLoCo (2311.08105) section 3; not counted
TRAINING: dict[str, Any] = {"schedule": "cosine", "eval_every": 30, "start_steps": 200}

DP: dict[str, Any] = {"mode": "allreduce", "codec": "fp32"}
# a run's defaults are η 0.7 and μ 0.9, as in DiLoCo's paper, for larger H and models: a row of its
# own shows what these lose here
NESTEROV = {"outer_lr": 1.0, "outer_momentum": 0.6}
# η is the paper's β, μ its α; the defaults are its 0.7 and 0.5, which have a row of their own
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
    "Muon": (MUON, (8e-3, 1.2e-2, 1.6e-2, 2e-2, 2.4e-2, 3.2e-2)),
}


def every(inner_steps: int, of: int = ROUNDS) -> dict[str, Any]:
    """Settings for another H with the same number of tokens, those of ``of`` rounds."""
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
    "Muon inside, H 10, int4": MUON | every(10),
    "DiLoCo, H 180, int2": DILOCO | every(180) | {"codec": "int2"},
    "DiLoCo, H 120, int1": DILOCO | every(120) | {"codec": "int1"},
    "DiLoCo, int8": DILOCO | {"codec": "int8"},
    "asynchronous, int4": NESTEROV | {"mode": "async", "codec": "int4"},
    "streaming, int4": NESTEROV
    | {"mode": "streaming", "codec": "int4", "fragments": 2, "delay": 2},
    "SparseLoCo, top12": SPARSE | {"codec": "top12"},
    "NoLoCo pairs of the paper, int8": {"mode": "gossip", "codec": "int8"},
    "DiLoCo of the paper, int4": PLAIN,
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
    "Muon inside, H 5, int4": MUON | every(5),
}
# targets lie within 1 % of data parallelism, whose seeds alone are further apart
DECISIVE = (
    "data parallel, fp32",
    "DiLoCo, int4",
    "NoLoCo pairs, H 25, int8",
    "Muon inside, int4",
    "Muon inside, H 10, int4",
    "Muon inside, H 5, int4",
    "Muon inside, H 40, int2",
    "Muon inside, H 150, int2",
)
# one row of each mode and family of codecs: those of the tables with more islands
EACH_MODE = (
    "streaming, int4",
    "asynchronous, int4",
    "SparseLoCo, top3",
    "eager, int4",
    "server, lock-step, int4",
    "FedAvg, half of the clients, int4",
    "FedAvgM, int4",
    "plain pairs, bf16",
    "push-sum, bf16",
    "SPARTA, 0.5 %, bf16",
    "branch-train-merge",
    "DiLoCo, int8",
    "DiLoCo, int1",
    "data parallel, 1-bit Adam",
    "data parallel, PowerSGD",
)
STRAGGLER = {"stragglers": 1, "straggler_factor": 4.0, "rounds": SHORT, "eval_every": 2}
# rows for the keys beside the table: K, what differs
SPECIAL: dict[str, tuple[int, dict[str, Any]]] = {
    "straggler, waited for": (
        4,
        DILOCO | STRAGGLER | {"dynamic_steps": False, "quorum": 1.0},
    ),
    "straggler, fewer steps": (4, DILOCO | STRAGGLER),
    "straggler, asynchronous": (4, NESTEROV | {"mode": "async"} | STRAGGLER),
    "8 islands": (8, DILOCO),
    "6 islands": (6, DILOCO | {"start_islands": 8}),  # the six honest of eight, alone
    "8 islands, 2 attack, open trust": (8, DILOCO | {"attackers": 2, "rule": "open"}),
    "8 islands, 2 attack, mean": (8, DILOCO | {"attackers": 2, "rule": "mean"}),
    "8 islands, 30 % replaced": (8, DILOCO | {"churn": 0.3}),
    # attackers contribute no data: here the other six train on as much as eight do elsewhere
    "8 islands, 2 attack, open trust, as many tokens": (
        8,
        DILOCO | {"attackers": 2, "rule": "open", "rounds": ROUNDS * 8 // 6},
    ),
}

BASE = "data parallel, fp32"

Row = dict[str, Any]


def wanted(rows: dict[str, Row]) -> Iterator[tuple[str, Scenario]]:
    """Rows that are not there yet, the most telling first."""
    for family in FAMILIES:
        yield from _tunings(family)
    first = list(MAIN)
    for count, seeds, names in (
        (4, SEEDS, first[:12]),
        (0, SEEDS[:1], list(SPECIAL)),
        (4, SEEDS[:1], first[12:]),
        (8, SEEDS[:1], first[:5]),
        (16, SEEDS[:1], first[:3]),
        (4, MORE_SEEDS, list(DECISIVE)),
        (0, SEEDS[1:], list(SPECIAL)),
        (4, SEEDS[1:], first[12:20]),
        (8, SEEDS[1:], first[:5]),
        (16, SEEDS[1:], first[:3]),
        (4, SEEDS[1:], first[20:]),
        (8, SEEDS[:1], list(EACH_MODE)),
        (16, SEEDS[:1], first[3:5]),
        (16, SEEDS[:1], list(EACH_MODE)),
        (8, SEEDS[1:], list(EACH_MODE)),
        (16, SEEDS[1:], first[3:5]),
        (16, SEEDS[1:], list(EACH_MODE)),
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
    """The family whose learning rate a row has."""
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


def is_of(row: Row, scenario: Scenario) -> bool:
    """Whether a row was made with these settings, and stands."""
    return "stale" not in row and Scenario.model_validate(row["scenario"]) == scenario
