"""A member of a swarm that meets in pairs: it runs the exchanges of each fragment.

The counterpart of :mod:`gossip.chain.swarm`, without rounds that are agreed on (docs/gossip.md).
"""

from __future__ import annotations

from collections.abc import Sequence

from gossip.fragments import Fragments
from gossip.hooks import Hooks
from gossip.pairs.roamer import Roamer
from gossip.pairs.service import receive


class Pairs(Fragments[Roamer]):
    """This node's part in a run of gossip."""

    def __init__(self, chains: Sequence[Roamer], hooks: Hooks) -> None:
        super().__init__(chains, hooks)
        receive([chain.letters for chain in self.chains])
