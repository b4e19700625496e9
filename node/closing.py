"""What a node says last: why it ended, how far the run has come, and what can be done next."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.names import round_of

MORE_ROUNDS = ("--set", "rounds.total_rounds=N")  # where no other flags are known


def newest_round(checkpoints: Path) -> int | None:
    """The round of the checkpoint in that folder which was made last; None: there is none."""
    with suppress(OSError):
        for newest in CheckpointStore(checkpoints, owns=False).paths():
            return round_of(newest.name)
    return None


def last_words(
    reason: str,
    *,
    rounds: int | None,
    over: bool,
    home: Path | None,
    saved: int | None,
    script: bool,
    again: Sequence[str] | None,
) -> str:
    """One line; ``rounds``: of the run, so far, None for a node that did not come to take part.

    ``over``: the run has come to its end. ``home``: the state directory that has a checkpoint to go
    on from or to export; None: there is none. ``saved``: the round of that checkpoint.
    ``script``: the model is a training script's own. ``again``: the flags of a run of more rounds
    that is as this one was (:mod:`node.again`); None: they are not known.
    """
    parts = [f"ended: {reason}"]
    if rounds is None:
        parts[0] += ", before it took part in a run"
    elif not over:  # else the reason says how many there were
        parts[0] += f"; the run stands at round {rounds}"
    if home is None:
        return parts[0]
    if rounds is not None and saved is not None and saved != rounds:
        parts.append(f"the newest checkpoint is of round {saved}")
    place = shlex.quote(str(home))
    if not over:
        command = "resume=True" if script else f"node start --resume --dir {place}"
        parts.append(f"to go on: {command}")
    if not script:
        parts.append(f"its model: node export FOLDER --from {place}")
        if over:
            flags = shlex.join(again or MORE_ROUNDS)
            told = "" if again else ", with the other settings and --data that this one had"
            parts.append(
                "more rounds: a run that starts from that, node start --init-from FOLDER "
                f"--dir ANOTHER {flags}{told}"
            )
    return "; ".join(parts)
