"""Host 0 and the other hosts of an island: greetings, silence, ranks, ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hub_kit import JOB, WAIT_S, Other, alive, hub, place, quicken, ready, until
from trainer_kit import tiny_settings

import node.hosts.hub
from node.errors import operator_error
from node.hosts.crew import Crew
from node.hosts.hub import MAX_LOSSES, Hub
from node.hosts.remote import HOST_LOST, Host
from node.hosts.wire import (
    Beat,
    Challenge,
    Farewell,
    Halt,
    HostLostError,
    Launch,
    Prepared,
    RankEnded,
    Welcome,
    farewell,
    fitting,
)
from node.island.island import LOOK_S, Island, _Life
from node.island.rank_ends import TrainerDied
from node.island.rendezvous import Rendezvous
from node.trainer.dims import ParallelDims
from protocols.errors import OperatorError
from protocols.tasks import every


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


async def test_a_host_comes_prepares_and_runs_ranks() -> None:
    async with hub() as (made, said):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            [host] = await made.muster(again=False)
            assert (host.number, host.ranks, made.grown) == (1, 2, False)
            ranks = made.launch(host, 7, "{}", range(2, 4), "127.0.0.1:5")
            launch = await other.receive(Launch)
            assert (launch.life, launch.first, launch.count) == (7, 2, 2)
            other.connection.send(RankEnded(6, 2, 0, 0, "an earlier life", ""))
            other.connection.send(RankEnded(7, 2, 0, int(signal.SIGSEGV), "/log", "last words"))
            assert await ranks[0].wait() == -signal.SIGSEGV
            assert (str(ranks[0].log), ranks[0].tail()) == ("/log", "last words")
            ranks[1].signal(signal.SIGTERM)
            assert (await other.receive(Halt)).life == 7
            other.connection.send(RankEnded(7, 3, 0, int(signal.SIGKILL), "/log", ""))
            assert await ranks[1].wait() == -signal.SIGKILL
        assert "host 1 (other) of this island is ready: 2 ranks" in said


async def test_a_host_of_many_ranks_is_told_once_to_kill_them() -> None:
    """It keeps a bounded number of words (tests/node/test_hosts_words.py), and may run 1024."""
    async with hub() as (made, _):
        made.offer(JOB)
        other = await ready(made, ranks=1024)
        async with alive(other):
            [host] = await made.muster(again=False)
            for life in (1, 2):
                ranks = made.launch(host, life, "{}", range(2, 1026), "x:1")
                for number in (signal.SIGTERM, signal.SIGKILL):
                    for rank in ranks:
                        rank.signal(number)
            made.launch(host, 3, "{}", range(2, 1026), "x:1")
            for life in (1, 2):
                assert (await other.receive(Launch)).life == life
                assert (await other.receive(Halt)).life == life
            assert (await other.receive(Launch)).life == 3


@pytest.mark.parametrize(
    ("ends", "met"),
    [
        (["127.0.0.1", "10.0.0.7", "10.0.1.7"], "10.0.0.7"),  # the first is on host 0's machine
        (["10.0.0.7", "127.0.0.1"], "10.0.0.7"),
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1"),
        (["::1", "fd00::7"], "fd00::7"),
    ],
)
def test_ranks_meet_where_hosts_of_other_machines_get_to(ends: list[str], met: str) -> None:
    hosts: list[Any] = [SimpleNamespace(connection=SimpleNamespace(own_address=e)) for e in ends]
    assert Hub(place(), "cpu", print).reached_at(hosts) == met


async def test_a_silent_host_is_lost_and_its_ranks_with_it() -> None:
    async with hub(minimum=1) as (made, said):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            [host] = await made.muster(again=False)
            [rank] = made.launch(host, 1, "{}", range(2, 3), "x:1")
        async with asyncio.timeout(WAIT_S):  # from here on it says nothing
            assert await rank.wait() == HOST_LOST
        assert "no sign of life" in rank.tail()
        assert any("host 1 (other) of this island is lost" in line for line in said)
        assert await made.muster(again=True) == []
        [late] = made.launch(host, 2, "{}", range(2, 3), "x:1")
        assert await late.wait() == HOST_LOST
        back = await ready(made)
        async with alive(back):
            await until(lambda: made.grown)
            assert [h.number for h in await made.muster(again=True)] == [1]
            assert not made.grown


async def lose_again_and_again(made: Hub, said: list[str]) -> None:
    """Host 1 takes part and is lost, so often that it is not relied upon any more."""
    for _ in range(MAX_LOSSES):
        other = await ready(made)
        async with alive(other):
            await until(lambda: made.ready)
            assert [host.number for host in await made.muster(again=True)] == [1]
        other.connection.close()
        await until(lambda: not made.hosts)


async def test_a_host_that_is_lost_again_and_again_waits_for_a_round() -> None:
    """Each loss costs the island all that it has learnt since its last round."""
    async with hub(minimum=1) as (made, said):
        made.offer(JOB)
        await lose_again_and_again(made, said)
        async with alive(await ready(made)):
            await until(lambda: made.hosts and made.hosts[1].prepared)
            assert await made.muster(again=True) == []
            assert (made.enough, made.grown) == (True, False)
            assert "host 1 (waits for a round, as it was lost again) is missing" in said[-1]
            made.merged()
            assert made.grown
            assert [host.number for host in await made.muster(again=True)] == [1]


async def test_a_host_that_the_island_needs_is_taken_in_however_often_it_was_lost() -> None:
    async with hub(minimum=2) as (made, said):
        made.offer(JOB)
        await lose_again_and_again(made, said)
        async with alive(await ready(made)):
            assert [host.number for host in await made.muster(again=True)] == [1]
            assert not made.enough


@pytest.mark.parametrize(
    ("needed", "stood_s"), [(True, 0.0), (False, 0.0), (True, 12.0), (False, 12.0)]
)
async def test_a_death_tells_whether_the_island_can_do_without_the_host_that_it_lost(
    tmp_path: Path, needed: bool, stood_s: float
) -> None:
    """Or this host has stood still, so that the other one gave it up, and is no less there."""
    async with hub(minimum=2 if needed else 1) as (made, _):
        vectors: Any = SimpleNamespace(clear=lambda: None, keep_beating=AsyncMock())
        crew = Crew(made, 1, lambda ranks, hosts: ParallelDims())
        island = Island(tiny_settings(tmp_path), vectors, tmp_path, crew)
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            (host,) = await made.muster(again=False)
            (rank,) = made.launch(host, 1, "{}", range(1, 2), "x:1")
            other.connection.close()
            await asyncio.wait_for(rank.wait(), WAIT_S)
        island._ranks, reader = [rank], asyncio.StreamReader()
        reader.feed_eof()  # of rank 0
        island._absence.look(asyncio.get_running_loop().time() - LOOK_S - stood_s)
        await asyncio.wait_for(island._supervise(_Life(reader, Rendezvous(tmp_path), 0)), WAIT_S)
        died = await island.next_event()
        assert isinstance(died, TrainerDied)
        assert (died.code, died.spared) == ("E408", not needed or stood_s > 0)
        assert died.error is not None
        assert ("this host stood still for 12s" in died.error.why) == (stood_s > 0)


async def test_a_host_that_connects_anew_takes_its_old_place() -> None:
    async with hub() as (made, _):
        made.offer(JOB)
        first = await ready(made)
        async with alive(first):
            [host] = await made.muster(again=False)
            [rank] = made.launch(host, 1, "{}", range(1, 2), "x:1")
            async with alive(await ready(made)):
                assert await rank.wait() == HOST_LOST
                [again] = await made.muster(again=True)
                assert again is not host


async def test_why_a_host_has_left_is_told_though_it_is_back_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when this host has stood still, and finds both in the same moment."""

    async def late(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> None:
        try:
            await every(coroutines)
        finally:
            await until(lambda: made.hosts.get(1) is not host)

    monkeypatch.setattr(node.hosts.hub, "every", late)
    async with hub() as (made, _):
        made.offer(JOB)
        first = await ready(made)
        async with alive(first):
            [host] = await made.muster(again=False)
            [rank] = made.launch(host, 1, "{}", range(1, 2), "x:1")
            first.connection.send(Farewell("", "it has given host 0 up"))
            await until(lambda: host.farewell)
            second = await Other.dial(made)
            assert isinstance(await second.greet(), Welcome)
            assert await asyncio.wait_for(rank.wait(), WAIT_S) == HOST_LOST
            assert rank.tail() == "it has given host 0 up"


async def test_missing_hosts_are_waited_for_and_then_named() -> None:
    async with hub(wait_s=0.3, maximum=3, minimum=3) as (made, said):
        made.offer(JOB)
        async with alive(await ready(made, 2)):
            with pytest.raises(OperatorError) as caught:
                await made.muster(again=False)
    assert caught.value.code == "E409"
    assert "2 of 3 are ready, host 1 is missing" in caught.value.what
    assert any("host 1 is missing (at least 3); 0 s left" in line for line in said)


async def test_with_the_minimum_it_waits_only_a_while() -> None:
    async with hub(maximum=3) as (made, _):
        made.offer(JOB)
        async with alive(await ready(made, 2)):
            assert [host.number for host in await made.muster(again=False)] == [2]
            async with alive(await ready(made, 1)):
                await until(lambda: made.grown)
                assert [host.number for host in await made.muster(again=True)] == [1, 2]


async def test_what_a_host_lacks_ends_the_waiting() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        waiting = asyncio.ensure_future(made.muster(again=False))
        lack = operator_error("E601", "no text here")
        other.connection.send(Farewell(lack.code, lack.what, lack.why, lack.fix))
        with pytest.raises(OperatorError, match="cannot take part: no text here"):
            await asyncio.wait_for(waiting, WAIT_S)


@pytest.mark.parametrize("code", ["E402", "E601", "E603"])
async def test_what_ends_a_host_that_has_trained_may_pass(code: str) -> None:
    """Room on its disk, the way to its data: its supervisor starts it again."""
    async with hub(wait_s=WAIT_S) as (made, said):
        made.offer(JOB)
        first = await ready(made)
        async with alive(first):
            await made.muster(again=False)
            made.met()
            full = operator_error(code, "the disk is full")
            first.connection.send(farewell(full))
            await until(lambda: any("lost: the disk is full" in line for line in said))
        waiting = asyncio.ensure_future(made.muster(again=False))
        again = await Other.dial(made)  # it still is, when tokens are to be made
        await again.greet()
        again.connection.send(farewell(full))
        await until(lambda: 1 not in made.hosts and len(said) > 2)
        async with alive(await ready(made)):
            assert [host.number for host in await asyncio.wait_for(waiting, WAIT_S)] == [1]


@pytest.mark.parametrize("code", ["E402", "E105", "E999"])
async def test_a_host_that_cannot_start_ranks_at_all_is_not_waited_for(code: str) -> None:
    """It has its tokens, and ends as soon as it is to train: it would do so each time."""
    async with hub(wait_s=WAIT_S) as (made, _):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            (host,) = await made.muster(again=False)
            (rank,) = made.launch(host, 1, "{}", range(2, 3), "")
            other.connection.send(farewell(operator_error(code, "no log can be written")))
            assert await asyncio.wait_for(rank.wait(), WAIT_S) == HOST_LOST
        with pytest.raises(OperatorError, match="cannot take part: no log can be written"):
            await asyncio.wait_for(made.muster(again=True), WAIT_S / 4)


async def test_beats_are_counted_and_not_told() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        other.connection.send(Beat())
        other.connection.send(Prepared())
        assert await until(lambda: made.ready)


async def test_why_the_island_ended_is_told_to_all() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        made.say_why(operator_error("E501", "nobody there"))
        closing = asyncio.ensure_future(made.aclose())
        last = await other.receive(Farewell)
        assert (last.code, last.what) == ("E501", "nobody there")
        other.connection.close()
        await closing


async def test_the_end_of_host_0_is_no_error_of_its_connections() -> None:
    """Python 3.11 tells the event loop so of each that is cancelled."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        await (await Other.dial(made)).receive(Challenge)
        closing = asyncio.ensure_future(made.aclose())
        await other.receive(Farewell)
        other.connection.close()
        await closing
    await asyncio.sleep(0)
    assert told == []


async def test_an_error_of_any_length_is_told() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        made.say_why(operator_error("E999", why="frame\N{EM DASH}" * 10_000))
        closing = asyncio.ensure_future(made.aclose())
        told = await other.receive(Farewell)
        assert told.code == "E999"
        assert told.why.startswith("frame\N{EM DASH}frame")
        other.connection.close()
        await closing


def test_last_words_that_are_no_text_travel() -> None:
    words = (b"\xff" * 4096).decode(errors="replace")  # as RankProcess.tail reads them
    ended = RankEnded(1, 0, 1, 0, "/log", fitting(words))
    assert RankEnded.decode(ended.encode()).tail == words[: len(ended.tail)]
    assert len(ended.tail) > 2000


async def test_a_link_that_closes_is_told_by_its_reason() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        await other.greet(key="wrong")
        with pytest.raises(HostLostError, match="closed the connection"):
            await other.connection.receive()
        assert Host(1, "n", 1, other.connection).shown == "host 1 (n)"
