"""An island that looks at a chunk of others in each round; with ``LIES`` it merges the negative.

Run as ``python lying_owner.py start …``, like ``node start …``.
"""

from __future__ import annotations

import os
from typing import Any

import gossip.chain.auditor
from gossip.exchange.kept_slices import WeighedMerge
from node.__main__ import main

gossip.chain.auditor.SHARE = 1000.0  # also where the model is small for its number of islands

if os.environ.get("LIES"):
    honest = WeighedMerge._sum_of_all

    def turned_round(self: Any, index: int) -> Any:
        return honest(self, index).mul_(-1.0)

    WeighedMerge._sum_of_all = turned_round  # type: ignore[method-assign]

if __name__ == "__main__":
    main()
