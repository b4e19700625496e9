"""A host that is there, and whose ranks cannot go on: its island does without it where it can."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hub_kit import JOB, WAIT_S, Other, alive, hub, quicken, ready
from trainer_kit import tiny_settings

from node.errors import operator_error
from node.hosts.crew import Crew
from node.hosts.hub import MAX_LOSSES, Hub
from node.hosts.wire import Launch, RankEnded
from node.island.island import Island, _Life
from node.island.rank_ends import TrainerDied
from node.island.rendezvous import Rendezvous
from node.trainer.dims import ParallelDims
from node.trainer.settings import (
    EXIT_ORPHANED,
    EXIT_OUT_OF_MEMORY,
    EXIT_RANK_LOST,
    EXIT_REFUSED,
    EXIT_STUCK,
)

REFUSAL = operator_error("E601", "cannot read the text", why="it has gone", fix="start again")
KILLED = -int(signal.SIGKILL)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


class Pair:
    """Host 0 with one rank, and host 1 with another, which ends as the test has it."""

    def __init__(self, made: Hub, other: Other, directory: Path) -> None:
        self.made, self.other, self.directory = made, other, directory
        vectors: Any = SimpleNamespace(clear=lambda: None, keep_beating=AsyncMock())
        crew = Crew(made, 1, lambda ranks, hosts: ParallelDims(dp_shard=ranks))
        self.island = Island(tiny_settings(directory), vectors, directory, crew)
        self.life = 0

    async def hosts(self) -> list[int]:
        """Who would train now."""
        return [host.number for host in await self.made.muster(again=self.life > 0)]

    async def end(self, status: int, said: str = "") -> TrainerDied:
        """The ranks run, until that of host 1 ends with this status."""
        self.life += 1
        [host] = await self.made.muster(again=self.life > 1)
        first: Any = SimpleNamespace(
            number=0,
            where="",
            log=Path("trainer-rank0.log"),
            tail=str,
            wait=AsyncMock(return_value=EXIT_ORPHANED),  # whatever that one ends with comes first
            signal=lambda number: None,
        )
        ranks = self.made.launch(host, self.life, "{}", range(1, 2), "x:1")
        await self.other.receive(Launch)
        code, by = (0, -status) if status < 0 else (status, 0)
        ended = RankEnded(self.life, 1, code, by, "trainer-rank1.log", said)
        self.other.connection.send(ended)
        await asyncio.wait_for(ranks[0].wait(), WAIT_S)
        self.island._ranks, reader = [first, *ranks], asyncio.StreamReader()
        reader.feed_eof()  # of rank 0
        life = _Life(reader, Rendezvous(self.directory), 0)
        await asyncio.wait_for(self.island._supervise(life), WAIT_S)
        died = await self.island.next_event()
        assert isinstance(died, TrainerDied)
        return died


async def test_a_host_whose_ranks_die_again_is_left_out_until_a_round_is_merged(
    tmp_path: Path,
) -> None:
    async with hub(minimum=1) as (made, said):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            pair = Pair(made, other, tmp_path)
            for _ in range(MAX_LOSSES - 1):
                died = await pair.end(KILLED)
                assert (died.rank, died.code, died.spared) == (1, "E405", False)
            died = await pair.end(KILLED, "its last\nwords")
            assert (died.code, died.spared) == ("E408", True)
            assert died.error is not None
            assert "host 1 (other) is left out until a round is merged" in died.error.what
            assert died.error.why == "rank 1 on host 1 (other) was ended by SIGKILL: words"
            assert died.error.fix == "see trainer-rank1.log"
            assert (await pair.hosts(), made.grown) == ([], False)
            assert "host 1 (waits for a round, as its ranks cannot go on) is missing" in said[-1]
            made.merged()
            assert made.grown
            died = await pair.end(KILLED)
            assert (died.code, died.spared) == ("E405", False)


async def test_a_host_that_refuses_is_left_out_at_once(tmp_path: Path) -> None:
    async with hub(minimum=1) as (made, _):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            pair = Pair(made, other, tmp_path)
            died = await pair.end(EXIT_REFUSED, REFUSAL.text())
            assert (died.code, died.spared) == ("E408", True)
            assert died.error is not None
            assert died.error.why == ("rank 1 on host 1 (other): cannot read the text: it has gone")
            assert died.error.fix == "start again; see trainer-rank1.log"
            assert "left out until it is started again" in died.error.what
            assert await pair.hosts() == []
            made.merged()  # it would refuse in each round, which would be stopped twice for it
            assert not made.grown
            assert await pair.hosts() == []
        again = await ready(made)
        async with alive(again):
            assert await Pair(made, again, tmp_path).hosts() == [1]


@pytest.mark.parametrize(
    ("status", "code"), [(KILLED, "E405"), (EXIT_REFUSED, "E601")], ids=["dies", "refuses"]
)
async def test_what_befalls_a_host_that_is_needed_befalls_the_island(
    tmp_path: Path, status: int, code: str
) -> None:
    async with hub(minimum=2) as (made, _):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            pair = Pair(made, other, tmp_path)
            for _ in range(MAX_LOSSES + 1):
                died = await pair.end(status, REFUSAL.text() if code == "E601" else "")
                assert (died.rank, died.code, died.spared) == (1, code, False)


@pytest.mark.parametrize(
    ("status", "code"),
    [(EXIT_OUT_OF_MEMORY, "E401"), (EXIT_STUCK, "E406"), (EXIT_RANK_LOST, "E405")],
)
async def test_what_a_host_is_not_to_blame_for_leaves_it_in(
    tmp_path: Path, status: int, code: str
) -> None:
    """Memory may do with less at once; the others have waited, or were left."""
    async with hub(minimum=1) as (made, _):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            pair = Pair(made, other, tmp_path)
            for _ in range(MAX_LOSSES + 1):
                died = await pair.end(status)
                assert (died.rank, died.code, died.spared) == (1, code, False)
            assert await pair.hosts() == [1]
