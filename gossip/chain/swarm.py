"""A member of a swarm of certified rounds: it runs a chain of rounds for each fragment.

This is what a node opens to take part (:class:`Swarm`). The chains themselves are
:mod:`gossip.chain.chain`, what pairs do instead is :mod:`gossip.pairs.swarm`.
"""

from __future__ import annotations

from collections.abc import Sequence

from gossip.chain.chain import Chain
from gossip.chain.service import Service
from gossip.fragments import Fragments


class Swarm(Fragments[Chain]):
    """This node's part in a run of certified rounds; its chains are made with one set of hooks."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        super().__init__(chains, chains[0].hooks)
        self.presence.office = lambda: chains[0].replica.roster
        Service(self.wiring, self.presence, self.chains, self.hooks.rejected)
