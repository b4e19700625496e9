"""Whatever befalls members, in whatever order: they end as one swarm, and everybody's work counts.

Members are killed and start again from what they had saved, now or some time before; they are
frozen, slowed, cut off, replaced by others, leave, and go down all at once. What happens when is
drawn from a seed; what a seed found once stays in ``FOUND``.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from catching_up_kit import Scene, coming_together, played, scene
from exchange_kit import until
from simulated_swarm import Member
from toy_replica import ToyReplica

from protocols.identity import Identity, PeerId
from protocols.memory import Link

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

HEALED_S = 90.0  # on the virtual clock
MOST = 8  # members
KINDS = ("kill", "kill", "kill_old", "freeze", "slow", "cut", "swap", "leave", "join", "all")
FOUND = (
    6,  # a round behind some who had all started again, and so held none of its parts
    221,  # two sides of equal work, and the one with more members was to come over
)


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for, beside what happens."""

    founders: int
    joiners: int
    think: tuple[float, float]  # seconds of training a round
    upload: float  # bytes a second, of each
    codec: str
    fragments: int
    records: bool  # whether members keep what they promised, over restarts


def drawn(dice: random.Random) -> Drawn:
    return Drawn(
        founders=dice.choice([1, 2, 3, 4]),
        joiners=dice.choice([1, 2, 3]),
        think=dice.choice([(1.0, 1.1), (0.3, 1.5), (0.12, 0.12)]),
        upload=dice.choice([5e5, 1e6, 1e7]),
        codec=dice.choice(["fp32", "int4"]),
        fragments=dice.choice([1, 1, 2]),
        records=dice.random() < 0.6,
    )


@dataclass
class Mishaps:
    """Members, and what befalls them."""

    here: Scene
    it: Drawn
    dice: random.Random
    spawn: Callable[[Coroutine[Any, Any, None]], object]
    members: dict[PeerId, Member] = field(default_factory=dict)
    saved: dict[PeerId, Sequence[ToyReplica]] = field(default_factory=dict)  # some time ago
    busy: set[PeerId] = field(default_factory=set)  # something befalls them already
    cut: bool = False
    born: int = 0

    def join(self) -> None:
        self.born += 1
        member = self.here.join(
            Identity.from_seed(self.born.to_bytes(32, "little")), self.it.upload
        )
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
                self.join()
            case "leave" if self._expendable(who):
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
        """Whether in no fragment, on no side of a fork, it is the last of those who decide."""
        others = self.members.keys() - {who.peer}
        replicas = [replica for member in self.members.values() for replica in member.replicas]
        return all(others.intersection(replica.roster) for replica in replicas)

    def _begin(self, who: Member, what: Coroutine[Any, Any, None]) -> None:
        self.busy.add(who.peer)
        self.spawn(what)

    async def _gone(self, who: Member) -> None:
        """For good."""
        del self.members[who.peer], self.here.swarm.members[who.peer]
        await self.here.swarm.kill(who)

    async def _killed(self, who: Member, seconds: float, saved: Sequence[ToyReplica]) -> None:
        await self.here.swarm.kill(who)
        await asyncio.sleep(seconds)
        again = self.here.swarm.restart(who, saved, upload=self.it.upload)
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


def anything_happens(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    it = drawn(dice)

    async def story() -> None:
        async with scene(
            it.founders,
            codec=it.codec,
            think=it.think,
            uploads=[it.upload] * it.founders,
            fragments=it.fragments,
            min_grace_s=1.0,  # as in a run's defaults
            records=tmp_path if it.records else None,
            seed=seed,
        ) as here:
            async with asyncio.TaskGroup() as group:
                mishaps = Mishaps(here, it, dice, group.create_task)
                mishaps.members.update({member.peer: member for member in here.founders})
                for _ in range(it.joiners):
                    mishaps.join()
                now = asyncio.get_running_loop().time
                end = now() + dice.uniform(20, 60)
                while now() < end:
                    await asyncio.sleep(dice.choice([0.05, 0.5, 2, 6]) * dice.uniform(0.5, 1.5))
                    await mishaps.befall()
            members = list(mishaps.members.values())
            await until(coming_together(members), HEALED_S)

    played(story)


@pytest.mark.parametrize("seed", [*FOUND, *range(4)])
def test_whatever_happens_there_is_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_whatever_happens_there_is_one_swarm_many_times(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)
