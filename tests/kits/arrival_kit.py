"""A newcomer among peers that stand somewhere: who announces what, and what it takes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from gossip_kit import RUN, announce_of
from lineage_kit import CREATOR, OTHERS, Chain

from bootstrap.state import PartialState, StateServer, state_digest
from gossip.catchup.lineage import Lineage
from gossip.place import Place
from node.entry.arrival import Arrival, Arrived
from protocols.envelope import seal
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import inline as offload
from protocols.messages import (
    Announce,
    CertificateRequest,
    Certificates,
    HandoverRequest,
    Known,
)
from protocols.tasks import Offload

SIZE = 3000
HONEST = [CREATOR, OTHERS[0], OTHERS[1]]
LIAR = OTHERS[1]  # in office
NEWCOMER = Identity.from_seed(b"n" * 32)
STRANGERS = [Identity.from_seed(bytes([100 + n]) * 32) for n in range(6)]
WALL = 1_000_000.0


def part(directory: Path, run: bytes = RUN) -> PartialState:
    """What is on disk of a download, as a node that starts finds it."""
    return PartialState(directory / "state-0", run)


class Scene:
    """Peers that stand somewhere, on a simulated network, and one newcomer."""

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.seed = network.join(Identity.from_seed(b"s" * 32).peer_id)
        self.announces: list[bytes] = []
        self.transports: dict[PeerId, MemoryTransport] = {}  # of those who stand somewhere
        self.seed.on_call("known", self._known)
        self.base, self.momentum = torch.zeros(SIZE), torch.zeros(SIZE)
        self.states: list[torch.Tensor] = []  # of those who stand somewhere
        self.untrue: list[PeerId] = []
        self.strangers: set[PeerId] = set()  # those who give nothing before they are greeted
        self.broken: list[str] = []
        self.waited: list[PeerId] = []  # for a copy that it makes
        self.copying = 0  # copies that were begun
        self.learned = asyncio.Event()

    async def _known(self, peer: PeerId, body: bytes) -> bytes:
        return Known(tuple(self.announces)).encode()

    def stand(
        self,
        who: Identity,
        chain: Chain,
        value: float,
        kept: Lineage | None = None,
        page_s: float = 0.0,
        copying: Offload = offload,
        **said: Any,
    ) -> Announce:
        """``who`` announces the end of ``chain`` with a state of this value, and serves it.

        ``page_s``: it shows its handovers one at a time, each after so many seconds.
        """
        state = torch.full((SIZE,), value)
        round_, head, work = chain.claim
        place = Place(RUN, 0, round_, head, state_digest([state, state])[0], work)
        announce = announce_of(who.peer_id, place, **said)
        self.announces.append(
            seal(who, announce, purpose="announce", run=RUN, expires=WALL + 60, sequence=1)
        )
        transport = self.transports[who.peer_id] = self.network.join(who.peer_id)
        lineage = chain.lineage() if kept is None else kept

        async def known(peer: PeerId, body: bytes) -> bytes:
            if who.peer_id in self.strangers:
                raise RemoteRefused("stranger")
            return await self._known(peer, body)

        async def certificates(peer: PeerId, body: bytes) -> bytes:
            if who.peer_id in self.strangers:
                raise RemoteRefused("stranger")
            asked = CertificateRequest.decode(body).round
            return Certificates(tuple(chain.certificates[asked:][:1])).encode()

        async def handovers(peer: PeerId, body: bytes) -> bytes:
            request = HandoverRequest.decode(body)
            await asyncio.sleep(page_s)
            return lineage.page(request.first, 1 if page_s else request.count).encode()

        transport.on_call("certificates", certificates)
        transport.on_call("handovers", handovers)
        transport.on_call("known", known)

        @asynccontextmanager
        async def still() -> Any:
            yield

        def current(fragment: int) -> tuple[int, bytes, list[torch.Tensor]]:
            return len(chain.certificates), announce.state, [state, state]

        async def copy(work: Callable[[], Any]) -> Any:
            self.copying += 1
            return await copying(work)

        StateServer(transport, RUN, current, still=still, offload=copy)
        self.states.append(state)
        return announce

    def arrival(
        self,
        *,
        seed_known_at: float = 0.0,
        entries: Sequence[PeerId] = (),
        wanted: Callable[[Announce], bool] = lambda announce: True,
        kind: type[Arrival] = Arrival,
    ) -> Arrival:
        async def greet(peer: PeerId) -> None:
            self.strangers.discard(peer)

        now = asyncio.get_running_loop().time
        return kind(
            transport=self.network.join(NEWCOMER.peer_id),
            run=RUN,
            founders=(CREATOR.peer_id,),
            ask=lambda: entries or [self.seed.peer_id if now() >= seed_known_at else LIAR.peer_id],
            wall=lambda: WALL,
            learned=lambda announce: self.learned.set(),
            greet=greet,
            untrue=lambda peer, error: self.untrue.append(peer),
            offload=offload,
            broken=self.broken.append,
            making=lambda peer, size: self.waited.append(peer),
            wanted=wanted,
        )

    async def arrive(self, **options: Any) -> Arrived:
        return await self.arrival(**options).fetch([self.base, self.momentum], lambda *_: None)


def played(story: Callable[[Scene], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        await story(Scene(MemoryNetwork(1)))

    virtual_time.run(main())


def swarm() -> Chain:
    chain = Chain()
    chain.add(HONEST)
    chain.add()
    return chain


def forged(honest: Chain) -> tuple[Chain, Lineage]:
    """What a member makes of the chain: from now on it decides alone, and much faster."""
    chain = Chain()
    chain.certificates, chain.head = list(honest.certificates), honest.head
    chain.roster, chain.work = [LIAR], honest.work
    kept = honest.lineage()
    kept.add(chain.add(voters=[LIAR], tokens=10**9))
    return chain, kept
