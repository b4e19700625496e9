"""Knobs that follow from what was measured: how many inner steps, and for whom.

An island waits for what is left of a transfer when its overlap is over; the share of a round that
it stands still is *exposed*. H is chosen so that this share stays under a bound (5 %), since more
steps a round cost quality: pseudo-gradients of islands that went far apart agree less.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EXPOSED = 0.05
LEAST_STEPS, MOST_STEPS = 20, 500
UNHEARD_OF = 1e15  # steps a round; more than that is not told apart


@dataclass(frozen=True, slots=True)
class Decision:
    """What was chosen, and from what: to be logged as it is."""

    inner_steps: int
    exposed: float  # the share of a round that is waited, with these steps
    transfer_s: float
    step_s: float
    why: str


def inner_steps(
    transfer_s: float,
    step_s: float,
    *,
    overlap_steps: int | None = 0,
    transfers: int = 1,
    exposed: float = EXPOSED,
    least: int = LEAST_STEPS,
    most: int = MOST_STEPS,
) -> Decision:
    """H: the fewest steps with which waiting takes at most ``exposed`` of a round, within bounds.

    Waiting w = P max(0, t_comm − overlap · t_step) is a share w / (H t_step + w) of a round, in
    which there are P ``transfers``: one of the whole model, or one of each fragment. An overlap of
    None is all of H: then more steps hide more of the transfer. Raises :class:`ValueError` for
    times that are negative, zero a step, or not finite.
    """
    if not (0 <= transfer_s < math.inf and 0 < step_s < math.inf and 0 < exposed < 1):
        raise ValueError(f"no H follows from {transfer_s} s, {step_s} s a step, {exposed}")
    if overlap_steps is None:
        needed = transfer_s * (1 - exposed) / step_s
    else:
        waits = transfers * max(0.0, transfer_s - overlap_steps * step_s)
        needed = waits * (1 - exposed) / (exposed * step_s)
    wanted = math.ceil(min(needed, UNHEARD_OF))
    chosen = min(most, max(least, wanted))
    if overlap_steps is None:
        waits = transfers * max(0.0, transfer_s - chosen * step_s)
    if wanted > most:
        help_by = "a coarser codec" if overlap_steps is None else "a coarser codec or fragments"
        why = f"{wanted} steps would be needed: {help_by} would help"
    elif wanted < least:
        why = "the link is fast: as few steps as quality allows"
    else:
        why = f"waiting takes {exposed:.0%} of a round"
    share = waits / (chosen * step_s + waits)
    return Decision(chosen, share, transfer_s, step_s, why)
