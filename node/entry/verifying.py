"""Which claims of where the swarm stands are true: by signatures from the run's creator on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from gossip.catchup.claims import PROOF_S, given_time
from gossip.catchup.lineage import Claim, Lineage, prove
from gossip.place import Place
from gossip.plans.certificate import genesis
from node.checkpoints.restoring import standing_after
from node.entry.looking import Looking
from node.entry.proving import first_proven
from node.entry.targets import Target
from node.replicas.replica import ChainStanding
from protocols.errors import RemoteProtocolError, Stale, TransportError, Unreachable, Why
from protocols.identity import PeerId
from protocols.tasks import Offload


@dataclass(kw_only=True)
class Verifying(Looking):
    """Has peers prove the states that they announce. Names cost nothing, and claims neither."""

    founders: tuple[PeerId, ...]  # who decided the first round: the run's creator
    # told of a peer that shows a history that does not verify
    untrue: Callable[[PeerId, RemoteProtocolError], None]
    offload: Offload
    _unproven: set[PeerId] = field(default_factory=set)  # showed no proof the last time

    async def _proved(
        self, options: Sequence[Target], fragment: int, end: float
    ) -> AsyncIterator[tuple[Target, ChainStanding | RemoteProtocolError | TransportError]]:
        """Each target in its turn, with its place in the chain or why it has none.

        Targets whose sources showed no proof the last time come last: names cost nothing, and
        each false claim would hold up the true ones.
        """
        now = asyncio.get_running_loop().time

        async def proof(target: Target) -> ChainStanding | RemoteProtocolError | TransportError:
            await self._introduce(target.sources)
            try:
                state = await self._standing(target, fragment, min(end, now() + PROOF_S))
                self._check_held(target, state, options)
            except (RemoteProtocolError, TransportError) as error:
                return error
            return state

        waiting = sorted(options, key=lambda one: self._unproven.issuperset(one.sources))
        alone = True
        while waiting and now() < end:
            found, waiting = await first_proven(waiting, proof, end, alone=alone)
            for target, one in found:
                yield target, one
            alone = False

    def _check_held(self, target: Target, state: ChainStanding, options: Sequence[Target]) -> None:
        """Raise Stale where more of those in office hold another state of the same place.

        No signature tells yet which state is right, and identities out of office cost nothing.
        """

        def held(one: Target) -> int:
            return len(set(one.sources) & set(state.roster))

        place = (target.round, target.head)
        if any(held(one) > held(target) for one in options if (one.round, one.head) == place):
            raise Stale("more of those in office hold another state")

    async def _standing(self, target: Target, fragment: int, until: float) -> ChainStanding:
        """The place in the chain, verified from the founders on.

        Raises RemoteProtocolError where a source answers and none can prove it, TransportError
        where none answers in time. After ``until`` no more are asked: names cost nothing.
        """
        if target.round == 0:
            place = Place(self.run, fragment, 0, genesis(self.run), target.state, 0)
            if (target.head, target.work) != (place.previous, place.work):
                raise Stale("a first round that builds on something")
            lineage = Lineage(self.run, self.founders, fragment)
            return ChainStanding(place, self.founders, None, lineage)
        claim = Claim(target.round, target.head, target.work)
        wrong: RemoteProtocolError | None = None
        silent: TransportError | None = None
        now = asyncio.get_running_loop().time
        for peer in sorted(target.sources, key=self._unproven.__contains__):
            if (wrong or silent) and now() > until:
                break
            began = now()
            try:
                async with given_time() as shown:
                    found = await prove(
                        self.transport,
                        peer,
                        self.run,
                        self.founders,
                        claim,
                        self.offload,
                        fragment=fragment,
                        shown=shown,
                    )
            except RemoteProtocolError as error:
                wrong = error
                self.untrue(peer, error)
                self._unproven.add(peer)
            except TransportError as error:
                silent = error
                self._unproven.add(peer)
            except TimeoutError:
                silent = Unreachable(peer, Why.TIMEOUT)
                self._unproven.add(peer)
            except asyncio.CancelledError:
                if now() > began + PROOF_S:
                    self._unproven.add(peer)
                raise
            else:
                self._unproven.discard(peer)
                return standing_after(*found)
        raise wrong or silent or Stale("nobody stands there")
