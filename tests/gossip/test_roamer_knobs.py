"""Islands in pairs whose links change: inner steps and codecs follow, on a virtual clock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from roamer_kit import Islander, Islands, islands

from bootstrap.manifest import Manifest
from protocols.memory.transport import Link
from protocols.memory.virtual_time import run

SIZE = 30_000
WIDE, NARROW = 5e6, 1e5  # bytes a second: fp32 takes 24 ms, and 1.2 s
RULES = ["average", "noloco", "push-sum"]


def manifest(rule: str, **rounds: Any) -> Manifest:
    given = {"codec": "auto", "codecs": ["fp32", "bf16", "int8"], "inner_steps": 20}
    mode = "push-sum" if rule == "push-sum" else "gossip"
    tables = {"mode": mode, "rounds": given | {"most_steps": 200} | rounds}
    return Manifest.model_validate(tables | {"gossip": {"rule": rule}})


def codecs(one: Islander, rounds: int) -> set[str]:
    """Of the letters of its newest rounds."""
    newest = one.rounds[-rounds:]
    return {each.codec for rounded in newest for each in rounded.exchanged if each.codec}


def swarm(rule: str, count: int = 4, **more: Any) -> Any:
    given = {"codec": "fp32", "size": SIZE, "link": Link(latency=0.005)}
    return islands(count, rule=rule, **{"manifest": manifest(rule)} | given | more)


@pytest.mark.parametrize("rule", RULES)
def test_links_that_get_fifty_times_narrower_and_wide_again(rule: str) -> None:
    async def main() -> None:
        async with swarm(rule) as made:
            made.shape(WIDE)
            await made.rounds(12)
            for one in made.living():
                assert one.steps[-1] == 20
                assert codecs(one, 8) == {"fp32"}

            made.shape(NARROW)
            await made.rounds(16)
            for one in made.living():
                assert one.steps[-1] > 100
                assert codecs(one, 6) <= {"bf16", "int8"}

            made.shape(WIDE)
            await made.rounds(25)
            for one in made.living():
                assert one.steps[-1] == 20
                assert codecs(one, 6) == {"fp32"}

    run(main())


def sums(made: Islands) -> tuple[float, torch.Tensor]:
    """Weights and weighted parameters of all, with what has arrived and is not mixed in."""
    weight, total = 0.0, torch.zeros(SIZE, dtype=torch.float64)
    for one in made.living():
        weight += one.state.blend.weight
        total += one.state.blend.weight * one.state.base.double()
        for letter in one.roamer.letters.held.values():
            values = torch.empty(SIZE)
            letter.body.codec.decode(0, letter.body.data, values)
            weight += letter.weight
            total += letter.weight * values.double()
    return weight, total


class Unmeasured(Islands):
    """Whose links nobody has measured."""

    def _steps_s(self, islander: Islander) -> float:
        seconds = super()._steps_s(islander)
        islander.roamer.note(upload=0.0, download=0.0)
        return seconds


def test_where_a_link_has_no_time_for_fine_letters_any_more_coarse_ones_come_through() -> None:
    async def main() -> None:
        async with swarm("average", 2, made=Unmeasured, size=200_000) as made:
            made.shape(WIDE)
            await made.rounds(6)
            assert codecs(made.members[0], 4) == {"fp32"}
            made.shape(1e4)  # fp32 takes 80 seconds, int8 20, and 60 are the most

            def through(one: Islander) -> bool:
                found = [each for rounded in one.rounds[6:] for each in rounded.exchanged]
                return any((e.met.outcome, e.codec) == ("mixed", "int8") for e in found)

            await made.until(lambda: all(map(through, made.living())), 1000.0)

    run(main())


@pytest.mark.parametrize("rule", RULES)
def test_inner_steps_follow_from_letters_that_run_out_of_time(rule: str) -> None:
    """None of them ever comes, and the islands would go on to wait for each as long as it may."""
    only = manifest(rule, codec="fp32", codecs=["fp32"])

    async def main() -> None:
        async with swarm(rule, 2, size=200_000, manifest=only) as made:
            made.shape(100 * WIDE)
            await made.rounds(6)
            assert [one.steps[-1] for one in made.living()] == [20, 20]
            made.shape(1e4)  # they take 80 seconds, and 60 are the most

            def rare() -> bool:
                return all(one.steps[-1] > 100 for one in made.living())

            await made.until(rare, 2000.0)

    run(main())


def test_who_is_silent_makes_no_letter_coarse() -> None:
    async def main() -> None:
        async with swarm("average", 4, made=Unmeasured) as made:
            made.shape(WIDE)
            await made.rounds(6)
            made.network.freeze(made.members[3].peer)
            made.gone.add(3)
            await made.rounds(8)
            for one in made.living():
                assert codecs(one, 8) == {"fp32"}

    run(main())


def test_shares_in_any_codec_keep_the_sum() -> None:
    async def main() -> None:
        async with swarm("push-sum", 5, limit=30) as made:
            before = made.values().double().sum(0)
            made.shape(WIDE)
            made.shape(NARROW, 0)
            members = made.living()
            await made.until(lambda: all(len(one.rounds) == 30 for one in members))
            assert {"fp32", "int8"} <= set.union(*(codecs(one, 30) for one in members))
            weight, total = sums(made)
            assert weight == pytest.approx(5, abs=1e-9)
            assert (total - before).abs().max().item() < 1e-3

    run(main())


def test_letters_of_unlike_codecs_keep_the_mean() -> None:
    """One narrow island among wide ones, which all meet it now and then."""

    async def main() -> None:
        async with swarm("average", 5, staleness=50) as made:
            made.shape(WIDE)
            made.shape(NARROW, 0)
            mean = made.values().mean(0)
            await made.rounds(30)
            assert codecs(made.members[0], 10) == {"int8"}
            wide = [made.members[number] for number in range(1, 5)]
            assert all("fp32" in codecs(one, 30) for one in wide)
            moved = (made.values().mean(0) - mean).square().mean().sqrt().item()
            # islands began 1.0 apart; with fp32 and 20 steps for all it is 0.07: answers come late
            assert moved < 0.04
            assert made.spread() < 0.05

    run(main())


def test_a_narrow_island_takes_more_steps_and_all_count_the_same_rounds() -> None:
    async def main() -> None:
        async with swarm("average", 5) as made:
            made.shape(WIDE)
            made.shape(NARROW, 0)
            await made.rounds(40)
            narrow, *wide = (made.members[number] for number in range(5))
            to_it = {
                each.codec
                for one in wide
                for rounded in one.rounds[-20:]
                for each in rounded.exchanged
                if each.met.partner == narrow.peer
            }
            assert to_it == {"int8"}, "it has said how narrow its link is"
            assert all("fp32" in codecs(one, 20) for one in wide)
            usual = max(sum(one.steps[-10:]) / 10 for one in wide)
            assert usual < sum(narrow.steps[-10:]) / 10 < 2.5 * usual
            places = [one.state.place.round for one in made.living()]
            assert max(places) - min(places) <= 3
            counted = [len(one.rounds) for one in wide]
            assert max(places) <= max(counted) + 3, "the count is that of rounds that there were"

    run(main())


def test_islands_of_one_speed_that_are_out_of_phase_count_no_faster_than_they_go() -> None:
    async def main() -> None:
        async with islands(5, limit=30) as made:
            first = {number: 1.0 + number / 5 for number in made.members}
            made.seconds = lambda n: first.pop(n, 1.0)
            members = made.living()
            await made.until(lambda: all(len(one.rounds) == 30 for one in members))
            assert {one.state.place.round for one in members} <= {30, 31}

    run(main())
