"""Who is asked for the rounds that a node was not there for, and when."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import MagicMock

import pytest
from past_kit import (
    ALPS,
    MESA,
    OTHERS,
    RUN,
    ask,
    at_once,
    history,
    play,
    rounds_of,
    sums,
    through,
    told,
)

import node.entry.past
from gossip.chain.swarm import Swarm
from gossip.pairs.swarm import Pairs
from node.entry.past import (
    AGAIN_S,
    LAST_AGAIN_S,
    LOOK_S,
    MOST_TOLD,
    LookingBack,
    tell_past,
)
from node.monitor.history import History
from protocols.bounds import ENDLESS_ROUNDS
from protocols.identity import PeerId
from protocols.memory.transport import MemoryTransport
from protocols.messages import Past, PastRequest
from protocols.tasks import beside


def test_who_has_not_come_as_far_is_not_the_only_one_to_be_asked() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(8)))
        tell_past(others[1], history(range(12)))
        here = history(range(0))
        assert await ask(mine, [ALPS, MESA], here, before=10) == 10
        assert rounds_of(here) == list(range(10))
        assert here.totals == sums(10)

    play(main)


def test_peers_that_know_nothing_hide_nobody_who_knows() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for other in others:
            tell_past(other, history(range(0)))
        tell_past(others[-1], history(range(20)))
        here = history(range(10, 11))
        assert len(others) > MOST_TOLD + 1
        assert await ask(mine, OTHERS, here, before=10) == 10

    play(main)


def test_of_those_who_know_a_part_only_some_are_asked() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for number, other in enumerate(others):
            tell_past(other, history(range(1 + number)))
        here = history(range(50, 51))
        assert await ask(mine, OTHERS, here, before=50) == MOST_TOLD
        assert here.gaps.open == []

    play(main)


@pytest.mark.parametrize("before", [50, ENDLESS_ROUNDS])
@pytest.mark.parametrize("first", [0, 10])
def test_who_came_back_a_round_before_is_not_the_only_one_to_be_asked(
    first: int, before: int
) -> None:
    """As after an outage of a whole site: it has nearly the same gap, and knows the end of it."""

    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for other in others[:-1]:
            back = history(range(first))
            through(back, range(48, 51))
            tell_past(other, back)
        tell_past(others[-1], history(range(50)))
        here = history(range(first))
        assert len(others) > MOST_TOLD + 1
        assert await ask(mine, OTHERS, here, before=before) >= 50 - first
        through(here, range(50, 53))
        assert rounds_of(here) == list(range(53))
        if before == 50:
            assert here.totals == sums(53)

    play(main)


@pytest.mark.parametrize("parts", [(range(60), range(40, 100)), (range(40, 100), range(60))])
def test_of_those_who_know_parts_each_tells_its_own(parts: tuple[range, range]) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        for other, part in zip(others, parts, strict=False):
            tell_past(other, history(part))
        here = history(range(0))
        assert await ask(mine, [ALPS, MESA], here, before=100) == 100

    play(main)


def test_where_all_know_the_same_part_only_some_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        asked = list[PeerId]()

        async def past(peer: PeerId, body: bytes) -> bytes:
            asked.append(peer)
            return Past((told(8), told(9)), ()).encode()

        for other in others:
            other.on_call("past", past)
        assert await ask(mine, OTHERS, history(range(0)), before=10) == 2
        assert len(asked) == 5

    monkeypatch.setattr(node.entry.past, "MOST_KNOWING", 5)
    play(main)


def test_a_small_gap_of_a_long_run_is_told_round_by_round() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(3000)))
        here = history(range(2000, 2900))
        here.gaps.close(2000)
        through(here, range(2905, 2910))
        assert await ask(mine, [ALPS], here, before=2905) == 5
        assert rounds_of(here) == list(range(2000, 2910))

    play(main)


def knowing(kind: type[Swarm | Pairs], *peers: PeerId) -> Any:
    swarm = MagicMock(spec=kind)
    swarm.now = lambda: 0.0
    swarm.membership = MagicMock()
    swarm.membership.alive.return_value = list(peers)
    return swarm


def test_a_gap_is_asked_for_again_until_somebody_has_told_what_it_has() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        asked, has = list[PastRequest](), list[int]()

        async def past(peer: PeerId, body: bytes) -> bytes:
            asked.append(PastRequest.decode(body))
            return Past(tuple(map(told, has)), ()).encode()

        others[0].on_call("past", past)
        here = history(range(10))
        back = LookingBack(mine, here, at_once, knowing(Swarm, ALPS), [])
        async with beside(back.run(15)):
            await asyncio.sleep(1.0)
            assert [(one.since, one.before) for one in asked] == [(10, 15)]
            await asyncio.sleep(3 * AGAIN_S + LOOK_S)
            assert 2 <= len(asked) <= 4
            await asyncio.sleep(86_400.0)
            assert 24 <= len(asked) <= 60, "ever less often"
            asked.clear()
            through(here, range(15, 17))
            has.append(12)  # it has not been there for all of it itself
            await asyncio.sleep(LAST_AGAIN_S + LOOK_S)
            assert rounds_of(here) == [*range(10), 12, 15, 16]
            assert len(asked) == 1
            await asyncio.sleep(86_400.0)
            assert len(asked) == 1
            through(here, range(18, 19))
            has.append(17)
            await asyncio.sleep(2 * LOOK_S)
            assert [(one.since, one.before) for one in asked[1:]] == [(17, 18)]

    play(main)


@pytest.mark.parametrize("kind", [Swarm, Pairs])
def test_in_pairs_a_count_that_leaps_has_passed_nothing_over(kind: type[Swarm | Pairs]) -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        tell_past(others[0], history(range(40)))
        here = history(range(0))
        back = LookingBack(mine, here, at_once, knowing(kind), [ALPS])
        async with beside(back.run(10)):
            await asyncio.sleep(1.0)
            through(here, range(10, 12))
            through(here, range(15, 16))
            await asyncio.sleep(10 * LOOK_S)
        assert rounds_of(here) == [*range(12), *([] if kind is Pairs else range(12, 15)), 15]

    play(main)


def test_a_history_of_no_run_asks_for_nothing() -> None:
    async def main(mine: MemoryTransport, others: list[MemoryTransport]) -> None:
        here = History()
        here.begin(RUN)
        assert await ask(mine, [ALPS], here, before=0) == 0

    play(main)
