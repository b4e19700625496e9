"""Whatever befalls members while some of them lie: as :mod:`test_any_order`, with liars.

Fewer than a third of them lie, in whatever they say (:mod:`lying_kit`). No honest one dies of it,
no two of them commit different results of one round, and they come together and merge each other's
work, whether the liars stop or not. That there is one result of each round is not asked for where a
liar signs two votes or two results, since nothing would keep that (docs/protocol.md, Limits).
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from catching_up_kit import Stateful, coming_together, played, scene
from exchange_kit import until
from lying_kit import ABOUT, EVERYTHING, Liar
from lying_transport import LyingTransport
from simulated_swarm import Member, SimulatedSwarm
from toy_replica import RUN
from trouble_kit import HEALED_S, Mishaps, befallen

from bootstrap.manifest_rounds import Merge
from gossip.certificate import outcome_hash
from gossip.grouping import UNGROUPED, Grouping
from gossip.mixing import Mix
from gossip.validity import MAX_TOKENS
from node.mixing import mix_of
from protocols.codecs import RangeCodec
from protocols.identity import Identity, PeerId
from protocols.memory import MemoryTransport
from protocols.messages import Certificate

pytestmark = [
    pytest.mark.usefixtures("remembered_signatures"),
    pytest.mark.timeout(300),
]

SIZE = 10_000
FOUND = (213,)  # a part that its owner gave a byte a second, in a round that needed every vote
KINDS = ("kill", "kill", "freeze", "slow", "narrow", "cut", "sever", "swap", "leave", "join")
LASTS_S = (10, 30)
MANY = 1000  # of anything that a node keeps, at most
RULES = ("mean", "mean", "clip", "median", "geometric-median")


@dataclass(frozen=True)
class Drawn:
    """What one seed stands for, beside what happens and what is said."""

    honest: int  # founders
    joiners: int
    liar_joins: bool  # it is one of the joiners, else a founder
    lies_on: bool  # when the network is whole again
    chance: float  # of a lie, of each message
    about: tuple[str, ...]
    worded: bool
    alike: bool
    two_faced: bool
    think: tuple[float, float]
    upload: float
    codec: str
    fragments: int
    rule: str
    records: bool


def drawn(dice: random.Random) -> Drawn:
    return Drawn(
        honest=dice.choice([3, 4, 5]),
        joiners=dice.choice([1, 2]),
        liar_joins=dice.random() < 0.3,
        lies_on=dice.random() < 0.7,
        chance=dice.choice([0.03, 0.1, 0.3, 0.6]),
        about=dice.choice([EVERYTHING, EVERYTHING, EVERYTHING, ABOUT["plans"], *ABOUT.values()]),
        worded=dice.random() < 0.5,
        alike=dice.random() < 0.5,
        two_faced=dice.random() < 0.25,
        think=dice.choice([(1.0, 1.1), (0.3, 0.6)]),
        upload=dice.choice([1e6, 1e7]),
        codec=dice.choice(["fp32", "int4"]),
        fragments=dice.choice([1, 1, 1, 2]),
        rule=dice.choice(RULES),
        records=dice.random() < 0.6,
    )


class Witnessed(Stateful):
    """What an honest member commits is written down."""

    swarm: LyingSwarm

    async def apply(self, certificate: Certificate, parts: Any) -> None:
        await super().apply(certificate, parts)
        self.swarm.witness(self.me, certificate)


@dataclass
class LyingSwarm(SimulatedSwarm):
    """Such members, some of whom lie."""

    lying: dict[PeerId, Liar] = field(default_factory=dict)
    two_faced: bool = False
    committed_: dict[tuple[int, bytes], bytes] = field(default_factory=dict)

    def wired(self, identity: Identity, transport: MemoryTransport) -> Any:
        liar = self.lying.get(identity.peer_id)
        return transport if liar is None else LyingTransport(transport, liar)

    def honest(self) -> list[Member]:
        return [member for peer, member in self.members.items() if peer not in self.lying]

    def fresh(self, peer: PeerId) -> Any:
        replicas = super().fresh(peer)
        for replica in replicas:
            assert isinstance(replica, Witnessed)
            replica.swarm = self
        return replicas

    def witness(self, who: PeerId, certificate: Certificate) -> None:
        """Of one round there is one result, but where a majority was taken for gone."""
        outcome = certificate.outcome
        for contributor in outcome.contributors:
            assert 0 <= contributor.weight <= contributor.tokens <= MAX_TOKENS
        if who in self.lying or certificate.epoch or self.two_faced:
            return
        at, head = (outcome.fragment, outcome.previous), outcome_hash(outcome)
        known = self.committed_.setdefault(at, head)
        assert known == head, f"round {outcome.round} of fragment {outcome.fragment} differs"

    def agree(self) -> None:
        members = self.members
        self.members = {member.peer: member for member in self.honest()}
        super().agree()
        self.members = members


class AmongLiars(Mishaps):
    """What befalls those among whom some lie: the honest stay more than two thirds."""

    def _expendable(self, who: Any) -> bool:
        swarm = self.here.swarm
        assert isinstance(swarm, LyingSwarm)
        liars = [peer for peer in self.members if peer in swarm.lying]
        honest = len(self.members) - len(liars)
        if who.peer not in swarm.lying and honest - 1 <= 2 * len(liars):
            return False
        others = {peer for peer in self.members if peer not in swarm.lying} - {who.peer}
        replicas = [replica for member in self.members.values() for replica in member.replicas]
        return all(others.intersection(replica.roster) for replica in replicas)


def largest(root: object) -> tuple[int, str]:
    """The container with the most in it of all that a node keeps, and where that is."""
    found, seen = (0, ""), set[int]()
    left: list[tuple[object, str]] = [(root, "")]
    while left:
        one, path = left.pop()
        module = type(one).__module__
        if id(one) in seen or module.startswith("protocols.memory"):
            continue
        seen.add(id(one))
        inside: list[tuple[object, object]] = []
        if isinstance(one, dict | list | tuple | set | frozenset | deque):
            found = max(found, (len(one), path))
            inside = list(one.items()) if isinstance(one, dict) else list(enumerate(one))
        elif module.startswith(("gossip.", "protocols.")):
            names = [*vars(one)] if hasattr(one, "__dict__") else [*getattr(one, "__slots__", ())]
            inside = [(name, getattr(one, name, None)) for name in names]
        left += [(value, f"{path}.{name}") for name, value in inside]
    return found


@contextmanager
def no_errors() -> Iterator[None]:
    """Nothing is logged as an error meanwhile: no handler failed, and no task."""
    found: list[str] = []

    class Found(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(self.format(record))

    handler = Found(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
    assert not found, found[0]


def mixed(rule: str) -> Mix:
    return mix_of(Merge(rule=rule))


def anything_happens(
    seed: int, tmp_path: Path, grouping: Grouping = UNGROUPED, sites: int = 1
) -> None:
    dice = random.Random(seed)
    it = drawn(dice)
    count = it.honest + (not it.liar_joins)
    founders = [Identity.from_seed((i + 1).to_bytes(32, "big")) for i in range(count)]
    joins = Identity.from_seed((1).to_bytes(32, "little"))
    identity = joins if it.liar_joins else dice.choice(founders)
    swarm: SimulatedSwarm | None = None

    def names() -> list[PeerId]:
        return list(swarm.members) if swarm is not None else [one.peer_id for one in founders]

    liar = Liar(
        identity, RUN, RangeCodec(it.codec, dense=SIZE - 1000), random.Random(seed + 1),
        it.chance, it.about, it.two_faced, it.worded, it.alike, names,
    )  # fmt: skip

    async def story() -> None:
        nonlocal swarm
        async with scene(
            count,
            size=SIZE,
            codec=it.codec,
            think=it.think,
            uploads=[it.upload] * count,
            fragments=it.fragments,
            min_grace_s=1.0,
            records=tmp_path if it.records else None,
            mix=mixed("clip" if grouping.on else it.rule),
            grouping=grouping,
            sites=sites,
            seed=seed,
            kind=Witnessed,
            made=LyingSwarm,
            lying={identity.peer_id: liar},
            two_faced=it.two_faced,
        ) as here:
            swarm = here.swarm
            newcomers = ["island"] * it.joiners
            how: dict[str, Any] = {"lasts": LASTS_S, "kinds": KINDS, "sites": sites}
            await befallen(here, it.upload, dice, newcomers, AmongLiars, **how)
            liar.lies = it.lies_on
            assert isinstance(swarm, LyingSwarm)
            honest = swarm.honest()
            await until(coming_together(honest), HEALED_S)
            for one in honest:
                many, where = largest(one.swarm)
                assert many < MANY, where
                islands = one.swarm.presence.membership.islands
                assert not [p for p, i in islands.items() if i.expelled and p != identity.peer_id]

    with no_errors(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("gossip.partition.MIN_PART", 1024)  # so short a vector is cut as well
        played(story)


@pytest.mark.parametrize("seed", [*FOUND, 222, 221, 205])
def test_whatever_some_say_the_others_are_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 300))
def test_whatever_some_say_the_others_are_one_swarm_many_times(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path)


@pytest.mark.parametrize("seed", [2, 51])
def test_whatever_some_say_in_groups_the_others_are_one_swarm(seed: int, tmp_path: Path) -> None:
    anything_happens(seed, tmp_path, Grouping("region"), 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 150))
def test_whatever_some_say_in_groups_they_are_one_swarm_many_times(
    seed: int, tmp_path: Path
) -> None:
    anything_happens(seed, tmp_path, Grouping("region"), 2)
