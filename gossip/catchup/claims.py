"""Whom to believe that claims to be ahead, and whom to leave alone.

An announcement is a claim: its peer has to prove it (:func:`gossip.catchup.lineage.prove`). Names
cost nothing, so whoever does not is left alone for a while, longer each time: what it says could
keep this node busy for good. All proofs share one link, so they are not all begun at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from protocols.bounds import MAX_PEERS
from protocols.errors import RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import Announce

AT_ONCE = 8  # proofs under way
PROOF_S = 20.0  # for one proof,
SLOWEST = 16 * 1024  # and more for what it has shown, at this many bytes a second
NEXT_S = 2.0  # the next proof begins once nothing was shown for this long
LEFT_S = 5.0  # a peer that did not prove its claim is left alone for this long,
LONGEST_LEFT_S = 3600.0  # then twice as long each time, up to this
FORGOTTEN = 8  # times its last wait, after which a peer is forgotten

Shown = Callable[[int], None]  # told of bytes of a proof that hold
Prove = Callable[[Announce, Shown], Awaitable[None]]  # raises RemoteProtocolError, TransportError


@asynccontextmanager
async def given_time() -> AsyncIterator[Shown]:
    """The time for one proof, extended by what it shows. Raises TimeoutError."""
    async with asyncio.timeout(PROOF_S) as limit:

        def shown(count: int) -> None:
            if (when := limit.when()) is not None:
                limit.reschedule(when + count / SLOWEST)

        yield shown


@dataclass
class LeftAlone:
    """Peers about whose announcements nothing is done for now. Pure."""

    _until: dict[PeerId, tuple[float, float]] = field(default_factory=dict)  # until, wait

    def leave(self, peer: PeerId, now: float) -> None:
        """Do nothing about what this peer says, for a while.

        It is remembered even while it is silent, or a liar's identities would take turns.
        """
        _, wait = self._until.get(peer, (0.0, 0.0))
        new = not wait or now > self._forgotten_at(peer)
        wait = LEFT_S if new else min(2 * wait, LONGEST_LEFT_S)
        self._until = {
            one: self._until[one] for one in self._until if now <= self._forgotten_at(one)
        }
        self._until[peer] = (now + wait, wait)
        if len(self._until) > MAX_PEERS:
            del self._until[min(self._until, key=self._forgotten_at)]

    def _forgotten_at(self, peer: PeerId) -> float:
        until, wait = self._until[peer]
        return until + FORGOTTEN * wait

    def forgive(self, peer: PeerId) -> None:
        """It has been of use."""
        self._until.pop(peer, None)

    def has(self, peer: PeerId, now: float) -> bool:
        """Whether it is left alone at ``now``."""
        return now < self._until.get(peer, (0.0, 0.0))[0]


@dataclass
class Claims:
    """Has peers prove what they announce, one after the other where they are quick."""

    prove: Prove
    unproven: Callable[[PeerId, RemoteProtocolError | None], None]  # None: it did not answer
    now: Callable[[], float]  # of the event loop
    _next_at: float = 0.0  # when another proof is begun, if none has ended

    async def first_proven(
        self, claims: Callable[[], Announce | None], ahead: Callable[[Announce], bool]
    ) -> Announce | None:
        """The first claim to be shown that is still ``ahead``. ``claims`` gives them in turn.

        None where all have failed, and it gives no more.
        """
        found: list[Announce] = []

        async def judge(claim: Announce) -> None:
            if await self._proves(claim) and ahead(claim):
                found.append(claim)

        under_way: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:
            while not found:
                claim = claims() if len(under_way) < AT_ONCE else None
                if claim is not None:
                    self._next_at = self.now() + NEXT_S
                    under_way.add(group.create_task(judge(claim)))
                elif not under_way:
                    break
                under_way = await self._some(under_way)
            for task in under_way:
                task.cancel()
        return found[0] if found else None

    async def _some(self, under_way: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
        """Those left once one has ended, or once it is time to begin another."""
        while True:
            left_s = max(0.0, self._next_at - self.now())
            done, pending = await asyncio.wait(
                under_way, timeout=left_s or NEXT_S, return_when=asyncio.FIRST_COMPLETED
            )
            if done or self.now() >= self._next_at:
                return pending

    async def _proves(self, claim: Announce) -> bool:
        """Whether a peer can show how the swarm came to the place it says it stands at."""
        try:
            async with given_time() as more_time:

                def shown(count: int) -> None:
                    self._next_at += count / SLOWEST
                    more_time(count)

                await self.prove(claim, shown)
        except RemoteProtocolError as error:
            self.unproven(claim.peer, error)
        except (TransportError, TimeoutError):
            self.unproven(claim.peer, None)
        else:
            return True
        return False
