"""Getting to where the swarm is in a run of pairs: there each island has a state of its own."""

from __future__ import annotations

from collections.abc import Sequence

from node.checkpoints.restoring import own_standing
from node.entry.arrival import PATIENCE_S, Arrival
from node.entry.targets import Target
from node.replicas.replica import ChainStanding
from protocols.messages import Announce


class OwnArrival(Arrival):
    """Where islands meet in pairs any state will do.

    It is checked against what its island has announced under its signature, and nothing else
    vouches for it.
    """

    proves = False

    def _check_held(self, target: Target, state: ChainStanding, options: Sequence[Target]) -> None:
        """Nothing to compare: each island holds a state of its own."""

    async def look(self, within: float = PATIENCE_S) -> list[Announce]:
        """Islands, since seeds have no state here."""
        found = await super().look(within)
        return [announce for announce in found if announce.role == "island"]

    async def _standing(self, target: Target, fragment: int, until: float) -> ChainStanding:
        return own_standing(self.run, self.founders[0], target.round, fragment)
