"""Getting to where the swarm is: which state to take, from whom, and the download itself."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from bootstrap.seeds import backoff
from bootstrap.state import Progress, download_state
from gossip.agreement import Place
from gossip.certificate import genesis
from gossip.presence import open_announce
from node.errors import operator_error
from node.replica import OuterState
from node.saving import standing_after
from protocols.errors import OperatorError, ProtocolError, TransportError
from protocols.identity import PeerId
from protocols.messages import Announce, CertificateRequest, Certificates, Known
from protocols.transport import Transport

CALL_TIMEOUT_S = 5.0
PATIENCE_S = 120.0  # of tries, since the swarm moves on while we ask


@dataclass(frozen=True)
class Target:
    """A state that several peers stand at."""

    round: int
    head: bytes
    state: bytes
    work: int
    sources: tuple[PeerId, ...]


def choose(announces: Iterable[Announce]) -> Target | None:
    """The heaviest state announced; among equals the one most peers hold.

    Islands that are joining themselves count only where there are no others, as after a restart
    of the whole swarm.
    """
    holders: dict[tuple[int, int, bytes, bytes], list[PeerId]] = defaultdict(list)
    known = [a for a in announces if a.state]
    for a in [a for a in known if a.status == "active"] or known:
        if a.status != "leaving":
            holders[a.work, a.round, a.head, a.state].append(a.peer)
    if not holders:
        return None
    best = max(holders, key=lambda key: (key[0], key[1], len(holders[key]), key[2]))
    work, round_, head, state = best
    return Target(round_, head, state, work, tuple(sorted(holders[best])))


@dataclass(frozen=True)
class Arrived:
    """What a download came to."""

    state: OuterState
    target: Target
    served: dict[PeerId, int]  # bytes that came from each source


@dataclass
class Arrival:
    """Downloads the swarm's state into given vectors."""

    transport: Transport
    run: bytes
    creator: PeerId
    ask: Sequence[PeerId]  # who can tell who stands where, right now
    wall: Callable[[], float]
    learned: Callable[[Announce], None]  # told of every announcement on the way
    greet: Callable[[PeerId], Awaitable[object]]  # strangers are given nothing
    _greeted: set[PeerId] = field(default_factory=set)

    async def fetch(
        self, base: torch.Tensor, momentum: torch.Tensor, progress: Progress
    ) -> Arrived:
        """Fill ``base`` and ``momentum`` (fp32 [N] each) with the swarm's state.

        Raises OperatorError E502 when no state could be had in time.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + PATIENCE_S
        reason = "no island has announced a state"
        for pause in backoff(random.Random(), first=0.2, last=5.0):
            target = choose(await self.look())
            if target is not None:
                await self._introduce(target.sources)
                try:
                    download = await download_state(
                        self.transport,
                        target.sources,
                        self.run,
                        target.round,
                        target.state,
                        base,
                        momentum,
                        progress=progress,
                    )
                    served = {peer: one.bytes for peer, one in download.sources.items()}
                    return Arrived(await self._standing(target), target, served)
                except (TransportError, ProtocolError) as error:
                    reason = str(error)
            if loop.time() + pause > end:
                break
            await asyncio.sleep(pause)
        raise operator_error("E502", "the swarm's state could not be fetched", why=reason)

    async def look(self) -> list[Announce]:
        """Who stands where, freshly asked: the swarm may move on every second."""
        found: dict[PeerId, Announce] = {}
        for peer in self.ask:
            try:
                reply = await self.transport.call(
                    peer, "known", b"", timeout=CALL_TIMEOUT_S, max_reply=Known.MAX_BYTES
                )
                envelopes = Known.decode(reply).announces
            except (TransportError, ProtocolError):
                continue
            for envelope in envelopes:
                with contextlib.suppress(ProtocolError):  # too old: others remain
                    announce = open_announce(envelope, self.run, self.wall()).message
                    known = found.get(announce.peer)
                    if known is None or announce.round >= known.round:
                        found[announce.peer] = announce
                        self.learned(announce)
            if len(found) > 1:
                break
        return list(found.values())

    async def _introduce(self, peers: Iterable[PeerId]) -> None:
        """Greet those who have not seen us yet; who does not answer gives no state either."""

        async def one(peer: PeerId) -> None:
            with contextlib.suppress(TransportError, OperatorError):
                await self.greet(peer)
                self._greeted.add(peer)

        async with asyncio.TaskGroup() as group:
            for peer in peers:
                if peer not in self._greeted:
                    group.create_task(one(peer))

    async def _standing(self, target: Target) -> OuterState:
        if target.round == 0:
            place = Place(self.run, 0, 0, genesis(self.run), target.state, 0)
            return OuterState(place, (self.creator,), None)
        failure: Exception | None = None
        for peer in target.sources:
            try:
                request = CertificateRequest(self.run, 0, target.round - 1, 1)
                reply = await self.transport.call(
                    peer,
                    "certificates",
                    request.encode(),
                    timeout=CALL_TIMEOUT_S,
                    max_reply=Certificates.MAX_BYTES,
                )
                found: Certificates = Certificates.decode(reply)
                if found.certificates:
                    state = standing_after(found.certificates[0])
                    if state.place.previous == target.head and state.place.run == self.run:
                        return state
            except (TransportError, ProtocolError) as error:
                failure = error
        raise TransportError(f"nobody showed the certificate of round {target.round}: {failure}")
