"""The figures of the study of ``benchmarks.algorithms``, from its rows."""

from __future__ import annotations

import statistics

from benchmarks.algorithms_rows import ALL_SEEDS, BASE, MAIN, Row

WITHIN = (1.0, 3.0)  # percent of the baseline's loss
SAME_START = 1e-3  # nats: evaluations of the same parameters differ by less
# keys that are percents of loss: a row, the one it is compared with, the islands of each
COMPARED: dict[str, tuple[str, str, int, int]] = {
    "gossip_vs_diloco_loss": ("NoLoCo pairs, H 25, int8", "DiLoCo, int4", 4, 4),
    # two thirds of the bytes
    "gossip_vs_diloco_same_codec_loss": ("NoLoCo pairs, int8", "DiLoCo, int8", 4, 4),
    "muon_vs_dp_loss": ("Muon inside, int4", BASE, 4, 4),
    "muon_h10_vs_dp_loss": ("Muon inside, H 10, int4", BASE, 4, 4),
    "muon_h5_vs_dp_loss": ("Muon inside, H 5, int4", BASE, 4, 4),
    "straggler_loss_pct": ("straggler, fewer steps", "straggler, waited for", 4, 4),
    "churn_loss_pct": ("8 islands, 30 % replaced", "8 islands", 8, 8),
    "byzantine_loss_pct": ("8 islands, 2 attack, open trust", "8 islands", 8, 8),
    "byzantine_equal_tokens_loss_pct": (
        "8 islands, 2 attack, open trust, as many tokens",
        "8 islands",
        8,
        8,
    ),
    "byzantine_loss_over_the_honest_alone_pct": (
        "8 islands, 2 attack, open trust",
        "6 islands",
        8,
        6,
    ),
    "byzantine_mean_loss_pct": ("8 islands, 2 attack, mean", "8 islands", 8, 8),
}
# rows with a slow island: one that waits for it, and those that do not
WAITING = "straggler, waited for"
NOT_WAITING = ("straggler, fewer steps", "straggler, asynchronous")


def made(rows: dict[str, Row], name: str, islands: int) -> list[Row]:
    """The row's finished runs, one for each seed; none where any of them diverged.

    Where a mode diverges now and then, the runs that do not say nothing about it.
    """
    keys = (f"{name}/{islands}/{seed}" for seed in ALL_SEEDS)
    found = [rows[key] for key in keys if key in rows]
    return [] if any("failed" in row for row in found) else found


def mean_loss(rows: dict[str, Row], name: str, islands: int) -> float | None:
    """Over the seeds that are there."""
    found = [row["loss"] for row in made(rows, name, islands)]
    return statistics.mean(found) if found else None


def mean_bytes(rows: dict[str, Row], name: str, islands: int) -> float | None:
    """Bytes a parameter that an island sends in a run, with its share of what a server sends."""
    found = [
        row["bytes_per_parameter"] + row.get("notes", {}).get("server_bytes", 0.0) / islands
        for row in made(rows, name, islands)
    ]
    return statistics.mean(found) if found else None


def percents_over(
    rows: dict[str, Row], name: str, base: str, islands: int, of: int | None = None
) -> list[float]:
    """How much more loss, in percent, by each of the seeds that both have.

    ``of`` is how many islands ``base`` has, where that is another number.
    """
    if not made(rows, name, islands) or not made(rows, base, of or islands):
        return []
    found = []
    for seed in ALL_SEEDS:
        keys = f"{name}/{islands}/{seed}", f"{base}/{of or islands}/{seed}"
        if any(key not in rows for key in keys):
            continue
        a, b = (rows[key] for key in keys)
        if a.get("stale") != b.get("stale"):
            continue
        if abs(_began(a) - _began(b)) > SAME_START:
            raise ValueError(
                f"{keys[0]} began at a loss of {_began(a)}, {keys[1]} at {_began(b)}: they do not "
                "start from the same parameters; mark the older one as stale, to have it made again"
            )
        found.append(100 * (a["loss"] / b["loss"] - 1))
    return found


def _began(row: Row) -> float:
    """The validation loss before the first step."""
    loss: float = row["curve"][0][3]
    return loss


def percent_over(rows: dict[str, Row], name: str, base: str, islands: int) -> float | None:
    """The mean of :func:`percents_over`."""
    found = percents_over(rows, name, base, islands)
    return statistics.mean(found) if found else None


def seconds_to(rows: dict[str, Row], name: str, loss: float | None, seed: int) -> float | None:
    """Virtual time until the validation loss was first that low (4 islands)."""
    curve = rows.get(f"{name}/4/{seed}", {}).get("curve", [])
    return next((point[0] for point in curve if loss is not None and point[3] <= loss), None)


def target_loss(rows: dict[str, Row], seed: int) -> float | None:
    """The loss to which runs with a slow island are timed: near where waiting for it ends."""
    waited = rows.get(f"{WAITING}/4/{seed}", {}).get("curve")
    return (1 + WITHIN[1] / 100) * waited[-1][3] if waited else None


def cheapest(rows: dict[str, Row], percent: float) -> tuple[float, str] | None:
    """How many times fewer bytes suffice for at most ``percent`` more loss, and by which row."""
    baseline = mean_bytes(rows, BASE, 4)
    found = [
        (baseline / sent, name)
        for name in MAIN
        if name != BASE
        and (over := percent_over(rows, name, BASE, 4)) is not None
        and over <= percent
        and (sent := mean_bytes(rows, name, 4)) is not None
        and baseline is not None
    ]
    return max(found, default=None)


def straggler_speedups(rows: dict[str, Row]) -> list[float]:
    """How many times sooner runs that do not wait for a slow island reach the target, by seed.

    0 where none does.
    """
    found = []
    for seed in ALL_SEEDS:
        target = target_loss(rows, seed)
        slow = seconds_to(rows, WAITING, target, seed)
        if slow is None or any(f"{name}/4/{seed}" not in rows for name in NOT_WAITING):
            continue
        quick = (seconds_to(rows, name, target, seed) for name in NOT_WAITING)
        found.append(max((slow / seconds for seconds in quick if seconds), default=0.0))
    return found


def figures(rows: dict[str, Row]) -> dict[str, float | None]:
    """The keys of the study; None where rows are missing."""
    found: dict[str, float | None] = {}
    for percent in WITHIN:
        best = cheapest(rows, percent)
        found[f"bytes_ratio_at_{percent:g}pct"] = best[0] if best else None
    for key, compared in COMPARED.items():
        percents = percents_over(rows, *compared)
        found[key] = statistics.mean(percents) if percents else None
    speedups = straggler_speedups(rows)
    found["straggler_speedup"] = statistics.mean(speedups) if speedups else None
    return {key: None if value is None else round(value, 3) for key, value in found.items()}
