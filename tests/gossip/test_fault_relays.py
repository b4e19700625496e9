"""A link between a member and its relay that goes dark while both live."""

from __future__ import annotations

import asyncio

import pytest
from exchange_kit import run, until
from grouped_kit import BIG, grouped, truthful

from gossip.exchange.lateness import owner_patience_s
from protocols.memory.transport import Link

DARK = Link(latency=1e6)


@pytest.mark.parametrize("when", [0.0, 0.3, 0.7, 1.4])
@pytest.mark.parametrize("pair", [(0, 1), (2, 1), (5, 3)], ids=str)
def test_its_slice_goes_to_the_owners_and_is_merged_whole(
    when: float, pair: tuple[int, int]
) -> None:
    """Relays give it up, and owners ask it for its slice instead of believing that it is gone."""

    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            cut_off, relay = (here.peers[k] for k in pair)
            here.work()
            await asyncio.sleep(when)
            here.network.set_link(cut_off.me, relay.me, DARK)
            both = (relay.me, cut_off.me)
            own = {part.start for part in here.plan.parts if part.owner in both}
            wanted = {part.start for part in here.plan.parts} - own

            def all_but_theirs() -> bool:
                return all({key[0] for key in p.exchange.parts} >= wanted for p in here.peers)

            end = await until(all_but_theirs)
            patience, expected = here.plan.patience_s, here.plan.expected_s
            assert end < 1.5 * owner_patience_s(patience, expected) + 2 * expected
            members = len(here.plan.contributors)
            for peer in here.peers:
                assert truthful(here, peer)
                for result, _ in peer.exchange.parts.values():
                    size = result.stop - result.start
                    whole = [included.elements == size for included in result.included]
                    assert result.start in own or whole == [True] * members
                assert not set(peer.faults) - set(both)  # what they own they cannot give each other

    run(scene)
