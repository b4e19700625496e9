"""A member of a swarm of certified rounds: it runs a chain of rounds for each fragment.

This is what a node opens to take part (:class:`Swarm`). The chains themselves are
:mod:`gossip.chain.chain`, what pairs do instead is :mod:`gossip.pairs.swarm`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from gossip.chain.chain import Chain
from gossip.chain.service import Service
from gossip.exchange.readers import Readers
from gossip.fragments import Fragments


class Swarm(Fragments[Chain]):
    """This node's part in a run of certified rounds; its chains are made with one set of hooks."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        super().__init__(chains, chains[0].hooks)
        self.presence.office = lambda: chains[0].replica.roster
        self.readers = Readers(self.wiring.now)
        for chain in self.chains:
            chain.ledger.needed = partial(self.readers.needed, chain.fragment)
        Service(self.wiring, self.presence, self.chains, self.hooks.rejected, self.readers)
