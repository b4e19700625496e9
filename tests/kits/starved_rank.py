"""A trainer rank whose device has no room for more than two sequences at a time.

``island_of_ranks.py`` starts ranks so. Rank 1 alone is short of memory: the other one is inside a
collective call when it fails.
"""

from __future__ import annotations

import sys

import torch

from node.trainer.engine import Batch, Engine
from node.trainer.rank import _exit, main

ROOM = 2  # sequences
whole = Engine.gradients


def starved(self: Engine, batch: Batch, micro_batch: int) -> float:
    if self.ranks.rank == 1 and micro_batch > ROOM:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
    return whole(self, batch, micro_batch)


if __name__ == "__main__":
    Engine.gradients = starved  # type: ignore[method-assign]
    _exit(main(sys.argv[1:]))
