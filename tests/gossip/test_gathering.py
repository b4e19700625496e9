"""Parts of a past round, from donors of which some are slow, dark, or lie."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch
from exchange_kit import Peer, World, run, until, world

from gossip.exchange.gathering import FAR, JUDGED_S, Gathering, Paces
from gossip.plans.validity import Shape, key_of
from protocols.identity import PeerId
from protocols.messages import PartResult

SHAPE = Shape(2_000_000, ("int8",))
FAST, SLOW = 1e6, 2e4  # bytes a second
PART = SHAPE.size // 4  # bytes, nearly: its scales come on top


@dataclass
class Scene:
    """One member that has missed a round which three others hold."""

    here: World
    newcomer: Peer
    donors: list[Peer]
    results: list[PartResult]
    given: Counter[PeerId] = field(default_factory=Counter)  # bytes of parts, by donor
    asked: Counter[PeerId] = field(default_factory=Counter)
    rejected: list[PeerId] = field(default_factory=list)
    rates: dict[PeerId, float] = field(default_factory=dict)  # that donors were found to give
    spoilt: set[PeerId] = field(default_factory=set)

    def tamper(self, sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
        if name != "part":
            return data
        if sender == self.newcomer.me:
            self.asked[receiver] += 1
            return data
        self.given[sender] += len(data)
        return bytes(len(data)) if sender in self.spoilt and len(data) > 1000 else data

    async def nothing_held(self, result: PartResult) -> None:
        """The newcomer was not in that round."""

    async def gather(self, announced: float = FAST, link: float = 0.0) -> float:
        """Get all parts, of which donors announce so much; returns the virtual seconds."""
        rates = self.rates

        class Heard(Paces):
            def gives(self, donor: PeerId, rate: float) -> None:
                rates[donor] = rate
                super().gives(donor, rate)

        gathering = Gathering(
            self.newcomer.wiring,
            Heard(lambda peer: announced, lambda: link),
            self.nothing_held,
            lambda peer, error: self.rejected.append(peer),
        )
        names = [donor.me for donor in self.donors]
        wanted = {
            result: names[turn % 3 :] + names[: turn % 3]
            for turn, result in enumerate(self.results)
        }
        began = self.newcomer.wiring.now()
        found = await gathering.gather(wanted, SHAPE.size)
        for result in self.results:
            _, data = self.donors[0].exchange.parts[key_of(result)]
            assert torch.equal(found[result.start, result.stop], data)
        return self.newcomer.wiring.now() - began


@asynccontextmanager
async def missed() -> AsyncIterator[Scene]:
    async with world(SHAPE, upload=FAST) as here:
        here.work()
        await until(here.whole)
        newcomer, *donors = here.peers
        results = [result for result, _ in newcomer.exchange.parts.values()]
        scene = Scene(here, newcomer, donors, results)
        here.network.tamper = scene.tamper
        yield scene
        here.network.tamper = None


def upload(scene: Scene, donor: Peer, rate: float) -> None:
    node = scene.here.network.node(donor.me)
    assert node is not None
    node.upload = rate


def test_a_donor_far_slower_than_the_others_is_left_and_what_it_gave_is_kept() -> None:
    async def scene() -> None:
        async with missed() as it:
            slow = it.donors[0]
            upload(it, slow, SLOW)
            took = await it.gather()
            assert took < JUDGED_S + 2.5  # its own parts alone would have taken 50 s
            assert it.given[slow.me] > 0.8 * JUDGED_S * SLOW
            whole = sum(len(data) for _, data in slow.exchange.parts.values())
            assert sum(it.given.values()) < 1.1 * whole  # but what is on its way
            assert it.rejected == []

    run(scene)


def test_where_ones_own_link_is_what_is_short_nobody_is_left() -> None:
    async def scene() -> None:
        async with missed() as it:
            node = it.here.network.node(it.newcomer.me)
            assert node is not None
            node.download = FAST / 2
            took = await it.gather(link=FAST / 2)
            assert took > 2 * JUDGED_S
            assert sum(it.asked.values()) == len(it.results)  # each part once

    run(scene)


def test_a_donor_that_is_dark_is_left_for_one_not_tried_yet() -> None:
    async def scene() -> None:
        async with missed() as it:
            it.results = it.results[:1]  # so that no other donor is measured
            it.here.network.freeze(it.donors[0].me)
            assert await it.gather() < JUDGED_S + 1.5

    run(scene)


@pytest.mark.parametrize("liar", [0, 1])
def test_where_two_gave_one_part_and_it_is_wrong_only_who_lied_is_rejected(liar: int) -> None:
    """Slow or quick: nobody knows whose half it was, so each is asked for all of it alone."""

    async def scene() -> None:
        async with missed() as it:
            it.results = it.results[:1]
            upload(it, it.donors[0], SLOW)
            it.spoilt.add(it.donors[liar].me)
            await it.gather()
            assert it.asked[it.donors[0].me] >= 1
            assert set(it.rejected) <= {it.donors[liar].me}
            assert it.rejected or liar == 0

    run(scene)


def test_who_has_to_give_all_of_a_part_is_measured_by_what_it_gives() -> None:
    async def scene() -> None:
        async with missed() as it:
            it.results = it.results[:1]
            slow, liar, sound = it.donors
            upload(it, slow, SLOW)
            upload(it, liar, FAST / 2)
            upload(it, sound, FAST / 8)  # 4 s, in which it is looked at several times
            it.spoilt.add(liar.me)
            await it.gather()
            assert it.rejected == [liar.me]
            assert it.rates[sound.me] == pytest.approx(FAST / 8, rel=0.3)

    run(scene)


def test_paces_know_who_would_be_far_quicker() -> None:
    a, b, c = PeerId("a"), PeerId("b"), PeerId("c")
    announced = {a: 8e6, b: 8e6, c: 1e5}
    paces = Paces(announced.__getitem__, lambda: 0.0)
    assert paces.better(1e6, [b, c]) == b
    assert paces.better(8e6 / FAR + 1, [b, c]) is None
    paces.pulls = 4  # its link would be shared
    assert paces.better(1e6, [b, c]) is None
    paces.gives(b, 1e4)  # and it does not keep what it announces
    assert paces.better(1e5, [b, c]) is None
    paces.gives(a, 1e6)
    assert paces.order([b, c, a]) == [c, a, b]
    paces.failed(a)
    assert paces.better(1.0, [a]) is None
    assert paces.order([a, c]) == [c, a]
    paces.ended(c, 100, 0.01)
    paces.ended(c, 1, 0.01)  # a small part says nothing
    assert paces.better(1e3, [c]) == c
    paces.keep({b})  # of others nothing is kept
    assert paces.order([a, c, b]) == [a, c, b]
    assert paces.better(1.0, [a]) == a
    assert paces.better(1e5, [b]) is None


@pytest.mark.parametrize("broken", [False, True])
def test_what_is_on_its_way_is_waited_for_as_long_as_it_moves(broken: bool) -> None:
    """The others have certified the round while the last part comes in by a slow link."""

    async def scene() -> None:
        async with world(SHAPE, upload=FAST) as here:
            slow, *others = here.peers
            node = here.network.node(slow.me)
            assert node is not None
            node.download = FAST / 4
            here.work(dataclasses.replace(here.plan, patience_s=4.0, expected_s=12.0))
            await until(lambda: here.whole(slow))
            missing = [
                (result, data)
                for key, (result, data) in others[0].exchange.parts.items()
                if key not in slow.exchange.parts and result.owner != slow.me
            ]
            assert missing
            if broken:
                for result, _ in missing:
                    here.network.kill(result.owner)
            came = await asyncio.gather(*(slow.exchange.merged.part(one) for one, _ in missing))
            assert broken == any(found is None for found in came)  # that one is to be fetched
            for (_, data), found in zip(missing, came, strict=True):
                assert found is None or torch.equal(found, data)

    run(scene)
