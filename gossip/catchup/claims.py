"""Whom to believe that claims to be ahead, and whom to leave alone.

An announcement is a claim: its peer has to prove it (:func:`gossip.catchup.lineage.prove`). Names
cost nothing, so whoever does not is left alone for a while, longer each time: what it says could
keep this node busy for good. All proofs share one link, so they are not all begun at once; but
peers in office wait for nobody else's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from gossip.catchup.lineage import CALL_TIMEOUT_S
from protocols.bounds import MAX_PEERS
from protocols.errors import RemoteProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import Announce

AT_ONCE = 8  # proofs under way, and as many of peers in office
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
    """Peers about whose announcements nothing is done for now. Sans-IO."""

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


class _Proofs:
    """Those under way of peers in office, or of others."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.next_at = 0.0  # when another one is begun, if none has ended

    def room(self, now: float) -> bool:
        """Whether another one may begin."""
        return len(self.tasks) < AT_ONCE and now >= self.next_at

    def shown(self, count: int, now: float) -> None:
        """One has shown so many bytes, and is likely to show more; for as long as a call takes."""
        self.next_at = min(max(self.next_at, now) + count / SLOWEST, now + CALL_TIMEOUT_S)

    def ended(self, done: set[asyncio.Task[None]]) -> None:
        """Some of these may have: another one need not wait."""
        if self.tasks & done:
            self.tasks -= done
            self.next_at = 0.0


@dataclass
class Claims:
    """Has peers prove what they announce, one after the other where they are quick."""

    prove: Prove
    unproven: Callable[[PeerId, RemoteProtocolError | None], None]  # None: it did not answer
    now: Callable[[], float]  # of the event loop
    in_office: Callable[[PeerId], bool] = lambda peer: False

    async def first_proven(
        self, claims: Callable[[bool], Announce | None], ahead: Callable[[Announce], bool]
    ) -> Announce | None:
        """The first claim to be shown that is still ``ahead``.

        ``claims`` gives them in turn: with True only those of peers in office, which come first
        otherwise, too. None where all have failed, and it gives no more.
        """
        found: list[Announce] = []
        office, others = _Proofs(), _Proofs()

        async def judge(claim: Announce, among: _Proofs) -> None:
            if await self._proves(claim, among) and ahead(claim):
                found.append(claim)

        async with asyncio.TaskGroup() as group:
            while not found:
                now, claim = self.now(), None
                if office.room(now):
                    anybody = others.room(now)
                    claim = claims(not anybody)
                if claim is not None:
                    among = office if self.in_office(claim.peer) else others
                    among.next_at = now + NEXT_S
                    among.tasks.add(group.create_task(judge(claim, among)))
                elif not (office.tasks or others.tasks):
                    break
                due = [one.next_at - now for one in (office, others) if one.next_at > now]
                done, _ = await asyncio.wait(
                    office.tasks | others.tasks,
                    timeout=min([NEXT_S, *due]),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                office.ended(done)
                others.ended(done)
            for task in office.tasks | others.tasks:
                task.cancel()
        return found[0] if found else None

    async def _proves(self, claim: Announce, among: _Proofs) -> bool:
        """Whether a peer can show how the swarm came to the place it says it stands at."""
        try:
            async with given_time() as more_time:

                def shown(count: int) -> None:
                    among.shown(count, self.now())
                    more_time(count)

                await self.prove(claim, shown)
        except RemoteProtocolError as error:
            self.unproven(claim.peer, error)
        except (TransportError, TimeoutError):
            self.unproven(claim.peer, None)
        else:
            return True
        return False
