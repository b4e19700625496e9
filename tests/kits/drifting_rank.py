"""A trainer rank that takes steps thirty times as long as the run says.

``island_of_ranks.py`` starts ranks so.
"""

from __future__ import annotations

import sys

from bootstrap.manifest import Inner
from node.trainer import loop
from node.trainer.rank import _exit, main

FACTOR = 30.0
as_agreed = loop.learning_rate


def learning_rate(inner: Inner, step: int) -> float:
    return FACTOR * as_agreed(inner, step)


if __name__ == "__main__":
    loop.learning_rate = learning_rate
    _exit(main(sys.argv[1:]))
