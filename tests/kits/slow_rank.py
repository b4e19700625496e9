"""A trainer rank whose data come from afar; rank 1 gets those of its second step after ``HELD``.

With ``FAILS`` reading them fails on rank 0 meanwhile.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import node.trainer.early
import node.trainer.loop
from node.errors import operator_error
from node.trainer.data import TrainingData
from node.trainer.rank import _exit, main

whole = TrainingData.batch


def held(self: TrainingData, *place: Any) -> Any:
    step, rank = place[3], sys.argv[sys.argv.index("--rank") + 1]
    while (step, rank) == (1, "1") and not Path(os.environ["HELD"]).exists():
        time.sleep(0.02)
    if (step, rank) == (1, "0") and "FAILS" in os.environ:
        raise operator_error("E601", "the file is gone")
    return whole(self, *place)


if __name__ == "__main__":
    TrainingData.batch = held  # type: ignore[method-assign]
    node.trainer.early.FIRST_S = 2.0
    node.trainer.loop.may_take_long = lambda data: True  # type: ignore[attr-defined]
    _exit(main(sys.argv[1:]))
