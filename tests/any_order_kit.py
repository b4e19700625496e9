"""What may befall members of certified rounds, in whatever order, drawn from a seed.

They are killed and start again from what they had saved, now or some time before; they are frozen,
slowed, cut off, replaced by others, leave, and go down all at once.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from catching_up_kit import Scene
from simulated_swarm import Member

from protocols.identity import Identity, PeerId
from protocols.memory import Link

HEALED_S = 90.0  # on the virtual clock, to come together
MOST = 8  # members
KINDS = ("kill", "kill", "kill_old", "freeze", "slow", "cut", "swap", "leave", "join", "all")


@dataclass
class Mishaps:
    """Members, and what befalls them."""

    here: Scene
    upload: float  # bytes a second, of each
    dice: random.Random
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    members: dict[PeerId, Member] = field(default_factory=dict)
    saved: dict[PeerId, Sequence[Any]] = field(default_factory=dict)  # some time ago
    busy: set[PeerId] = field(default_factory=set)  # something befalls them already
    cut: bool = False
    born: int = 0

    def join(self, role: str = "island") -> None:
        self.born += 1
        identity = Identity.from_seed(self.born.to_bytes(32, "little"))
        self.here.swarm.roles[identity.peer_id] = role
        member = self.here.join(identity, self.upload)
        self.members[member.peer] = member

    async def befall(self) -> None:
        """One thing, to somebody to whom nothing is happening yet."""
        for peer, member in self.members.items():
            if peer not in self.busy and self.dice.random() < 0.3:
                self.saved[peer] = self.here.swarm.saved(member)
        free = [member for peer, member in self.members.items() if peer not in self.busy]
        if not free:
            return
        who, dice = self.dice.choice(free), self.dice
        match dice.choice(KINDS):
            case "kill":
                self._begin(who, self._killed(who, dice.choice([0.05, 1, 5, 20]), ()))
            case "kill_old":
                saved = self.saved.get(who.peer, ())
                self._begin(who, self._killed(who, dice.choice([0.05, 1, 5, 20]), saved))
            case "freeze":
                self._begin(who, self._frozen(who, dice.choice([0.5, 3, 15])))
            case "slow":
                self._begin(who, self._slowed(who, dice.choice([2, 10])))
            case "cut" if not self.cut and len(self.members) > 1:
                self.spawn(self._cut_off(dice.choice([0.3, 3, 12])))
            case "swap" if self._expendable(who):
                await self._gone(who)
                self.join(self.here.swarm.role(who.peer))
            case "leave" if self._expendable(who) and self._others_train(who):
                who.swarm.presence.note(status="leaving", ready=False)
                who.swarm.presence.tell()
                await asyncio.sleep(dice.choice([0.01, 0.3]))
                await self._gone(who)
            case "join" if len(self.members) < MOST:
                self.join()
            case "all" if dice.random() < 0.3:
                for one in free:
                    old = self.saved.get(one.peer, ()) if dice.random() < 0.3 else ()
                    self._begin(one, self._killed(one, dice.choice([0.05, 1, 3]), old))

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

    def _begin(self, who: Member, what: Coroutine[Any, Any, None]) -> None:
        self.busy.add(who.peer)
        self.spawn(what)

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

    async def _frozen(self, who: Member, seconds: float) -> None:
        self.here.swarm.network.freeze(who.peer)
        await asyncio.sleep(seconds)
        self.here.swarm.network.thaw(who.peer)
        self.busy.discard(who.peer)

    async def _slowed(self, who: Member, seconds: float) -> None:
        def links(latency: Callable[[], float]) -> None:
            for other in [peer for peer in self.members if peer != who.peer]:
                self.here.swarm.network.set_link(who.peer, other, Link(latency=latency()))

        links(lambda: self.dice.uniform(0.1, 1.0))
        await asyncio.sleep(seconds)
        links(lambda: 0.02)
        self.busy.discard(who.peer)

    async def _cut_off(self, seconds: float) -> None:
        peers, self.cut = list(self.members), True
        self.dice.shuffle(peers)
        first = self.dice.randrange(1, len(peers))
        self.here.swarm.network.partition(set(peers[:first]), set(peers[first:]))
        await asyncio.sleep(seconds)
        self.here.swarm.network.heal()
        self.cut = False


async def befallen(
    here: Scene, upload: float, dice: random.Random, newcomers: Sequence[str]
) -> list[Member]:
    """Have all that happen for a while, once ``newcomers`` of these roles are on their way.

    Returns who is there when the network is whole again.
    """
    async with asyncio.TaskGroup() as group:
        mishaps = Mishaps(here, upload, dice, group.create_task)
        mishaps.members.update({member.peer: member for member in here.founders})
        for role in newcomers:
            mishaps.join(role)
        now = asyncio.get_running_loop().time
        end = now() + dice.uniform(20, 60)
        while now() < end:
            await asyncio.sleep(dice.choice([0.05, 0.5, 2, 6]) * dice.uniform(0.5, 1.5))
            await mishaps.befall()
    return list(mishaps.members.values())
