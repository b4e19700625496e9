"""The merge rule that a run's manifest names, as the functions that do it."""

from __future__ import annotations

from collections.abc import Callable

from bootstrap.manifest_rounds import Merge
from diloco import merge, robust
from gossip.plans.mix import MEAN, Mix

RULES: dict[str, Callable[[], Mix]] = {
    "mean": lambda: MEAN,
    "clip": lambda: Mix(clip=merge.clip_factors),
    "median": lambda: Mix(column=robust.coordinate_median),
    "trimmed": lambda: Mix(column=robust.trimmed_mean),
    "geometric-median": lambda: Mix(weigh=robust.geometric_median),
    "centered-clip": lambda: Mix(weigh=robust.centered_clip),
}
BY_TRUST: dict[str, Callable[[], Mix]] = {
    "friendly": RULES["clip"],
    "open": lambda: Mix(weigh=robust.open_rule),  # by how many there are in each round
}


def mix_of(chosen: Merge) -> Mix:
    """How the contributions of a run become one."""
    return (BY_TRUST[chosen.trust] if chosen.rule == "auto" else RULES[chosen.rule])()
