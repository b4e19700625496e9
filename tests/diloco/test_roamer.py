"""Islands that meet in pairs, whole, on a simulated network and a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from roamer_kit import ToyState, islands, share

from diloco.mixing import extra_exchanges
from gossip.membership.sketch import SIZE, written
from protocols.memory.virtual_time import run


def noise(scale: float, size: int = 3000):
    """What islands learn where each walks at random."""

    def learn(number: int, done: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * number + done)
        return scale * torch.randn(size, generator=generator)

    return learn


def test_eight_islands_agree_geometrically_at_the_rate_of_random_pairs():
    async def main() -> tuple[float, float, float]:
        async with islands(8) as swarm:
            first, mean = swarm.spread(), swarm.values().mean(0)
            await swarm.rounds(10)
            return first, swarm.spread(), (swarm.values().mean(0) - mean).abs().max().item()

    first, last, moved = run(main())
    # a random partner of n - 1: the mean square distance becomes (1 - 1/(n - 1)) / 2 of itself
    rate = (last / first) ** (2 / 10)
    assert rate == pytest.approx((1 - 1 / 7) / 2, abs=0.08)
    assert moved < 1e-4  # and their mean stays where it was


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_what_codecs_lose_does_not_move_the_mean(codec: str):
    async def main() -> tuple[float, float]:
        async with islands(4, codec=codec) as swarm:
            mean = swarm.values().mean(0)
            await swarm.rounds(8)
            return swarm.spread(), (swarm.values().mean(0) - mean).abs().max().item()

    spread, moved = run(main())
    assert spread < 0.02
    assert moved < 1e-4


def test_each_exchange_of_a_round_has_a_letter_though_the_one_before_came_to_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    """An answer is compared with the letter as it travelled, or the mean would not stay."""
    mix, unknown = ToyState.mix, []

    async def watched(state: ToyState, letters: Sequence[Any]) -> float:
        unknown.extend(letter.stamp for letter, own in letters if own is None)
        return await mix(state, letters)

    monkeypatch.setattr(ToyState, "mix", watched)

    async def main() -> None:
        async with islands(4, codec="int8", neighbours=2, staleness=50) as swarm:
            swarm.seconds = lambda number: 1.0 + 0.7 * number  # whom nobody waits for
            await swarm.rounds(12)
            ended = [e for one in swarm.living() for r in one.rounds for e in r.exchanged]
            assert any(each.met.outcome == "open" and not each.met.exchange for each in ended)
            assert unknown == []
            assert all(each.codec for each in ended if each.met.outcome in ("open", "mixed"))

    run(main())


def test_noloco_learns_and_keeps_together():
    """All learn one direction, and each its noise: the mean goes on, the noise stays bounded."""

    def learn(number: int, done: int) -> torch.Tensor:
        return noise(0.1)(number, done) + 1.0

    async def main() -> tuple[float, list[float], float]:
        async with islands(8, rule="noloco", learn=learn, spread=0.0) as swarm:
            spreads = []
            for _ in range(4):
                await swarm.rounds(4)
                spreads.append(swarm.spread())
            return swarm.values().mean().item(), spreads, share(swarm, "mixed")

    mean, spreads, mixed = run(main())
    assert mean > 12  # 16 rounds of 1, and momentum
    assert max(spreads[2:]) < 0.3
    assert mixed > 0.9


def test_a_round_begins_once_however_often_it_is_said_that_the_island_is_ready(
    monkeypatch: pytest.MonkeyPatch,
):
    """Else the snapshot would be taken over once more while it is encoded."""
    start, begun = ToyState.start, []

    async def slowly(state: ToyState) -> None:
        begun.append(state)
        await asyncio.sleep(0.1)
        await start(state)

    async def main() -> None:
        async with islands(2, seconds=lambda number: 1000.0) as swarm:
            await asyncio.sleep(1.0)
            one = swarm.members[0]
            monkeypatch.setattr(ToyState, "start", slowly)
            for _ in range(2):
                one.roamer.update(ready=True, eta=0.0, norm=1.0)
            assert one.roamer.has_work
            await asyncio.sleep(0.05)
            one.roamer.update(ready=True, eta=0.0, norm=1.0)
            await swarm.until(lambda: one.roamer.under_way, 30.0)
            assert one.roamer.has_work
            await swarm.until(lambda: bool(one.rounds), 30.0)
            assert begun == [one.state]
            assert not one.roamer.has_work
            one.roamer.update(ready=True, eta=0.0, norm=1.0)
            await swarm.until(lambda: len(one.rounds) == 2, 30.0)
            assert begun == [one.state] * 2

    run(main())


def test_two_islands_alone_are_one_after_a_round():
    async def main() -> None:
        async with islands(2) as swarm:
            await swarm.rounds(1)
            assert swarm.spread() < 1e-6
            rounds = [rounded for member in swarm.members.values() for rounded in member.rounds]
            sent = [one.elements for rounded in rounds for one in rounded.exchanged if one.sent]
            assert set(sent) == {3000}

    run(main())


def test_one_island_alone_goes_on():
    async def main() -> None:
        one = torch.ones(3000)
        async with islands(1, rule="noloco", learn=lambda number, done: one) as swarm:
            await swarm.rounds(5)
            alone = swarm.members[0]
            assert alone.outcomes() == ["alone"] * len(alone.rounds)
            assert not any(one.elements for each in alone.rounds for one in each.exchanged)
            assert alone.state.base.mean().item() > 4

    run(main())


def test_islands_that_are_never_ready_at_one_time_agree_as_well():
    """Each is ready whenever it is; answers come later, and the mean stays where it was."""

    async def main() -> tuple[float, float, float]:
        draw = random.Random(5)
        async with islands(6, seconds=lambda number: draw.uniform(0.7, 1.3)) as swarm:
            mean = swarm.values().mean(0)
            await swarm.rounds(14)
            sent = sum(m.roamer.letters.transfers.bytes_sent for m in swarm.living())
            letters = sent / 12011 / sum(len(m.rounds) for m in swarm.living())
            moved = (swarm.values().mean(0) - mean).square().mean().sqrt().item()
            return swarm.spread(), moved, letters

    spread, moved, letters = run(main())
    assert spread < 0.1
    assert moved < 0.15  # some answers are under way; islands began 1.0 apart
    assert letters < 1.3  # a round


def test_the_mean_stays_where_several_letters_wait_for_one_island():
    """Two of eight are four times slower: when they are ready, some have written to them."""

    async def main() -> tuple[float, float]:
        async with islands(
            8, staleness=50, seconds=lambda number: 4.0 if number < 2 else 1.0
        ) as swarm:
            mean = swarm.values().mean(0)
            await swarm.until(lambda: len(swarm.members[0].rounds) >= 20)
            several = [m.rounds for m in swarm.living()]
            met = [one.met for rounds in several for r in rounds for one in r.exchanged]
            assert sum(len(one.mixed) > 1 for one in met) > 20
            moved = (swarm.values().mean(0) - mean).square().mean().sqrt().item()
            return swarm.spread(), moved

    spread, moved = run(main())
    assert spread < 0.05
    assert moved < 0.001  # islands began 1.0 apart


def test_an_island_four_times_slower_gives_and_gets():
    """Its counter follows the others', its answers are taken late, and nobody waits for it."""

    def learn(number: int, done: int) -> torch.Tensor:
        return torch.full((3000,), 8.0 if number == 3 else 0.0)

    async def main() -> None:
        async with islands(
            4, learn=learn, spread=0.0, seconds=lambda number: 4.0 if number == 3 else 1.0
        ) as swarm:
            await swarm.until(lambda: len(swarm.members[3].rounds) == 10)
            slow = swarm.members[3]
            fast = [swarm.members[n] for n in range(3)]
            assert slow.state.place.round >= max(m.state.place.round for m in fast) - 6
            assert all(len(m.rounds) > 30 for m in fast)  # nobody waited for it
            given = 80.0  # all that was learnt, by the slow one alone
            means = [m.state.base.mean().item() for m in swarm.living()]
            assert sum(means) / 4 > given / 4 / 2
            assert max(means) - min(means) < 25

    run(main())


@pytest.mark.parametrize("slower", [4.0, 8.0])
@pytest.mark.parametrize("fragments", [1, 2])
def test_an_island_far_slower_is_compared_with_the_others(fragments: int, slower: float):
    """Its counter leaps from each round to the next, its sketch was made just before."""

    async def main() -> None:
        async with islands(
            0, learn=noise(0.1), seconds=lambda number: slower if number == 3 else 1 + 0.03 * number
        ) as swarm:
            start = torch.ones(swarm.size)
            for number in range(4):
                states = [ToyState(start, swarm.codec, "average", f) for f in range(fragments)]
                swarm.launch(number, states)
            slow, quick = swarm.members[3], [swarm.members[n] for n in range(3)]
            await swarm.until(lambda: len(slow.rounds) >= 2 * fragments)
            before = [len(m.rounds) for m in quick]
            await swarm.until(lambda: len(slow.rounds) >= 8 * fragments)
            counted = [r.round for r in slow.rounds if not r.fragment]
            assert counted[-1] - counted[-2] >= slower - 1
            everybody = {m.peer for m in swarm.living()}
            for one, many in zip([*quick, slow], [*before, 2 * fragments], strict=True):
                assert all(r.spread.to_mean.keys() == everybody for r in one.rounds[many:])

    run(main())


def test_a_newcomer_is_met_and_pulled_in():
    async def main() -> None:
        async with islands(4) as swarm:
            await swarm.rounds(6)
            at = swarm.members[0].state.place.round
            newcomer = swarm.start(9, torch.full((3000,), 5.0), at)
            await swarm.rounds(10)
            met = [one for one in newcomer.outcomes() if one in ("mixed", "answered")]
            assert len(met) >= 5
            assert swarm.spread() < 0.1

    run(main())


def test_disagreement_adds_exchanges_and_they_help():
    """Islands far apart that hardly move: consensus control adds exchanges until they agree."""

    async def main(extra: int) -> tuple[float, int]:
        def more(distance: float, progress: float, lost: float) -> int:
            return min(extra, extra_exchanges(distance, progress, 3.0, lost))

        async with islands(8, learn=noise(0.01), more=more) as swarm:
            await swarm.rounds(5)
            most = max(r.exchanges for m in swarm.members.values() for r in m.rounds)
            return swarm.spread(), most

    without, one = run(main(0))
    with_them, several = run(main(2))
    assert (one, several) == (1, 3)
    assert with_them < without / 3


def test_one_that_makes_its_sketch_up_adds_no_exchanges(monkeypatch: pytest.MonkeyPatch):
    """Islands that are well; what one publishes is far from all of them."""

    async def main() -> list[int]:
        async with islands(8, spread=0.01, learn=noise(0.01), more=more) as swarm:
            liar = swarm.members[0].roamers[0]
            note = liar.note

            def lie(**said: Any) -> None:
                if "sketch" in said:
                    said["sketch"] = written(torch.full((SIZE,), 3e38))
                note(**said)

            monkeypatch.setattr(liar, "note", lie)
            await swarm.rounds(8)
            honest = [one for one in swarm.members.values() if one.peer != liar.me]
            assert any(r.spread.outliers == {liar.me} for one in honest for r in one.rounds)
            return [r.exchanges for one in honest for r in one.rounds]

    def more(distance: float, progress: float, lost: float) -> int:
        return min(2, extra_exchanges(distance, progress, 3.0, lost))

    assert set(run(main())) == {1}


@pytest.mark.parametrize("rule", ["noloco", "average"])
def test_what_a_codec_loses_adds_no_exchanges(rule: str):
    """Islands that hardly move any more, as at the end of a schedule, apart by int8's rounding."""

    async def main() -> tuple[float, float, int]:
        def more(distance: float, progress: float, lost: float) -> int:
            return min(2, extra_exchanges(distance, progress, 3.0, lost))

        async with islands(
            8, codec="int8", rule=rule, spread=0.01, learn=noise(1e-5), more=more
        ) as swarm:
            await swarm.rounds(20)
            late = [r for m in swarm.members.values() for r in m.rounds[10:]]
            apart = sum(r.spread.square for r in late) / len(late) / swarm.size
            return apart, late[0].progress, max(r.exchanges for r in late)

    apart, progress, most = run(main())
    assert apart > 30 * progress
    assert most == 1
