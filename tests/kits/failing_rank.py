"""A trainer rank that fails in its evaluation, where ``FAILING`` is its number.

``FAILURE`` says of what: its memory, its data, else anything.
"""

from __future__ import annotations

import os
import sys

import torch
from torch import Tensor

from node.errors import operator_error
from node.trainer.engine import Engine
from node.trainer.rank import _exit, main

whole = Engine.evaluate


def failing(self: Engine, tokens: Tensor, at_once: int) -> float:
    if self.ranks.rank == int(os.environ["FAILING"]):
        if os.environ["FAILURE"] == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        if os.environ["FAILURE"] == "data":
            raise operator_error("E601", "cannot stream datasets:x", why="the server is away")
        raise ValueError("of the evaluation")
    return whole(self, tokens, at_once)


if __name__ == "__main__":
    Engine.evaluate = failing  # type: ignore[method-assign,assignment]
    _exit(main(sys.argv[1:]))
