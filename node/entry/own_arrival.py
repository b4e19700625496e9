"""Getting to where the swarm is in a run of pairs: there each island has a state of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from node.checkpoints.restoring import own_standing
from node.entry.arrival import Arrival
from node.entry.keeping import Hope, first_kept
from node.entry.looking import PATIENCE_S
from node.entry.targets import Target
from node.entry.trying import Patience
from node.replicas.replica import ChainStanding
from protocols.errors import RemoteProtocolError, TransportError
from protocols.identity import PeerId
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

    async def _kept(
        self,
        options: Sequence[Target],
        fragment: int,
        patience: Patience,
    ) -> AsyncIterator[tuple[Target, ChainStanding] | RemoteProtocolError | TransportError]:
        """The states that islands keep for us, in the order in which they do: any will do.

        The furthest are asked first, but none is waited for longer than a copy usually takes.
        """
        silent = list[TransportError]()

        async def asked(one: tuple[Target, PeerId], hope: Hope) -> tuple[Target, ChainStanding]:
            target, peer = one
            await self._introduce([peer])
            state = await self._standing(target, fragment, patience.until())
            try:
                return await self._asked(peer, target, state, fragment, patience, hope)
            except TransportError as error:
                self._greeted.discard(peer)  # it may have started anew
                silent.append(error)
                raise

        waiting = [(target, peer) for target in options for peer in target.sources]
        waiting.sort(key=lambda one: one[1] in self._unable)
        while waiting:
            try:
                kept, waiting = await first_kept(
                    waiting,
                    asked,
                    patience.size,
                    lambda one: False,
                    until=patience.until,
                    waited=patience.waited,
                )
            except (RemoteProtocolError, TransportError) as error:
                yield error
                if silent and silent[-1] is not error:  # not all of them send something wrong
                    yield silent[-1]
                return
            yield kept

    async def _standing(self, target: Target, fragment: int, until: float) -> ChainStanding:
        return own_standing(self.run, self.founders[0], target.round, fragment)
