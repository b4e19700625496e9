"""Push-sum: the mean stays, and each share counts once, whatever links and islands do."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch
from roamer_kit import islands

from gossip.pairs.roamer import SPENT
from protocols.memory.transport import Link
from protocols.memory.virtual_time import run


def test_push_sum_keeps_the_mean_where_links_break():
    """Every third transfer breaks; x and w over all islands stay what they were."""

    async def main() -> tuple[float, torch.Tensor, torch.Tensor, float]:
        link = Link(latency=0.02, drop=0.3)
        async with islands(6, rule="push-sum", link=link, limit=12, neighbours=2) as swarm:
            start = swarm.values().double().mean(0)
            members = swarm.living()
            await swarm.until(lambda: all(len(m.rounds) == 12 for m in members))
            weights = sum(m.state.blend.weight for m in members)
            total = sum(m.state.blend.weight * m.state.base.double() for m in members)
            for islander in members:  # what came after the last round is not lost either
                for letter in islander.roamer.letters.held.values():
                    values = torch.empty(swarm.size)
                    letter.body.codec.decode(0, letter.body.data, values)
                    weights += letter.weight
                    total = total + letter.weight * values.double()
            return weights, total / 6, start, swarm.spread()

    weights, mean, start, spread = run(main())
    assert weights == pytest.approx(6, abs=1e-9)
    assert (mean - start).abs().max().item() < 1e-4
    assert spread < 0.05


def test_a_share_weighs_no_more_than_all_islands_do():
    async def main() -> None:
        for rule, known, heaviest in (("push-sum", 2, 8), ("push-sum", 9, 9), ("average", 9, 1)):
            async with islands(known, rule=rule) as swarm:
                await swarm.rounds(1)
                assert {one.roamer.letters.heaviest() for one in swarm.living()} == {heaviest}

    run(main())


def test_who_receives_nothing_keeps_the_last_of_its_weight():
    """It would halve it in each round, down to 0, of which nothing can be taken back."""

    async def main() -> None:
        async with islands(2, rule="push-sum") as swarm:
            deaf, other = swarm.living()
            deaf.state.blend.weight = 2.0**-29
            mail = deaf.roamer.letters.mail
            deaf.roamer.letters.mail = replace(mail, welcome=lambda peer: False)
            await swarm.rounds(8)
            assert deaf.state.blend.weight == 2.0**-33
            assert deaf.noticed == [SPENT]
            assert other.state.blend.weight == pytest.approx(1.0)
            deaf.roamer.letters.mail = mail
            await swarm.rounds(4)
            assert deaf.state.blend.weight > 0.1
            assert deaf.noticed == [SPENT]
            assert other.noticed == []

    run(main())


@pytest.mark.parametrize("silent", [8.0, 700.0])
def test_a_share_counts_once_where_its_receiver_is_silent_for_a_while(silent: float):
    """Nobody else can tell whether it came: it is neither taken back nor given up until it does.

    Also not after ten minutes, when its receiver has been forgotten.
    """

    async def main() -> tuple[float, list[float]]:
        async with islands(2, rule="push-sum", spread=0.0) as swarm:
            await swarm.rounds(2)
            swarm.network.freeze(swarm.members[1].peer)
            await asyncio.sleep(silent)
            alone = [one.state.blend.weight for one in swarm.living()]
            swarm.network.thaw(swarm.members[1].peer)
            # as a node does that dials again whom it has met before (node.entry.met_before)
            await swarm.members[0].roamer.presence.ask(swarm.members[1].peer)
            await swarm.rounds(5)
            swarm.limit = 0
            await asyncio.sleep(30.0)
            assert not any(one.roamer.core.owed for one in swarm.living())
            weights = [m.weight for m in swarm.living()]
            return sum(weights), alone

    total, alone = run(main())
    assert total == pytest.approx(2, abs=1e-9)
    assert sum(alone) < 2 - 0.1


@pytest.mark.parametrize("later", [0.0, 6.5])
def test_who_resumes_has_all_of_its_weight_again(later: float):
    """Killed ``later`` seconds after its checkpoint: what it has given and got since is known."""

    async def main() -> tuple[float, float]:
        async with islands(4, rule="push-sum", seconds=lambda number: 1 + number / 10) as swarm:
            # one whose weight is not 1 just then, with nothing on its way to or from it
            await swarm.until(lambda: abs(swarm.members[2].weight - 1) > 0.2)
            await asyncio.sleep(0.3)
            checkpoint = swarm.members[2].weight
            base, round_ = swarm.members[2].state.base.clone(), swarm.members[2].state.place.round
            await asyncio.sleep(later)
            killed = swarm.members[2].weight
            await swarm.kill(2)
            await asyncio.sleep(5.0)  # letters to it come back meanwhile
            swarm.start(2, base, round_, checkpoint)
            swarm.limit = 30
            await swarm.until(lambda: all(len(m.rounds) >= 30 for m in swarm.living()))
            await asyncio.sleep(5.0)
            return sum(one.weight for one in swarm.living()), killed - checkpoint

    total, moved = run(main())
    assert total == pytest.approx(4, abs=1e-9)
    assert bool(moved) is bool(later)
