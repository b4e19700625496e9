"""The ``node`` command of an island that sends something else than it has learnt.

``POISON`` in the environment is what its pseudo-gradient is multiplied by.
"""

from __future__ import annotations

import os

import torch

from node.__main__ import main
from node.replicas.replica import OuterReplica

FACTOR = float(os.environ["POISON"])
honest = OuterReplica._progress


def poisoned(self: OuterReplica, start: int, stop: int, out: torch.Tensor) -> torch.Tensor:
    return honest(self, start, stop, out).mul_(FACTOR)


if __name__ == "__main__":
    OuterReplica._progress = poisoned  # type: ignore[method-assign]
    main()
