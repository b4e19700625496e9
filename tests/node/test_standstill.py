"""A node that stands still, suspended or stopped: what its ranks do, and what they are blamed for.

The test's own event loop is the daemon's, so that what blocks it stops the daemon.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import hub_kit
import pytest
from hub_kit import JOB, WAIT_S, alive, hub, place, ready
from island_kit import LONG, gone, island, pids, until
from node_process import wait_until
from trainer_kit import begin

import node.island.island
from node.config import resolve
from node.hosts.helper import Helper
from node.island.absence import Absence
from node.island.events import problem_of
from node.island.rank_ends import TrainerDied
from node.island.restarts import MAX_RESTARTS, Restarts
from node.trainer.channel import Ready, Snapshot, StepDone

pytestmark = pytest.mark.timeout(240)

LOOK_S = 5.0
LIMIT_S = 600.0  # of a collective call
MANY = 500  # inner steps, whose reports are more than a socket holds


def looking(*standstills: float, before: float = 0.0) -> tuple[Absence, float]:
    """Of a node that is at work ``before`` each of these; and when it is back from the last one."""
    absence, now = Absence(LOOK_S), 1000.0
    for seconds in standstills:
        end = now + before
        while now < end:
            absence.look(now)
            now += LOOK_S + 0.25  # a busy machine
        absence.look(now)
        now += LOOK_S + seconds
    return absence, now


@pytest.mark.parametrize(
    ("standstills", "before", "since", "explained"),
    [
        ((), 0.0, 0.0, 0.0),
        ((0.25,), 3600.0, 0.0, 0.0),
        ((1200.0,), 3600.0, 0.0, 1200.0),
        ((1200.0,), 3600.0, 30.0, 1200.0),  # until ranks that were swapped out have ended
        ((1200.0,), 3600.0, LIMIT_S, 0.0),  # they have had their time since
        ((LIMIT_S / 2,), 0.0, LIMIT_S / 4, LIMIT_S / 2),
        ((LIMIT_S / 2 - 1,), 0.0, LIMIT_S / 4, 0.0),  # what was left is more than enough
        ((30.0,) * 10, 30.0, 0.0, 0.0),  # a batch system in which jobs take turns
        ((1200.0, 30.0), 30.0, 0.0, 1200.0),
    ],
)
def test_a_call_runs_out_of_time_by_a_standstill_of_most_of_it(
    standstills: tuple[float, ...], before: float, since: float, explained: float
) -> None:
    absence, now = looking(*standstills, before=before)
    for late in (0.0, *(LOOK_S * n for n in range(1, int(since / LOOK_S) + 1))):
        absence.look(now + late)
    assert absence.within(LIMIT_S, now + since) == explained


def test_the_end_of_ranks_may_be_seen_before_the_look_that_is_due() -> None:
    absence, now = looking(1200.0)
    assert absence.within(LIMIT_S, now) == 1200.0


async def test_no_rank_is_blamed_where_the_whole_node_stood_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is the restart counted: who suspends a job often would end it."""
    monkeypatch.setattr(node.island.island, "LOOK_S", 0.05)
    async with island(tmp_path, ranks=2, collective_s=4.0) as running:
        await until(running, Ready)
        await running.send(begin(target_steps=LONG))
        await until(running, StepDone)
        first, second = pids(running)
        os.kill(second, signal.SIGSTOP)
        wait_until(lambda: gone(first), "the end of a rank that waits for the other one")
        died = await until(running, TrainerDied)
        settings = running.settings
    problem = problem_of(died, settings)
    assert (died.code, problem.code) == ("E406", "E406")
    assert "within 4 s, as this node stood still for" in problem.what
    assert "rank 1" not in problem.text()
    restarts = Restarts(())
    for _ in range(2 * MAX_RESTARTS):
        assert restarts.died(died, settings, begun=True) == {}


async def test_ranks_train_on_while_the_daemon_alone_is_stopped(tmp_path: Path) -> None:
    """As by Ctrl-Z: they are in sessions of their own. Nobody reads what rank 0 reports."""
    async with island(tmp_path, ranks=2) as running:
        await until(running, Ready)
        await running.send(begin(target_steps=MANY))
        await until(running, StepDone)
        assert running.vectors.beats, "by which they know how long it has stood still"
        wait_until(lambda: running.vectors.snapshot() is not None, "the snapshot")
        assert (await until(running, Snapshot)).steps == MANY


def stand_still(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """All timers are overdue at once, as they are after SIGCONT."""
    loop = asyncio.get_running_loop()
    before = loop.time
    monkeypatch.setattr(loop, "time", lambda: before() + seconds)


async def test_hosts_that_are_suspended_while_they_come_together_wait_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its host 0: who is missing has had no time to come."""
    async with hub(wait_s=600.0) as (made, said):
        made.offer(JOB)
        waiting = asyncio.ensure_future(made.muster(again=False))
        await hub_kit.until(lambda: said)
        stand_still(monkeypatch, 3600.0)
        async with alive(await ready(made)):
            assert len(await asyncio.wait_for(waiting, WAIT_S)) == 1


async def test_a_host_that_is_suspended_while_it_looks_for_host_0_looks_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with hub() as (made, _):
        port = made.port
    config = resolve({"dir": str(tmp_path), "device": "cpu"}, {})
    running = asyncio.ensure_future(Helper(config, place(port, host=1, wait_s=600.0)).main())
    await hub_kit.until(lambda: "looking for host 0" in capsys.readouterr().out)
    stand_still(monkeypatch, 3600.0)
    async with hub(port=port) as (made, _):
        await hub_kit.until(lambda: made.hosts or running.done())
        assert made.hosts
    assert await asyncio.wait_for(running, WAIT_S) == 0
