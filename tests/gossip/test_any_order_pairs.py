"""Whatever befalls islands that meet in pairs, in whatever order: they meet again, and agree.

As :mod:`test_any_order`, for modes without certificates: gossip, push-sum, and fragments of them.
There is nothing that all have in common, so it is looked at what each has mixed in: no letter
twice, and of push-sum's weights nothing is lost or counted twice.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from ledger_kit import Counted, Ledger
from roamer_kit import Islander, Islands, ToyState, islands
from shares_kit import all_weights
from trouble_kit import Troubles

from protocols.identity import PeerId
from protocols.memory.transport import Link
from protocols.memory.virtual_time import run

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

SIZE = 256
HEALED_S = 600.0  # on the virtual clock
MOST = 7  # islands
NOISE = 0.02  # what a round's inner steps learn; islands begin 1.0 apart
KINDS = ("kill", "kill", "kill_old", "freeze", "slow", "narrow", "cut", "swap", "join", "all")
FOUND = (
    11,  # a share was taken back, and came after all once its receiver was no longer frozen
    23,  # the same, of two islands
)
Saved = list[tuple[torch.Tensor, int, float]]  # of each fragment: φ, round, and weight


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for, beside what happens."""

    rule: str
    islands: int
    think: tuple[float, float]  # seconds of training a round
    upload: float  # bytes a second, of each
    codec: str
    fragments: int
    neighbours: int
    staleness: int
    drop: float  # of all transfers
    deaths: bool  # whether anybody is killed


def drawn(dice: random.Random) -> Drawn:
    return Drawn(
        rule=dice.choice(["noloco", "average", "push-sum", "push-sum"]),
        islands=dice.choice([2, 3, 4, 5]),
        think=dice.choice([(1.0, 1.1), (0.3, 2.0), (0.12, 0.12)]),
        upload=dice.choice([3e4, 1e5, 1e7]),
        codec=dice.choice(["fp32", "int8"]),
        fragments=dice.choice([1, 1, 2]),
        neighbours=dice.choice([1, 1, 2]),
        staleness=dice.choice([2, 4]),
        drop=dice.choice([0.0, 0.0, 0.1]),
        deaths=dice.random() < 0.6,
    )


@dataclass
class Mishaps(Troubles):
    """Islands, and what befalls them."""

    swarm: Islands = field(kw_only=True)
    it: Drawn = field(kw_only=True)
    ledger: Ledger = field(default_factory=lambda: Ledger(SIZE))
    saved: dict[int, Saved] = field(default_factory=dict)  # some time ago
    born: int = 0

    def peers(self) -> list[PeerId]:
        return [one.peer for one in self.swarm.living()]

    def start(self, number: int, saved: Saved, *, newcomer: bool = False) -> None:
        states: list[ToyState] = []
        for fragment, (base, round_, weight) in enumerate(saved):
            state = Counted(self.ledger, base, self.swarm.codec, self.swarm.rule, fragment)
            state.place = replace(state.place, round=round_)
            state.blend.weight = weight
            states.append(state)
        one = self.swarm.launch(number, states, newcomer=newcomer)
        for state, roamer in zip(states, one.roamers, strict=True):
            assert isinstance(state, Counted)
            self.ledger.add(state.blend.weight, state.base)
            state.me = roamer.me
        self.swarm.shape(self.it.upload, number)

    def found(self) -> None:
        """One that is there from the beginning."""
        self.born += 1
        pieces = [torch.randn(SIZE) + 1 for _ in range(self.it.fragments)]
        self.start(self.born, [(piece, 0, 1.0) for piece in pieces])

    def join(self) -> None:
        """A newcomer, with the state of somebody who is there."""
        self.born += 1
        donor = self.dice.choice(self.swarm.living())
        pieces = [(state.base.clone(), state.place.round, 1.0) for state in donor.states]
        self.start(self.born, pieces, newcomer=True)

    def save(self, number: int) -> Saved:
        """What a checkpoint would hold now."""
        one = self.swarm.members[number]
        return [
            (s.base.clone(), s.place.round, roamer.account.balance.own if roamer.account else 1.0)
            for s, roamer in zip(one.states, one.roamers, strict=True)
        ]

    async def befall(self) -> None:
        """One thing, to somebody to whom nothing is happening yet."""
        swarm, dice = self.swarm, self.dice
        busy = [n for n, one in swarm.members.items() if one.peer in self.busy]
        free = [n for n in swarm.members if n not in busy and n not in swarm.gone]
        for number in free:
            if dice.random() < 0.3:
                self.saved[number] = self.save(number)
        if not free:
            return
        who, kind = dice.choice(free), dice.choice(KINDS)
        peer = swarm.members[who].peer
        if not self.it.deaths and kind in ("kill", "kill_old", "swap", "all"):
            kind = "freeze"
        match kind:
            case "kill":
                self.begin(peer, self._killed(who, dice.choice([0.05, 1, 5, 20]), self.save(who)))
            case "kill_old":
                saved = self.saved.get(who) or self.save(who)
                self.begin(peer, self._killed(who, dice.choice([0.05, 1, 5, 20]), saved))
            case "freeze":
                self.begin(peer, self.frozen(peer, dice.choice([0.5, 3, 15])))
            case "slow":
                self.begin(peer, self.slowed(peer, dice.choice([2, 10])))
            case "narrow":
                self.begin(peer, self.narrowed(peer, dice.choice([5, 40]), 300.0))
            case "cut" if not self.parted and len(swarm.living()) > 1:
                self.spawn(self.cut_off(dice.choice([0.3, 3, 12, 30])))
            case "swap" if len(swarm.living()) > 1:
                if dice.random() < 0.5:
                    swarm.members[who].roamer.update(status="leaving")
                    await asyncio.sleep(dice.choice([0.01, 0.3]))
                await self._gone(who)
                self.join()
            case "join" if len(swarm.living()) < MOST:
                self.join()
            case "all" if dice.random() < 0.3:
                for one in free:
                    old = self.saved.get(one) if dice.random() < 0.3 else None
                    again = self._killed(one, dice.choice([0.05, 1, 3]), old or self.save(one))
                    self.begin(swarm.members[one].peer, again)

    async def _gone(self, who: int) -> None:
        one = self.swarm.members[who]
        self.ledger.gone(one)
        await self.swarm.kill(who)

    async def _killed(self, who: int, seconds: float, saved: Saved) -> None:
        await self._gone(who)
        await asyncio.sleep(seconds)
        self.start(who, saved)
        self.busy.discard(self.swarm.members[who].peer)


def met(one: Islander, fragment: int, since: float) -> set[PeerId]:
    """Whose letters an island has mixed in since then."""
    rounds = [r for r in one.rounds if r.fragment == fragment and r.began >= since]
    return {peer for rounded in rounds for each in rounded.exchanged for peer in each.met.mixed}


def small(swarm: Islands) -> None:
    """Nothing has been kept that nobody needs any more."""
    for one in swarm.living():
        for roamer in one.roamers:
            core, box = roamer.core, roamer.letters
            stamps = {stamp for held in core._held.values() for stamp in held}
            assert stamps == box.held.keys()
            assert len(stamps) <= box.room
            assert len(roamer.own._bodies) <= len(core._opened) + len(core._failed)
            assert len(box._arriving) <= box.room
            assert not box._pushes
            assert not box.transfers.receiving
    tasks = len(asyncio.all_tasks())
    assert tasks < 20 * len(swarm.living()), tasks


async def anything_happens(seed: int) -> None:
    dice = random.Random(seed)
    it = drawn(dice)
    torch.manual_seed(seed)

    def think(number: int) -> float:
        return dice.uniform(*it.think)

    async with islands(
        0,
        rule=it.rule,
        codec=it.codec,
        size=SIZE,
        learn=lambda number, done: NOISE * torch.randn(SIZE),
        link=Link(latency=0.02, drop=it.drop),
        neighbours=it.neighbours,
        staleness=it.staleness,
        seconds=think,
    ) as swarm:
        async with asyncio.TaskGroup() as group:
            mishaps = Mishaps(
                swarm.network, dice, group.create_task, it.upload, it.drop, swarm=swarm, it=it
            )
            for _ in range(it.islands):
                mishaps.found()
            now = asyncio.get_running_loop().time
            end = now() + dice.uniform(20, 60)
            while now() < end:
                await asyncio.sleep(dice.choice([0.05, 0.5, 2, 6]) * dice.uniform(0.5, 1.5))
                await mishaps.befall()
        healed, everybody = now(), {one.peer for one in swarm.living()}

        def together() -> bool:
            return all(
                met(one, fragment, healed) >= everybody - {one.peer}
                for one in swarm.living()
                for fragment in range(it.fragments)
            )

        await swarm.until(together, HEALED_S)
        for fragment in range(it.fragments):
            values = torch.stack([one.states[fragment].base for one in swarm.living()])
            apart = (values - values.mean(0)).square().mean().sqrt().item()
            assert apart < 20 * NOISE, apart
        swarm.limit = 0  # nobody begins another round
        await asyncio.sleep(3.0)
        roamers = [roamer for one in swarm.living() for roamer in one.roamers]

        def arrived() -> bool:
            there = {one.peer for one in swarm.living()}
            doubts = any(roamer.core.owed & there for roamer in roamers)
            return not doubts and not any(r._sending or r.letters._pushes for r in roamers)

        await swarm.until(arrived, HEALED_S)
        await asyncio.sleep(6.0)
        small(swarm)
        if it.rule == "push-sum":
            mishaps.ledger.check(swarm.living())
            for books in swarm.books.values():  # also of those who are gone for good
                brought = sum(book.brought for book in books.values())
                assert all_weights(books) == pytest.approx(brought, abs=1e-9)


@pytest.mark.parametrize("seed", [*FOUND, 1, 2])
def test_whatever_happens_islands_meet_and_agree(seed: int) -> None:
    run(anything_happens(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *range(100, 400)])
def test_whatever_happens_islands_meet_and_agree_many_times(seed: int) -> None:
    run(anything_happens(seed))
