"""Whoever shows its claim slowly, or never, keeps no newcomer from what others can show."""

from __future__ import annotations

import asyncio

import pytest
from arrival_kit import LIAR, Scene, forged, played
from lineage_kit import CREATOR, changing

from gossip.catchup.claims import PROOF_S
from node.entry.looking import CALL_TIMEOUT_S
from node.entry.proving import AT_ONCE, Failure, first_proven
from protocols.identity import Identity
from protocols.memory import virtual_time

pytestmark = pytest.mark.usefixtures("remembered_signatures")


@pytest.mark.parametrize("names", [1, 40])
def test_who_shows_the_true_handovers_one_at_a_time_keeps_nobody_out(names: int) -> None:
    """Under however many names: that its certificate is made up shows at the end alone."""

    async def story(scene: Scene) -> None:
        chain = changing(50)
        scene.stand(CREATOR, chain, 5.0)
        for n in range(names):
            lie, _ = forged(chain)
            lie.add(voters=[LIAR], tokens=10**9 + n)
            liar = Identity.from_seed(bytes([150 + n]) * 32)
            scene.stand(liar, lie, 6.0, chain.lineage(), page_s=0.98 * CALL_TIMEOUT_S)
        await scene.arrive()
        assert scene.base.unique().tolist() == [5.0]
        assert asyncio.get_running_loop().time() < (1 + names // AT_ONCE) * PROOF_S + 10

    played(story)


def test_who_takes_its_time_is_asked_last_the_next_time() -> None:
    async def story(scene: Scene) -> None:
        chain = changing(50)
        lie, _ = forged(chain)
        scene.stand(LIAR, lie, 6.0, chain.lineage(), page_s=0.98 * CALL_TIMEOUT_S)
        scene.stand(CREATOR, chain, 5.0)
        arrival = scene.arrival()
        took = []
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            await arrival.fetch([scene.base, scene.momentum], lambda *_: None)
            took.append(asyncio.get_running_loop().time() - began)
        assert took[0] > PROOF_S
        assert took[1] < 5.0

    played(story)


@pytest.mark.timeout(20)
def test_who_has_shown_nothing_by_the_very_moment_that_ends_it_is_left() -> None:
    """Each further look would be at the same moment, and on this clock there would be no end."""

    async def never(option: str) -> Failure:
        await asyncio.Event().wait()
        raise AssertionError

    async def story() -> None:
        now = asyncio.get_running_loop().time
        until = now() + PROOF_S / 2
        found = await first_proven(["frozen", "other"], never, until, alone=True)
        assert found == ([], ["other", "frozen"])
        assert now() == until

    virtual_time.run(story())
