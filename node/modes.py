"""Which modes of the manifest real processes run, and the refusal of the others."""

from __future__ import annotations

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import MODES as GOSSIP
from node.errors import operator_error

# over certified rounds: what differs is the knobs that the mode sets (bootstrap.manifest_rounds)
ROUNDS = ("diloco", "streaming")
RUN = (*ROUNDS, *GOSSIP)


def check_runs(manifest: Manifest) -> None:
    """Raise E207 for a mode that only `node simulate` knows."""
    if manifest.mode not in RUN:
        raise operator_error(
            "E207",
            f"mode {manifest.mode} runs in simulations only",
            why=f"`node start` runs {', '.join(RUN)}",
            fix=f"choose one of them, or try it out with node simulate --mode {manifest.mode}",
        )
