"""What ``benchmarks.algorithms`` shows of its rows: docs/algorithms.md and the plot."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

from benchmarks.algorithms_figures import (
    COMPARED,
    NOT_WAITING,
    WAITING,
    WITHIN,
    cheapest,
    figures,
    mean_bytes,
    mean_loss,
    percent_over,
    percents_over,
    seconds_to,
    straggler_speedups,
    target_loss,
)
from benchmarks.algorithms_rows import (
    ALL_SEEDS,
    BASE,
    FAMILIES,
    INNER_STEPS,
    MAIN,
    MODEL,
    MUON,
    NESTEROV,
    NOLOCO,
    ROUNDS,
    SEEDS,
    SHORT,
    SPECIAL,
    TRAINING,
    Row,
    best_rate,
)
from node.simulate.learner import initial
from node.simulate.scenario import Scenario

COUNTS = (4, 8, 16)  # islands of the tables
SHOWN = 1.08  # losses in the plot, up to this many times the lowest

HEAD = """# Which algorithm for which network

Made from [benchmarks/results/algorithms.json](../benchmarks/results/algorithms.json) by
`python -m benchmarks.algorithms --json … --docs docs/algorithms.md`; change that command's source,
not this page.{picture}

## What was measured

Each row is one run of `node simulate`: the model of `node start` with {layers} layers and
{parameters:,} parameters, over bytes, trained on the Python sources of the standard library, each
island on files of its own, {rounds} x {steps} inner steps an island of {batch} sequences of
{context} bytes each, with a cosine schedule, after {start} steps of as much text that one
island took before and that all rows have in common; all rows of a table see the same number of
tokens. The tables of 8 and 16 islands stand for {short} x {steps} inner steps an island.
"bytes a parameter" is what an island sends of tensors over the whole run, and its share of what a
server sends, where there is one, as counted on the simulated network; control messages do not grow
with the model (their bytes are in the JSON).
"loss" is in nats a byte on files that nobody trains on; for pairs and push-sum it is the mean over
islands, for SPARTA and branch-train-merge that of the mean of their parameters. Data parallelism
takes AdamW's steps; islands do too, but for those with "Muon inside", of which a part of what they
gain is Muon's and not the rounds'. Inner learning rates were tuned at K = 4 with the first seed:
{rates}. **Outer rates were tuned too, for DiLoCo and NoLoCo alone**, and are not a run's defaults:
DiLoCo's rate is {eta:g} and its momentum {mu:g} (with Muon inside {muon_mu:g}), those of NoLoCo
{beta:g} and {alpha:g}. Rows "of the paper" have what `node start` takes where a manifest says
nothing; all other modes, outer optimizers and codecs have their defaults, and might gain as much
by tuning as DiLoCo did.

Rows that a target hangs on have {more} seeds, the others up to {seeds}; "against it" is over the
seeds that both have. The model is small and the runs are short: differences below the spread
between seeds say nothing, and what holds for large models is what the papers say that the rules'
docstrings name.

{missing}
"""

CHOICE = Path(__file__).with_name("algorithms_choice.md")


def document(rows: dict[str, Row]) -> str:
    """docs/algorithms.md."""
    parameters = len(initial(Scenario.model_validate(MODEL)))
    compared = any(_seeds(rows, name, 4) for name in MAIN)
    head = HEAD.format(
        picture=" ![Loss against bytes](images/algorithms.png)" if compared else "",
        parameters=parameters,
        rounds=ROUNDS,
        short=SHORT,
        steps=INNER_STEPS,
        batch=MODEL["batch"],
        context=MODEL["context"],
        layers=MODEL["layers"],
        start=TRAINING["start_steps"],
        seeds=len(SEEDS),
        more=len(ALL_SEEDS),
        rates=_rates(rows),
        eta=NESTEROV["outer_lr"],
        mu=NESTEROV["outer_momentum"],
        muon_mu=MUON["outer_momentum"],
        beta=NOLOCO["outer_lr"],
        alpha=NOLOCO["outer_momentum"],
        missing=_missing(rows),
    )
    tables = "\n".join(_table(rows, count) for count in COUNTS)
    return f"{head}\n{_keys(rows)}\n{tables}\n{_special(rows)}\n{_stale(rows)}\n{_choice(rows)}"


def _choice(rows: dict[str, Row]) -> str:
    """Which mode to take: ``{NAME}`` is how much more a row loses, ``{NAME @ K}`` with K islands.

    Where NAME is a key of the study, it is that figure.
    """
    keys = figures(rows)

    def shown(found: re.Match[str]) -> str:
        name, _, islands = found[1].partition(" @ ")
        if name not in keys and name not in MAIN:
            raise ValueError(f"{CHOICE.name} names {name!r}, which is no row and no figure")
        value = keys[name] if name in keys else percent_over(rows, name, BASE, int(islands or 4))
        if value is None:
            return "(not measured)"
        return f"{value:.1f} times" if name.endswith("speedup") else f"{value:+,.1f} %"

    return re.sub(r"\{(.+?)\}", shown, CHOICE.read_text(encoding="utf-8"))


def _rates(rows: dict[str, Row]) -> str:
    found = [
        f"{rate:g} ({family}; of {', '.join(f'{one:g}' for one in rates)})"
        for family, (_, rates) in FAMILIES.items()
        if (rate := best_rate(rows, family)) is not None
    ]
    return ", ".join(found) or "not yet"


def _seeds(rows: dict[str, Row], name: str, islands: int) -> int:
    return sum("loss" in rows.get(f"{name}/{islands}/{seed}", {}) for seed in ALL_SEEDS)


def _marked(rows: dict[str, Row], name: str, islands: int) -> str:
    """The name of a row, with a dagger where it is to be made again."""
    found = (rows.get(f"{name}/{islands}/{seed}", {}) for seed in ALL_SEEDS)
    return f"{name} †" if any("stale" in row for row in found) else name


def _stale(rows: dict[str, Row]) -> str:
    """Why there are daggers, if there are."""
    why = sorted({row["stale"] for row in rows.values() if "stale" in row})
    return f"†: to be made again, since {'; '.join(why)}.\n" if why else ""


def _missing(rows: dict[str, Row]) -> str:
    seeds = [_seeds(rows, name, count) for count in COUNTS for name in MAIN]
    few = sum(0 < found < len(SEEDS) for found in seeds)
    text = f"All rows of the tables have {len(SEEDS)} seeds or more."
    if few:
        text = f"Of the tables' rows {few} have fewer than {len(SEEDS)} seeds so far."
    absent = [name for name in MAIN if not _seeds(rows, name, 4)]
    absent += [name for name, (count, _) in SPECIAL.items() if not _seeds(rows, name, count)]
    if absent:
        text += " **Not measured yet:** " + "; ".join(absent) + "."
    for count in COUNTS[1:]:
        if not any(_seeds(rows, name, count) for name in MAIN):
            text += f" No mode has been compared at K = {count} yet."
    return text


def _table(rows: dict[str, Row], count: int) -> str:
    names = [name for name in MAIN if _seeds(rows, name, count)]
    if not names:
        return ""
    base = mean_bytes(rows, BASE, count)
    lines = [
        f"## {count} islands\n",
        "| mode | bytes a parameter | fewer than data parallel | loss | against it "
        "| seeds, spread |",
        "|---|---|---|---|---|---|",
    ]
    # losses of different seeds tell little: compared is by how much the same seeds differ
    over_base = {name: percent_over(rows, name, BASE, count) for name in names}
    for name in sorted(names, key=lambda n: (over_base[n] is None, over_base[n] or 0.0)):
        losses = [
            rows[f"{name}/{count}/{seed}"]["loss"]
            for seed in ALL_SEEDS
            if "loss" in rows.get(f"{name}/{count}/{seed}", {})
        ]
        sent = mean_bytes(rows, name, count) or 0.0
        over = over_base[name]
        fewer = f"{base / sent:,.0f}x" if base and sent else "-"
        more = "-" if over is None else f"{over:+.2f} %"
        spread = f"{len(losses)}, {max(losses) - min(losses):.3f}" if len(losses) > 1 else "1"
        lines.append(
            f"| {_marked(rows, name, count)} | {sent:,.1f} | {fewer} "
            f"| {statistics.mean(losses):.4f} | {more} | {spread} |"
        )
    failed = [
        name
        for name in MAIN
        if any("failed" in rows.get(f"{name}/{count}/{seed}", {}) for seed in ALL_SEEDS)
    ]
    if failed:
        lines.append(f"\nDiverged: {', '.join(failed)}.")
    return "\n".join(lines) + "\n"


TARGETS = {
    "bytes_ratio_at_1pct": "at least 500",
    "bytes_ratio_at_3pct": "at least 2,000",
    "gossip_vs_diloco_loss": "at most 1, at equal bytes",
    "gossip_vs_diloco_same_codec_loss": "-",
    "muon_vs_dp_loss": "at most 0",
    "muon_h10_vs_dp_loss": "the same with H 10",
    "muon_h5_vs_dp_loss": "the same with H 5",
    "straggler_loss_pct": "what the quicker one ends above the one that waits",
    "straggler_speedup": "at least 2",
    "churn_loss_pct": "at most 1",
    "byzantine_loss_pct": "at most 2",
    "byzantine_equal_tokens_loss_pct": "the same where the honest have as many tokens",
    "byzantine_loss_over_the_honest_alone_pct": "-",
    "byzantine_mean_loss_pct": "large: the mean fails",
}


def _keys(rows: dict[str, Row]) -> str:
    lines = [
        "## Figures against their targets\n",
        "| figure | is | asked for | by seed |",
        "|---|---|---|---|",
    ]
    by_seed = {key: ("", percents_over(rows, *compared)) for key, compared in COMPARED.items()}
    for percent in WITHIN:
        if best := cheapest(rows, percent):
            over = percents_over(rows, best[1], BASE, 4)
            by_seed[f"bytes_ratio_at_{percent:g}pct"] = (f"{best[1]}: ", over)
    speedups = ", ".join(f"{one:.2f}x" for one in straggler_speedups(rows))
    for key, value in figures(rows).items():
        shown = "not measured" if value is None else f"{value:,.3f}"
        name, percents = by_seed.get(key, ("", []))
        seeds = ", ".join(f"{one:+.2f} %" for one in percents)
        if key == "straggler_speedup":
            seeds = speedups
        lines.append(f"| `{key}` | {shown} | {TARGETS[key]} | {name}{seeds or '-'} |")
    return "\n".join(lines) + "\n"


def _special(rows: dict[str, Row]) -> str:
    lines = [
        "## Stragglers, churn, attackers\n",
        f"Rows with a straggler have the tokens of {SHORT} rounds, the others of {ROUNDS}; with "
        "as many tokens six honest islands have in more rounds what eight have in those. The "
        f"time is virtual, until {1 + WITHIN[1] / 100:g} times the loss at which the run that "
        "waits ends. Whoever waits there stands still, as in DiLoCo's paper; a node would train on "
        "meanwhile.\n",
        "| case | loss | seeds | time to the target |",
        "|---|---|---|---|",
    ]
    for name, (count, _) in SPECIAL.items():
        loss = mean_loss(rows, name, count)
        if loss is None:
            continue
        seeds = [seed for seed in ALL_SEEDS if f"{name}/{count}/{seed}" in rows]
        times = [seconds_to(rows, name, target_loss(rows, seed), seed) for seed in seeds]
        shown = ", ".join("never" if when is None else f"{when:.0f} s" for when in times)
        shown = shown if name in (WAITING, *NOT_WAITING) else "-"
        lines.append(f"| {_marked(rows, name, count)} | {loss:.4f} | {len(seeds)} | {shown} |")
    if fewer := percents_over(rows, "6 islands", "8 islands", 6, 8):
        lines.append(
            f"\nSix islands alone lose {statistics.mean(fewer):.1f} % against eight: so much two "
            "of eight that attack cost by what they do not contribute, whatever the merge."
        )
    return "\n".join(lines) + "\n" if len(lines) > 4 else ""


def plot(rows: dict[str, Row], path: Path) -> None:
    """Loss against bytes, K = 4, with the rows that nothing beats in both."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    points = sorted(
        (sent, loss, name)
        for name in MAIN
        if (sent := mean_bytes(rows, name, 4)) and (loss := mean_loss(rows, name, 4))
    )
    figure, axes = plt.subplots(figsize=(9, 9))
    highest = SHOWN * min(loss for _, loss, _ in points)
    best, front, beyond = float("inf"), [], []
    names = {name: number for number, (_, _, name) in enumerate(points, 1)}
    for sent, loss, name in points:
        if loss > highest:
            beyond.append(f"{name} ({loss:.2f})")
            continue
        label = f"{names[name]:2}  {name}"
        axes.plot(sent, loss, "o", color="tab:blue", label=label)
        axes.annotate(
            str(names[name]), (sent, loss), xytext=(5, 4), textcoords="offset points", fontsize=9
        )
        if loss < best:
            best = loss
            front.append((sent, loss))
    axes.plot(
        *zip(*front, strict=True), "--", color="tab:orange", label="nothing is better in both"
    )
    axes.set(
        xscale="log",
        xlabel="bytes an island sends a parameter",
        ylabel="validation loss, nats a byte",
        title="4 islands, equal tokens" + (f"; above: {', '.join(beyond)}" if beyond else ""),
    )
    axes.legend(fontsize=8, handlelength=1, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110, bbox_inches="tight", metadata={"Software": None})
    plt.close(figure)
