"""Which bound consensus control wants: how far islands in pairs are apart, and what more meetings
bring.

    python -m benchmarks.consensus --json benchmarks/results/consensus.json

Every row is one simulated run; rows that the file has already are not run again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.output import write
from node.simulate.scenario import Scenario
from node.simulate.world import simulate

COMMON: dict[str, Any] = {
    "mode": "gossip",
    "codec": "int8",
    "islands": 8,
    "rounds": 24,
    "inner_steps": 20,
    "hidden": 24,
    "batch": 32,
    "eval_every": 10,
}
KINDS: dict[str, dict[str, Any]] = {
    "well": {},
    "average": {"pairs": "average"},
    "rates that fall to nothing": {"schedule": "cosine"},
    "a fifth of the packets lost": {"loss": 0.2},
    "two of eight 4x slower, all with H": {"stragglers": 2, "dynamic_steps": False},
    "30 % replaced in 10 rounds": {"churn": 0.3},
}
BOUNDS = (None, 0.5, 1.0, 2.0, 3.0)  # None: no control


def rows(seeds: int) -> dict[str, dict[str, Any]]:
    """What is to be run, by name."""
    found = {}
    for kind, changes in KINDS.items():
        for bound in BOUNDS:
            control = {} if bound is None else {"control": True, "disagreement": bound}
            for seed in range(seeds):
                name = f"{kind}, {'no control' if bound is None else f'bound {bound:g}'}, {seed}"
                found[name] = COMMON | changes | control | {"seed": seed}
    return found


def measured(settings: dict[str, Any]) -> dict[str, float]:
    """The figures of one run."""
    result = simulate(Scenario.model_validate(settings))
    last, notes = result.points[-1], result.notes
    exchanges = sum(count for name, count in notes.items() if name.startswith("exchanges_"))
    rounds = settings["islands"] * settings["rounds"]
    return {
        "loss": round(result.loss, 4),
        "bytes_per_parameter": round(last.bytes, 1),
        "disagreement_by_progress": round(notes["disagreement_by_progress"], 3),
        "exchanges_a_round": round(exchanges / rounds, 3),
    }


def main() -> None:
    """Run what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=1)
    given = parser.parse_args()
    done = json.loads(given.json.read_text()) if given.json.exists() else {}
    for name, settings in rows(given.seeds).items():
        if name not in done:
            done[name] = measured(settings)
            write(done, given.json)


if __name__ == "__main__":
    main()
