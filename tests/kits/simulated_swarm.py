"""Whole members on the simulated network, with toy parameters: for tests of the driver."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from exchange_kit import until
from toy_replica import RUN, ToyReplica

from gossip.catchup.replay import Ending
from gossip.chain.chain import Chain
from gossip.chain.promises import PromiseRecord
from gossip.chain.swarm import Swarm
from gossip.exchange.exchange import Exchange
from gossip.hooks import Hooks
from gossip.membership.members import Membership, Patience
from gossip.membership.presence import Presence
from gossip.membership.standing import first_announcement
from gossip.plans.grouping import UNGROUPED, Grouping
from gossip.plans.mix import MEAN, Mix
from gossip.plans.rules import Rules
from gossip.wiring import Wiring
from protocols.codecs import RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import inline
from protocols.messages import Certificate
from protocols.tasks import Tasks


def seed_of(peer: PeerId, fragment: int, round_: int) -> int:
    """Of a member's progress in a round; ``hash`` would give another one in each process."""
    return crc32(f"{peer} {fragment} {round_}".encode())


@dataclass
class Member:
    """One running member; ``stop`` ends it as a kill would."""

    identity: Identity
    replicas: tuple[ToyReplica, ...]  # by fragment
    swarm: Swarm
    task: asyncio.Task[None]
    rejected: list[tuple[PeerId, str]] = field(default_factory=list)
    behind: list[str] = field(default_factory=list)
    moved: Sequence[asyncio.Event] = ()  # by fragment: set when it stands elsewhere

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def replica(self) -> ToyReplica:
        """That of the first fragment, mostly the only one."""
        return self.replicas[0]


@dataclass
class SimulatedSwarm:
    """Members by name, on one :class:`MemoryNetwork`."""

    network: MemoryNetwork
    size: int
    codec: RangeCodec
    think: tuple[float, float]
    roster: tuple[PeerId, ...]
    group: asyncio.TaskGroup
    random: random.Random
    patience: Patience
    rules: Rules
    fragments: int = 1  # of ``size`` elements each
    members: dict[PeerId, Member] = field(default_factory=dict)
    said: dict[PeerId, tuple[float, bytes]] = field(default_factory=dict)  # when, and what
    incarnations: dict[PeerId, int] = field(default_factory=dict)
    stopped: set[PeerId] = field(default_factory=set)
    tokens: dict[PeerId, int] = field(default_factory=dict)  # of a contribution, else 1000
    records: Path | None = None  # where members keep what they promised, over restarts
    hurry: dict[PeerId, float] = field(default_factory=dict)  # thinks so many times as fast
    regions: dict[PeerId, str] = field(default_factory=dict)
    kind: type[ToyReplica] = ToyReplica
    roles: dict[PeerId, str] = field(default_factory=dict)  # else an island
    keep_rounds: int = 50  # for those who missed some
    # a member can do no more than download a fragment's state
    on_behind: Callable[[Member, int, Ending], Coroutine[Any, Any, None]] | None = None

    def start(
        self,
        identity: Identity,
        *,
        upload: float | None = None,
        replicas: Sequence[ToyReplica] = (),
        status: str = "active",
        new_identity: bool = False,
    ) -> Member:
        peer = identity.peer_id
        transport = self.wired(identity, self.network.join(peer, upload=upload, download=upload))
        replicas = tuple(replicas) or self.fresh(peer)
        self.incarnations[peer] = self.incarnations.get(peer, 0) + 1
        loop = asyncio.get_running_loop()
        group = asyncio.TaskGroup()
        spawn = Tasks(group).spawn

        wiring = Wiring(transport, identity, RUN, self.codec, spawn, inline, loop.time)
        membership = Membership(peer, self.patience)
        announce = first_announcement(
            peer,
            replicas[0].place,
            version="0",
            role=self.role(peer),
            status=status,
            incarnation=self.incarnations[peer],
            region=self.regions.get(peer, ""),
            eta=0.5,
            tokens_per_second=100.0,
            steps_per_second=10.0,
            upload=upload or 0.0,
            download=upload or 0.0,
        )
        rejected: list[tuple[PeerId, str]] = []
        behind: list[str] = []
        moved = [asyncio.Event() for _ in replicas]

        def applied(certificate: Certificate, exchange: Exchange | None) -> None:
            presence.note(
                upload=transport.stats.upload.read() or upload or 0.0,
                download=transport.stats.download.read() or upload or 0.0,
            )
            moved[certificate.outcome.fragment].set()
            self.applied(peer, certificate, exchange)

        def on_behind(fragment: int, ending: Ending) -> None:
            behind.append(ending.name)
            if self.on_behind is not None:
                spawn(self.on_behind(self.members[peer], fragment, ending))

        hooks = Hooks(
            applied=applied,
            rejected=lambda who, error: rejected.append((who, str(error))),
            behind=on_behind,
            peer=lambda who, what, why: self.came_or_went(peer),
        )
        presence = Presence(
            wiring,
            membership,
            announce,
            lambda: [replica.place for replica in replicas],
            wall=lambda: 1_000_000.0 + loop.time(),
        )
        chains = [
            Chain(
                dataclasses.replace(wiring, codec=replica.codec),
                replica,
                self.rules_of(replica),
                presence,
                hooks,
                keep_rounds=self.keep_rounds,
                known_lineage=replica.lineage,
                new_identity=new_identity,
                record=self.record_of(peer, replica.place.fragment),
                late_s=replica.late_s,
            )
            for replica in replicas
        ]
        for replica, chain in zip(replicas, chains, strict=True):
            replica.lineage = chain.lineage
            if replica.certificate is not None:  # without its parts, as after any start
                chain.ledger.add(replica.certificate, {})
        swarm = Swarm(chains)

        async def live() -> None:
            async with group:
                for work in self.works(swarm, replicas, moved, spawn):
                    group.create_task(work)
                for other in self.living():
                    if other.peer != peer:
                        swarm.presence.learn(self.envelope(other))
                group.create_task(swarm.run())

        task = self.group.create_task(live())
        member = Member(identity, replicas, swarm, task, rejected, behind, moved)
        self.members[peer] = member
        self.stopped.discard(peer)
        return member

    def wired(self, identity: Identity, transport: MemoryTransport) -> Any:
        """The transport that a member uses."""
        return transport

    def role(self, peer: PeerId) -> str:
        """What a member is there for."""
        return self.roles.get(peer, "island")

    def keeps(self, member: Member) -> bool:
        """Whether a member comes back from a kill with what it had."""
        return True

    def fresh(self, peer: PeerId) -> tuple[ToyReplica, ...]:
        """What a member has that begins anew, by fragment."""
        return tuple(
            self.kind(peer, self.roster, self.size, self.codec, fragment)
            for fragment in range(self.fragments)
        )

    def rules_of(self, replica: ToyReplica) -> Rules:
        """The rules by which a fragment's rounds go."""
        return self.rules

    def works(
        self,
        swarm: Swarm,
        replicas: Sequence[ToyReplica],
        moved: Sequence[asyncio.Event],
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> list[Coroutine[Any, Any, None]]:
        """What a member does beside its rounds."""
        if swarm.presence.status.role != "island":
            return []
        together = zip(swarm.chains, replicas, moved, strict=True)
        return [self._train(*one) for one in together]

    def applied(self, peer: PeerId, certificate: Certificate, exchange: Exchange | None) -> None:
        """A member has taken a round in; by this exchange, or by what others showed."""

    def came_or_went(self, peer: PeerId) -> None:
        """A member takes somebody for alive, silent or gone whom it did not before."""

    def record_of(self, peer: PeerId, fragment: int) -> PromiseRecord | None:
        """What a member has promised, where records are kept; read anew, as after a start."""
        if self.records is None:
            return None
        return PromiseRecord(self.records / f"{peer}-{fragment}", RUN, peer)

    def envelope(self, member: Member) -> bytes:
        """What a member says of itself; signed once, however many start at one moment."""
        now = asyncio.get_running_loop().time()
        if self.said.get(member.peer, (-1.0, b""))[0] != now:
            self.said[member.peer] = (now, member.swarm.presence.envelope())
        return self.said[member.peer][1]

    async def _train(self, chain: Chain, replica: ToyReplica, moved: asyncio.Event) -> None:
        while True:
            place = replica.place
            think = self.random.uniform(*self.think) / self.hurry.get(chain.me, 1.0)
            chain.update(eta=think, ready=False)
            await asyncio.sleep(think)
            if replica.place.previous != place.previous:
                continue
            replica.train(seed_of(chain.me, chain.fragment, place.round))
            tokens = self.tokens.get(chain.me, 1000)
            chain.update(
                ready=True,
                tokens=tokens,
                steps=10,
                weight=float(tokens),
                eta=0.0,
                norm=replica.norm(),
            )
            while replica.place.previous == place.previous:
                moved.clear()
                await moved.wait()

    async def kill(self, member: Member) -> None:
        """SIGKILL: the network breaks its links, its tasks end."""
        self.network.kill(member.peer)
        self.stopped.add(member.peer)
        member.task.cancel()
        await asyncio.wait([member.task])

    def restart(
        self,
        member: Member,
        saved: Sequence[ToyReplica] = (),
        *,
        upload: float | None = None,
    ) -> Member:
        """The same island again, from what it had committed, or had saved some time before."""
        replicas = saved or member.replicas
        for replica, chain in zip(member.replicas, member.swarm.chains, strict=True):
            replica.lineage = chain.lineage
        return self.start(member.identity, replicas=replicas, status="joining", upload=upload)

    def saved(self, member: Member) -> list[ToyReplica]:
        """What a checkpoint of a member would hold now."""
        pairs = zip(member.replicas, member.swarm.chains, strict=True)
        return [replica.saved(chain.lineage) for replica, chain in pairs]

    def living(self) -> list[Member]:
        return [m for m in self.members.values() if m.peer not in self.stopped]

    async def committed(self, rounds: int, seconds: float = 60.0, *, every: float = 0.05) -> float:
        """Wait until all who live have committed so many rounds; returns the time."""
        return await until(
            lambda: min(member.replica.place.round for member in self.living()) >= rounds,
            seconds,
            every=every,
        )

    def agree(self) -> None:
        """Raise unless all histories agree wherever they overlap."""
        seen: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        for replica in (one for member in self.members.values() for one in member.replicas):
            for number, fact in enumerate(replica.history, replica.begins):
                known = seen.setdefault((replica.fragment, number), fact)
                assert known == fact, f"round {number} of fragment {replica.fragment} differs"


def lengths(members: Sequence[Member]) -> list[int]:
    """How many rounds of its life each has applied."""
    return [len(member.replica.history) for member in members]


def expelled(by: Member) -> set[PeerId]:
    """Whom a member has expelled, by what it has told."""
    return {peer for peer, why in by.rejected if why.endswith("expelled")}


def contributes(member: Member, to: Member, since: int) -> bool:
    """Whether something of one member is in a round that another has applied since."""
    for certificate in to.replica.certificates[since:]:
        outcome = certificate.outcome
        mine = [n for n, c in enumerate(outcome.contributors) if c.peer == member.peer]
        if any(i.contributor in mine for part in outcome.parts for i in part.included):
            return True
    return False


@asynccontextmanager
async def simulated_swarm(
    count: int,
    *,
    seed: int = 0,
    size: int = 70_000,
    codec: str | tuple[str, ...] = "int4",  # several: as the links allow, the finest first
    think: tuple[float, float] = (0.3, 0.6),
    link: Link | None = None,
    patience: Patience | None = None,
    uploads: list[float] | None = None,
    mix: Mix = MEAN,
    fragments: int = 1,
    grouping: Grouping = UNGROUPED,
    sites: int = 1,
    records: Path | None = None,
    kind: type[ToyReplica] = ToyReplica,
    min_grace_s: float = Rules.min_grace_s,
    made: type[SimulatedSwarm] = SimulatedSwarm,
    roles: Sequence[str] = (),
    **more: Any,
) -> AsyncIterator[SimulatedSwarm]:
    """``count`` members that share a first roster; all are stopped at the end.

    ``more`` is for whatever is ``made``.
    """
    identities = [Identity.from_seed((i + 1).to_bytes(32, "big")) for i in range(count)]
    codecs = (codec,) if isinstance(codec, str) else codec
    range_codec = RangeCodec(codecs[0], dense=size - 1000)
    rules = Rules(
        size,
        codecs,
        range_codec.size_as,
        mix=mix,
        grouping=grouping,
        sharing=fragments,
        min_grace_s=min_grace_s,
    )
    network = MemoryNetwork(seed, link=link or Link(latency=0.02), upload=12.5e6, download=12.5e6)
    async with asyncio.TaskGroup() as group:
        swarm = made(
            network,
            size,
            range_codec,
            think,
            tuple(sorted(i.peer_id for i in identities)),
            group,
            random.Random(seed),
            patience or Patience(),
            rules,
            fragments,
            regions={i.peer_id: f"site-{n % sites}" for n, i in enumerate(identities)},
            records=records,
            kind=kind,
            roles={i.peer_id: role for i, role in zip(identities, roles, strict=False)},
            **more,
        )
        for index, identity in enumerate(identities):
            swarm.start(identity, upload=uploads[index] if uploads else None)
        yield swarm
        for member in swarm.members.values():
            member.task.cancel()
