"""What befalls those on a simulated network, drawn from a seed."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from catching_up_kit import Scene, coming_together, played, scene
from exchange_kit import until
from simulated_swarm import Member

from gossip.plans.grouping import UNGROUPED, Grouping
from gossip.plans.mix import MEAN, Mix
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork

Spawn = Callable[[Coroutine[Any, Any, None]], object]
HEALED_S = 90.0  # on the virtual clock, to come together
KINDS = ("kill", "kill", "kill_old", "freeze", "slow", "cut", "swap", "leave", "join", "all")


@dataclass
class Troubles(ABC):
    """Those of one network to whom things happen, and what can befall any of them."""

    network: MemoryNetwork
    dice: random.Random
    spawn: Spawn
    upload: float  # bytes a second, of each
    drop: float = 0.0  # of all transfers
    busy: set[PeerId] = field(default_factory=set)  # something befalls them already
    parted: bool = False

    @abstractmethod
    def peers(self) -> list[PeerId]:
        """Who is there."""

    def begin(self, who: PeerId, what: Coroutine[Any, Any, None]) -> None:
        """Let something happen to somebody, and nothing else meanwhile."""
        self.busy.add(who)
        self.spawn(what)

    async def frozen(self, who: PeerId, seconds: float) -> None:
        """Its process stands still."""
        self.network.freeze(who)
        await asyncio.sleep(seconds)
        self.network.thaw(who)
        self.busy.discard(who)

    async def slowed(self, who: PeerId, seconds: float) -> None:
        """Its links get long, each as it comes."""

        def links(latency: Callable[[], float]) -> None:
            for other in self.peers():
                if other != who:
                    link = Link(latency=latency(), drop=self.drop)
                    self.network.set_link(who, other, link)

        links(lambda: self.dice.uniform(0.1, 1.0))
        await asyncio.sleep(seconds)
        links(lambda: 0.02)
        self.busy.discard(who)

    async def narrowed(self, who: PeerId, seconds: float, carries: float) -> None:
        """Its link carries so many bytes a second."""
        node = self.network.node(who)
        assert node is not None
        node.upload = node.download = carries
        await asyncio.sleep(seconds)
        node.upload = node.download = self.upload
        node.up_free = node.down_free = 0.0  # what has queued up meanwhile
        self.busy.discard(who)

    async def cut_off(self, seconds: float) -> None:
        """Some do not reach the others."""
        peers, self.parted = self.peers(), True
        self.dice.shuffle(peers)
        first = self.dice.randrange(1, len(peers))
        self.network.partition(set(peers[:first]), set(peers[first:]))
        await asyncio.sleep(seconds)
        self.network.heal()
        self.parted = False

    async def severed(self, one: PeerId, other: PeerId, seconds: float) -> None:
        """Two do not reach each other, or one of them the other."""
        self.network.cut(one, other, both=self.dice.random() < 0.5)
        await asyncio.sleep(seconds)
        self.network.splice(one, other)


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for in a swarm of certified rounds, beside what happens."""

    founders: int
    joiners: int
    think: tuple[float, float]  # seconds of training a round
    upload: float  # bytes a second, of each
    codec: str
    fragments: int
    records: bool  # whether members keep what they promised, over restarts
    size: int = 70_000
    grouping: Grouping = UNGROUPED
    sites: int = 1
    mix: Mix = MEAN
    most: int = 8  # members
    kinds: tuple[str, ...] = KINDS


@dataclass
class Mishaps(Troubles):
    """Members of certified rounds, and what befalls them."""

    here: Scene = field(kw_only=True)
    most: int = 8  # members
    kinds: Sequence[str] = KINDS
    sites: int = 1
    members: dict[PeerId, Member] = field(default_factory=dict)
    saved: dict[PeerId, Sequence[Any]] = field(default_factory=dict)  # some time ago
    born: int = 0

    def peers(self) -> list[PeerId]:
        return list(self.members)

    def join(self, role: str = "island") -> None:
        self.born += 1
        identity = Identity.from_seed(self.born.to_bytes(32, "little"))
        if self.sites > 1 and (site := self.born % (self.sites + 1)):  # else it names none
            self.here.swarm.regions[identity.peer_id] = f"site-{site - 1}"
        self.here.swarm.roles[identity.peer_id] = role
        self.members[identity.peer_id] = self.here.join(identity, self.upload)

    async def befall(self) -> None:
        """One thing, to somebody to whom nothing is happening yet."""
        for peer, member in self.members.items():
            if peer not in self.busy and self.dice.random() < 0.3:
                self.saved[peer] = self.here.swarm.saved(member)
        free = [member for peer, member in self.members.items() if peer not in self.busy]
        if not free:
            return
        who, dice = self.dice.choice(free), self.dice
        peer, several = who.peer, len(self.members) > 1
        match dice.choice(self.kinds):
            case "kill":
                self.begin(peer, self._killed(who, dice.choice([0.05, 1, 5, 20]), ()))
            case "kill_old":
                saved = self.saved.get(peer, ())
                self.begin(peer, self._killed(who, dice.choice([0.05, 1, 5, 20]), saved))
            case "freeze":
                self.begin(peer, self.frozen(peer, dice.choice([0.5, 3, 15])))
            case "slow":
                self.begin(peer, self.slowed(peer, dice.choice([2, 10])))
            case "narrow":
                carries = self.upload / dice.choice([3, 10])
                self.begin(peer, self.narrowed(peer, dice.choice([2, 10]), carries))
            case "cut" if not self.parted and several:
                self.spawn(self.cut_off(dice.choice([0.3, 3, 12])))
            case "sever" if several:
                other = dice.choice([one for one in self.members if one != peer])
                self.spawn(self.severed(peer, other, dice.choice([0.3, 3, 12])))
            case "swap" if self._expendable(who):
                await self._gone(who)
                self.join(self.here.swarm.role(peer))
            case "leave" if self._expendable(who) and self._others_train(who):
                who.swarm.presence.note(status="leaving", ready=False)
                who.swarm.presence.tell()
                await asyncio.sleep(dice.choice([0.01, 0.3]))
                await self._gone(who)
            case "join" if len(self.members) < self.most:
                self.join()
            case "all" if dice.random() < 0.3:
                for one in free:
                    old = self.saved.get(one.peer, ()) if dice.random() < 0.3 else ()
                    self.begin(one.peer, self._killed(one, dice.choice([0.05, 1, 3]), old))

    def _expendable(self, who: Member) -> bool:
        """Whether in no fragment, on no side of a fork, it is the last of those who decide.

        Who would come back from a kill with nothing is none of them.
        """
        there = [one for one in self.members.values() if self.here.swarm.keeps(one)]
        others = {one.peer for one in there} - {who.peer}
        replicas = [replica for member in self.members.values() for replica in member.replicas]
        return all(others.intersection(replica.roster) for replica in replicas)

    def _others_train(self, who: Member) -> bool:
        """Whether it is not the last island."""
        others = self.members.keys() - {who.peer}
        return any(self.here.swarm.role(peer) == "island" for peer in others)

    async def _gone(self, who: Member) -> None:
        """For good."""
        del self.members[who.peer], self.here.swarm.members[who.peer]
        await self.here.swarm.kill(who)

    async def _killed(self, who: Member, seconds: float, saved: Sequence[Any]) -> None:
        await self.here.swarm.kill(who)
        await asyncio.sleep(seconds)
        again = self.here.swarm.restart(who, saved, upload=self.upload)
        self.here.serve(again)
        self.members[who.peer] = again
        self.busy.discard(who.peer)


async def befallen(
    here: Scene,
    upload: float,
    dice: random.Random,
    newcomers: Sequence[str],
    made: type[Mishaps] = Mishaps,
    lasts: tuple[float, float] = (20, 60),
    **how: Any,
) -> list[Member]:
    """Have all that happen, for ``lasts`` seconds, once ``newcomers`` of these roles are coming.

    Returns who is there when the network is whole again.
    """
    async with asyncio.TaskGroup() as group:
        mishaps = made(here.swarm.network, dice, group.create_task, upload, here=here, **how)
        mishaps.members.update({member.peer: member for member in here.founders})
        for role in newcomers:
            mishaps.join(role)
        now = asyncio.get_running_loop().time
        end = now() + dice.uniform(*lasts)
        while now() < end:
            await asyncio.sleep(dice.choice([0.05, 0.5, 2, 6]) * dice.uniform(0.5, 1.5))
            await mishaps.befall()
    return list(mishaps.members.values())


def anything_happens(
    seed: int, draw: Callable[[random.Random], Drawn], tmp_path: Path, *, healed_s: float = HEALED_S
) -> None:
    """Play what a seed stands for; all are to be one swarm ``healed_s`` virtual seconds later."""
    dice = random.Random(seed)
    it = draw(dice)

    async def story() -> None:
        async with scene(
            it.founders,
            size=it.size,
            codec=it.codec,
            think=it.think,
            uploads=[it.upload] * it.founders,
            fragments=it.fragments,
            min_grace_s=1.0,  # as in a run's defaults
            records=tmp_path if it.records else None,
            mix=it.mix,
            grouping=it.grouping,
            sites=it.sites,
            seed=seed,
        ) as here:
            newcomers = ["island"] * it.joiners
            how: dict[str, Any] = {"most": it.most, "kinds": it.kinds, "sites": it.sites}
            members = await befallen(here, it.upload, dice, newcomers, **how)
            await until(coming_together(members), healed_s)

    played(story)
