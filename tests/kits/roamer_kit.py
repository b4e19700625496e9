"""Islands that gossip on the simulated network, with toy parameters and Atoll's own arithmetic."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from blake3 import blake3
from exchange_kit import until
from shares_kit import PaperBook

from bootstrap.manifest import Manifest
from diloco.mixing import ALPHA, BETA
from diloco.optimizers import Rates, named
from gossip.hooks import Hooks
from gossip.membership.members import Membership
from gossip.membership.presence import Presence
from gossip.membership.sketch import sketch
from gossip.membership.spread import WholeSketch
from gossip.membership.standing import first_announcement
from gossip.pairs.account import Account
from gossip.pairs.letter_times import LetterTerms
from gossip.pairs.letters import Letter
from gossip.pairs.meeting import Habits
from gossip.pairs.roamer import Roamer
from gossip.pairs.rounded import Acquaintance, Rounded
from gossip.pairs.swarm import Pairs
from gossip.place import Place
from gossip.plans.certificate import genesis
from gossip.wiring import Wiring
from node.island.choosing import Chooser
from node.island.pace import Pace
from node.monitor.event_log import EventLog
from node.replicas.blending import Blend
from node.run_rules import hidden_steps
from protocols.codecs import Encoded, RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.memory.virtual_time import inline
from protocols.tasks import Tasks

RUN = b"r" * 32


class ToyState:
    """φ, m and θ of one island; its inner steps add ``learn(island, round)`` to φ."""

    def __init__(
        self, start: torch.Tensor, codec: RangeCodec, rule: str, fragment: int = 0
    ) -> None:
        self.base, self.sent = start.clone(), start.clone()
        self.blend = Blend(self.base, codec, shares=rule == "push-sum")
        noloco = rule == "noloco"
        self.rule = named("heavyball" if noloco else "sgd")
        self.vectors = self.rule.init(start).vectors
        self.rates = Rates(BETA, ALPHA) if noloco else Rates(1.0, 0.0)
        self.place = Place(RUN, fragment, 0, genesis(RUN), self.digest(), 0)

    def digest(self) -> bytes:
        return blake3(self.base.view(torch.uint8).numpy()).digest()

    @property
    def lost(self) -> float:
        return self.blend.lost

    @property
    def gives(self) -> bool:
        return self.blend.gives

    async def start(self) -> None:
        self.blend.start(self.sent)

    async def encode(self, receivers: int, codec: str) -> tuple[Encoded, float]:
        return self.blend.encode(receivers, codec)

    async def take_back(self, letter: Encoded | None, weight: float) -> None:
        self.blend.take_back(letter, weight)

    async def mix(self, letters: Sequence[tuple[Letter, Encoded | None]]) -> float:
        return self.blend.mix([(one.body, one.weight, own) for one, own in letters])

    async def finish(self, round_: int, *, ours: bool) -> None:
        assert ours
        self.blend.step(self.rule, self.vectors, self.rates)
        self.place = replace(self.place, round=round_ + 1, state=self.digest())


@dataclass
class Islander:
    """One running island; ``seconds`` its inner steps take."""

    identity: Identity
    states: list[ToyState]  # by fragment
    roamers: list[Roamer]
    task: asyncio.Task[None]
    rounds: list[Rounded] = field(default_factory=list)
    rejected: list[tuple[PeerId, str]] = field(default_factory=list)
    noticed: list[str] = field(default_factory=list)
    chooser: Chooser | None = None
    steps: list[int] = field(default_factory=list)  # H of each round, where there is a chooser

    def __post_init__(self) -> None:
        self.whole = WholeSketch(len(self.states), paired=True)

    @property
    def peer(self) -> PeerId:
        return self.identity.peer_id

    @property
    def state(self) -> ToyState:
        return self.states[0]

    @property
    def roamer(self) -> Roamer:
        return self.roamers[0]

    @property
    def weight(self) -> float:
        """Push-sum weight of its first fragment that is here."""
        return weight_here(self.state, self.roamer)

    def outcomes(self) -> list[str]:
        """How its exchanges ended, in order."""
        return [one.met.outcome for rounded in self.rounds for one in rounded.exchanged]


Learn = Callable[[int, int], torch.Tensor]  # by number of the island and its own count of rounds


@dataclass
class Islands:
    """Islands by number on one network."""

    network: MemoryNetwork
    group: asyncio.TaskGroup
    size: int
    codec: RangeCodec
    rule: str
    learn: Learn
    neighbours: int = 1
    more: Callable[[float, float, float], int] = lambda distance, progress, lost: 0
    staleness: int = 4
    # what letters may have and H follows from; None: ``codec``, and ``seconds`` a round
    manifest: Manifest | None = None
    step_s: float = 0.05  # of an inner step, where there is a manifest
    seconds: Callable[[int], float] = lambda number: 1.0
    members: dict[int, Islander] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    # what is on disk of push-sum's weights, which outlives who is killed; by fragment
    books: dict[int, dict[PeerId, PaperBook]] = field(default_factory=lambda: defaultdict(dict))
    random: random.Random = field(default_factory=lambda: random.Random(1))
    limit: int = 10**9

    def start(
        self, number: int, start: torch.Tensor, round_: int = 0, weight: float = 1.0
    ) -> Islander:
        state = ToyState(start, self.codec, self.rule)
        state.place = replace(state.place, round=round_)
        state.blend.weight = weight
        return self.launch(number, [state])

    def launch(self, number: int, states: list[ToyState], *, newcomer: bool = False) -> Islander:
        """Start an island with its state of each fragment."""
        identity = Identity.from_seed((number + 1).to_bytes(32, "big"))
        peer = identity.peer_id
        transport = self.wired(identity, self.network.join(peer))
        loop = asyncio.get_running_loop()
        group = asyncio.TaskGroup()
        spawn = Tasks(group).spawn

        wiring = Wiring(transport, identity, RUN, self.codec, spawn, inline, loop.time)
        incarnation = int(loop.time() * 1000) + 1
        announce = first_announcement(peer, states[0].place, version="0", incarnation=incarnation)
        presence = Presence(
            wiring,
            Membership(peer),
            announce,
            lambda: [state.place for state in states],
            wall=lambda: 1_000_000.0 + loop.time(),
        )
        moved = [asyncio.Event() for _ in states]
        rounds: list[Rounded] = []
        rejected: list[tuple[PeerId, str]] = []
        noticed: list[str] = []
        acquaintance = Acquaintance([self.size] * len(states))

        def applied(rounded: Rounded) -> None:
            rounds.append(rounded)
            moved[rounded.fragment].set()

        def roamer(state: ToyState) -> Roamer:
            fragment = state.place.fragment
            account = None
            if self.rule == "push-sum":
                book = self.books[fragment].setdefault(peer, PaperBook(state.blend.weight))
                account = Account(state.blend.weight, book, inline)
                state.blend.weight = account.balance.own
            seed = RUN + bytes([fragment] if fragment else [])
            return Roamer(
                wiring,
                state,
                presence,
                Habits(seed, self.staleness, one_way=self.rule == "push-sum"),
                self.size,
                acquaintance,
                self._terms(),
                neighbours=self.neighbours,
                more=self.more,
                applied=applied,
                rejected=lambda who, error: rejected.append((who, str(error))),
                notice=noticed.append,
                newcomer=newcomer,
                account=account,
            )

        roamers = [roamer(state) for state in states]
        pairs = Pairs(roamers, Hooks(rejected=roamers[0].rejected))

        async def live() -> None:
            async with group:
                for other in self.living():
                    if other.peer != peer:
                        presence.learn(other.roamer.presence.envelope())
                group.create_task(pairs.run())
                for fragment in range(len(states)):
                    group.create_task(self._train(number, islander, fragment, moved[fragment]))

        islander = Islander(
            identity, states, roamers, self.group.create_task(live()), rounds, rejected, noticed
        )
        if self.manifest is not None:
            pace = Pace(steps_per_second=1 / self.step_s)
            islander.chooser = Chooser(self.manifest, pace, EventLog())
            islander.roamer.note(steps_per_second=pace.steps_per_second)
        self.members[number] = islander
        self.gone.discard(number)
        return islander

    def wired(self, identity: Identity, transport: MemoryTransport) -> Any:
        """The transport that an island uses."""
        return transport

    def _terms(self) -> LetterTerms:
        if self.manifest is None:
            return LetterTerms((self.codec.name,))
        rounds = self.manifest.rounds
        return LetterTerms(rounds.allowed_codecs, rounds.exposed, hidden_steps(rounds))

    def _steps_s(self, islander: Islander) -> float:
        """Seconds that the inner steps of the next round take, as many as its chooser says."""
        chooser, roamer = islander.chooser, islander.roamer
        assert chooser is not None
        for took in roamer.timed():
            chooser.timed(took)
        machine = self.network.node(islander.peer)  # the simulated transport times no pushes
        assert machine is not None
        roamer.note(upload=machine.upload, download=machine.download)
        islander.steps.append(chooser.steps(roamer.membership.members_alive(roamer.now())))
        roamer.note(wanted_steps=chooser.wanted)
        return islander.steps[-1] * self.step_s

    def shape(self, bytes_a_second: float, *numbers: int) -> None:
        """Have the links of some islands, or of all, carry so much both ways."""
        for number in numbers or self.members:
            machine = self.network.node(self.members[number].peer)
            assert machine is not None
            machine.upload = machine.download = bytes_a_second

    async def _train(
        self, number: int, islander: Islander, fragment: int, moved: asyncio.Event
    ) -> None:
        roamer, state, done = islander.roamers[fragment], islander.states[fragment], 0
        while done < self.limit:
            paced = islander.chooser is not None
            seconds = self._steps_s(islander) if paced else self.seconds(number)
            roamer.update(eta=seconds)
            await asyncio.sleep(seconds)
            delta = self.learn(number, done)
            state.sent = state.base + delta
            place = state.place
            piece = sketch(state.sent, RUN, start=fragment * self.size)
            if whole := islander.whole.add(fragment, place.round, piece):
                roamer.note(sketch_round=whole[0], sketch=whole[1])
            moved.clear()
            roamer.update(ready=True, eta=0.0, norm=delta.norm().item())
            await moved.wait()
            done += 1

    def living(self) -> list[Islander]:
        return [m for number, m in self.members.items() if number not in self.gone]

    async def kill(self, number: int) -> None:
        """SIGKILL: the network breaks its links, its tasks end."""
        islander = self.members[number]
        self.network.kill(islander.peer)
        self.gone.add(number)
        islander.task.cancel()
        await asyncio.wait([islander.task])

    def values(self) -> torch.Tensor:
        """φ of the living, [islands, size]."""
        return torch.stack([one.state.base for one in self.living()])

    def spread(self) -> float:
        """RMS distance of φ to the mean of the living."""
        values = self.values().double()
        return (values - values.mean(0)).square().mean().sqrt().item()

    async def until(self, true: Callable[[], bool], seconds: float = 1000.0) -> None:
        """Wait for a condition."""
        await until(true, seconds, every=0.05)

    async def rounds(self, count: int, seconds: float = 1000.0) -> None:
        """Until all that live have come through so many more rounds of their own."""
        before = {one.peer: len(one.rounds) for one in self.living()}
        await self.until(
            lambda: all(len(o.rounds) >= before.get(o.peer, 0) + count for o in self.living()),
            seconds,
        )


@asynccontextmanager
async def islands(
    count: int,
    *,
    rule: str = "average",
    codec: str = "fp32",
    size: int = 3000,
    learn: Learn | None = None,
    spread: float = 1.0,
    link: Link | None = None,
    made: type[Islands] = Islands,
    **more: Any,
) -> AsyncIterator[Islands]:
    """``count`` islands that begin ``spread`` apart; ended at the end."""
    network = MemoryNetwork(3, link=link or Link(latency=0.02))
    async with asyncio.TaskGroup() as group:
        still = torch.zeros(size)
        swarm = made(
            network,
            group,
            size,
            RangeCodec(codec, size),
            rule,
            learn or (lambda number, done: still),
            **more,
        )
        for number in range(count):
            generator = torch.Generator().manual_seed(number)
            swarm.start(number, spread * torch.randn(size, generator=generator) + 1)
        yield swarm
        for one in swarm.members.values():
            one.task.cancel()


def weight_here(state: ToyState, roamer: Roamer) -> float:
    """Push-sum weight that is mixed in, or waits for it: what an account has to say."""
    return state.blend.weight + sum(letter.weight for letter in roamer.letters.held.values())


def share(swarm: Islands, outcome: str) -> float:
    """Of all exchanges, those that ended so."""
    found = [each for one in swarm.members.values() for each in one.outcomes()]
    return found.count(outcome) / len(found)
