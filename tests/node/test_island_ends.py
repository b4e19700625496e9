"""How an island's ranks end: killed, refused, stuck, out of memory; and what is told of it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from island_kit import LONG, PROMPT_S, WAIT_S, all_gone, children, holds, island, pids, until
from places import KITS
from trainer_kit import begin

import node.island.island
import node.island.rank_process
import node.island.silence
from node.island.events import problem_of
from node.island.island import Event, Island
from node.island.rank_ends import TrainerDied
from node.island.silence import Silent
from node.trainer.channel import ChannelClosedError, Ready, StepDone
from node.trainer.settings import (
    EXIT_CRASHED,
    EXIT_OUT_OF_MEMORY,
    EXIT_RANK_LOST,
    EXIT_REFUSED,
    EXIT_STUCK,
)

pytestmark = pytest.mark.timeout(240)  # several starts of Python and torch in one test

TRACE = "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f0c in libc10.so)"
DAEMON = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from trainer_kit import tiny_settings, tiny_vectors, begin
from node.island.island import Island
from node.trainer.channel import Ready, StepDone

async def main():
    settings = tiny_settings(Path(sys.argv[1]), ranks=2)
    island = Island(settings, tiny_vectors(settings.manifest), Path(sys.argv[1]) / "run")
    await island.start()
    while True:
        event = await island.next_event()
        if isinstance(event, Ready):
            await island.send(begin(target_steps=10**6))
        if isinstance(event, StepDone) and event.step == 1:
            print(*[rank.process.pid for rank in island._ranks], flush=True)

asyncio.run(main())
"""


async def test_a_killed_rank_is_told_at_once_and_takes_the_others_down(tmp_path: Path) -> None:
    async with island(tmp_path, ranks=2) as running:
        await until(running, Ready)
        await running.send(begin(target_steps=10**6))
        await until(running, StepDone)
        processes = pids(running)
        started = time.monotonic()
        os.kill(processes[1], signal.SIGKILL)
        died = await until(running, TrainerDied)
        assert time.monotonic() - started < PROMPT_S
        assert (died.rank, died.signal, died.exit_code, died.code) == (1, "SIGKILL", None, "E405")
        assert await all_gone(processes, PROMPT_S)
        with pytest.raises(ChannelClosedError):
            await running.send(begin())
        await running.restart(ranks=1)
        await until(running, Ready)
        assert len(pids(running)) == 1


async def test_rank_0_killed(tmp_path: Path) -> None:
    async with island(tmp_path) as running:
        await until(running, Ready)
        os.kill(pids(running)[0], signal.SIGKILL)
        died = await until(running, TrainerDied)
        assert (died.rank, died.signal) == (0, "SIGKILL")
        assert not running.alive


async def test_what_it_cannot_work_with_is_said_in_words(tmp_path: Path) -> None:
    async with island(tmp_path) as running:
        (tmp_path / "tokens").write_bytes(b"short")
        died = await until(running, TrainerDied)
    assert (died.rank, died.exit_code, died.code) == (0, EXIT_REFUSED, "E601")
    assert "too few" in died.text
    assert "OperatorError" in died.log_tail
    problem = problem_of(died, running.settings)
    assert problem.what == "trainer: no training text"
    assert "too few" in problem.why
    assert problem.fix.endswith(f"; see {died.log}")


async def test_out_of_memory_is_told_apart(tmp_path: Path) -> None:
    """A shell in the place of Python ends as a rank does that ran out of memory."""
    async with standing_in(tmp_path, f"exit {EXIT_OUT_OF_MEMORY}") as running:
        died = await until(running, TrainerDied)
    assert (died.code, died.exit_code) == ("E401", EXIT_OUT_OF_MEMORY)


async def test_a_kill_by_the_kernel_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = tmp_path / "vmstat"
    counter.write_text("nr_free_pages 5\noom_kill 3\n")
    monkeypatch.setattr(node.island.rank_process, "OOM_COUNTER", counter)
    script = f"sed -i 's/kill 3/kill 4/' {counter}; kill -9 $$"
    async with standing_in(tmp_path, script) as running:
        died = await until(running, TrainerDied)
    assert (died.code, died.signal) == ("E401", "SIGKILL")


async def test_the_rank_that_failed_first_is_blamed(tmp_path: Path) -> None:
    """Rank 0 loses its collective and ends before rank 1 has finished dying of its own fault."""
    script = (
        f'case "$*" in *"--rank 0"*) exit {EXIT_RANK_LOST};; '
        f"*) sleep 0.3; echo the cause; exit {EXIT_CRASHED};; esac"
    )
    async with standing_in(tmp_path, script, ranks=2) as running:
        died = await until(running, TrainerDied)
    assert (died.rank, died.exit_code, died.log_tail) == (1, EXIT_CRASHED, "the cause")


async def test_a_stuck_rank_is_told_from_a_dead_one(tmp_path: Path) -> None:
    """Rank 1 is stopped, not ended: the other gives a collective call up after a while."""
    async with island(tmp_path, ranks=2, collective_s=4.0) as running:
        await until(running, Ready)
        await running.send(begin(target_steps=LONG))
        await until(running, StepDone)
        os.kill(pids(running)[1], signal.SIGSTOP)
        died = await until(running, TrainerDied)
        assert (died.rank, died.exit_code, died.code) == (0, EXIT_STUCK, "E406")
        assert "within 4 s: rank 1 runs, and takes no part" in died.text
        assert not running.alive


@pytest.mark.parametrize("first", [False, True], ids=["later", "in its first step"])
async def test_an_only_rank_that_hangs_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """There is no other one to give a collective call up."""
    monkeypatch.setattr(node.island.island, "LOOK_S", 0.05)
    async with island(tmp_path) as running:
        await until(running, Ready)
        if first:
            os.kill(pids(running)[0], signal.SIGSTOP)
        await running.send(begin(target_steps=LONG))
        if not first:
            await until(running, StepDone)
        seen: list[Event] = []
        with monkeypatch.context() as patched:
            patched.setattr(node.island.silence, "SILENT_S", 1.0)
            patched.setattr(node.island.silence, "TIMES", 0.0)  # whatever its first step took
            if not first:
                os.kill(pids(running)[0], signal.SIGSTOP)
            died = await until(running, TrainerDied, seen)
        assert (died.rank, died.code) == (0, "E406")
        assert f"rank 0 runs, and has done nothing for {6 if first else 1} s" in died.text
        assert any(isinstance(event, Silent) for event in seen)
        assert not running.alive
        assert await all_gone(pids(running), PROMPT_S)
        await running.restart()
        await until(running, Ready)


@pytest.mark.parametrize("second", ["sleeps", "has given up too"])
async def test_a_rank_that_the_watchdog_of_nccl_aborts_is_not_blamed(
    tmp_path: Path, second: str
) -> None:
    """It has waited in vain, and says so in its log; so may another one that runs still."""
    gave_up = (
        "echo '[rank0]:[E1124 20:27:21.426415540 ProcessGroupNCCL.cpp:685] [Rank 0] Watchdog "
        "caught collective operation timeout: WorkNCCL(SeqNum=4, OpType=ALLREDUCE) "
        "ran for 600029 milliseconds before timing out.'; "
        f"for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do echo '{TRACE * 4}'; done; "
    )
    other = gave_up if second != "sleeps" else ""
    script = (
        f'case "$*" in *"--rank 0"*) {gave_up} kill -ABRT $$;; '
        f'*"--rank 1"*) {other} sleep 60;; *) sleep 60;; esac'
    )
    async with standing_in(tmp_path, script, ranks=3) as running:
        died = await until(running, TrainerDied)
    assert (died.rank, died.exit_code, died.signal) == (0, EXIT_STUCK, "")
    assert died.code == "E406"
    silent = "rank 1, 2 runs" if second == "sleeps" else "rank 2 runs"
    assert silent in died.text


async def test_an_abort_of_a_ranks_own_is_blamed(tmp_path: Path) -> None:
    async with standing_in(tmp_path, "echo invalid pointer; kill -ABRT $$") as running:
        died = await until(running, TrainerDied)
    assert (died.code, died.signal) == ("E405", "SIGABRT")


async def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    async with standing_in(tmp_path, "kill -35 $$") as running:
        died = await until(running, TrainerDied)
    assert (died.code, died.signal) == ("E405", "signal 35")
    assert "was ended by signal 35" in died.text


@pytest.mark.parametrize("where", ["waits for hosts", "reads", "words it"])
async def test_a_defect_of_the_supervisor_is_told_as_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nobody awaits what supervises the ranks: a live node would have no trainer."""

    def defect(*given: object, **named: object) -> Any:
        raise KeyError("what nobody expected")

    async def later(*given: object) -> Any:
        defect()

    async with standing_in(tmp_path, "exit 7") as running:
        assert (await until(running, TrainerDied)).exit_code == 7
        with monkeypatch.context() as patched:
            if where == "waits for hosts":
                patched.setattr(running, "crew", SimpleNamespace(muster=defect))
            elif where == "reads":
                patched.setattr(running, "_read", later)
            else:
                patched.setattr(node.island.island, "obituary", defect)
            await running.restart()
            died = await until(running, TrainerDied)
        assert died.code == "E405"
        assert "KeyError: 'what nobody expected'" in died.text
        assert "in defect" in died.log.read_text()
        await running.restart()
        assert running.alive


async def test_garbage_from_the_trainer_ends_it(tmp_path: Path) -> None:
    python = "import os, sys, time; os.write(int(sys.argv[1]), bytes(4096)); time.sleep(60)"
    script = (
        f"while [ \"$1\" != --channel ]; do shift; done; exec {sys.executable} -S -c '{python}' $2"
    )
    async with standing_in(tmp_path, script) as running:
        died = await until(running, TrainerDied)
    assert "no report" in died.text
    assert await all_gone(pids(running), PROMPT_S)


@pytest.mark.parametrize("first", ["restart", "stop"])
async def test_the_end_comes_while_the_ranks_are_started_again(tmp_path: Path, first: str) -> None:
    async with standing_in(tmp_path, "exec sleep 60") as running:
        before = pids(running)
        calls = [running.restart, running.stop] if first == "restart" else [running.stop]
        under_way = [asyncio.create_task(call()) for call in calls]
        await asyncio.sleep(0)  # the first one has begun to end them
        if first == "stop":
            under_way.append(asyncio.create_task(running.restart()))
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*under_way)
        assert not running.alive
        assert pids(running) == before  # nothing was started in between
        assert await all_gone(before, PROMPT_S)


async def test_ranks_that_cannot_be_started_have_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for another process, for a while: that is no end of the node."""

    lacking = errno.ENOMEM

    async def no_memory(*given: object) -> None:
        raise OSError(lacking, os.strerror(lacking))

    async with standing_in(tmp_path, "exec sleep 60") as running:
        with monkeypatch.context() as patched:
            patched.setattr(node.island.rank_process.RankProcess, "spawn", no_memory)
            patched.setattr(node.island.island, "UNSTARTED_PAUSE_S", 0.2)
            began = time.monotonic()
            await running.restart()
            died = await until(running, TrainerDied)
            assert time.monotonic() - began >= 0.2
            lacking = errno.ENOSPC
            await running.restart()
            full = await until(running, TrainerDied)
            assert (full.code, problem_of(full, running.settings).code) == ("E405", "E402")
            for lacking, told in ((errno.EMFILE, "LimitNOFILE="), (errno.ENFILE, "fs.file-max")):
                await running.restart()
                files = problem_of(await until(running, TrainerDied), running.settings)
                assert files.code == "E405"
                assert os.strerror(lacking) in files.what
                assert told in files.fix
            lacking = errno.EACCES  # that will not pass
            with pytest.raises(PermissionError):
                await running.restart()
            lacking = errno.ENOMEM
            patched.setattr(node.island.island, "UNSTARTED_PAUSE_S", 60.0)
            await running.restart()
        assert died.code == "E405"
        assert "Cannot allocate memory" in died.text
        async with asyncio.timeout(PROMPT_S):
            await running.restart()  # the pause is not waited for
        assert running.alive
        assert len(pids(running)) == 1


@pytest.mark.parametrize("lacking", [errno.ENOMEM, errno.EADDRNOTAVAIL, errno.EROFS])
async def test_beside_other_hosts_whatever_keeps_ranks_from_starting_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: int
) -> None:
    """Nobody waits for what starts them there: an error that is raised would be lost."""

    class Alone:
        async def muster(self, *, again: bool) -> list[object]:
            return []

        def fit(self, settings: Any, hosts: object) -> Any:
            return settings

    async def refused(*given: object) -> None:
        raise OSError(lacking, os.strerror(lacking))

    async with standing_in(tmp_path, "exec sleep 60") as running:
        monkeypatch.setattr(node.island.island, "UNSTARTED_PAUSE_S", 0.1)
        with monkeypatch.context() as patched:
            patched.setattr(running, "crew", Alone())
            patched.setattr(running, "_launch", refused)
            await running.restart()
            died = await until(running, TrainerDied)
        assert died.code == "E405"
        assert os.strerror(lacking) in died.text


async def test_other_hosts_are_known_to_train_once_all_ranks_have_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = list[int]()

    class Alone:
        def met(self) -> None:
            met.append(1)

    monkeypatch.setattr(node.island.island, "STOP_GRACE_S", 0.2)
    async with standing_in(tmp_path, "exec sleep 60") as running:
        with monkeypatch.context() as patched:
            patched.setattr(running, "crew", Alone())
            assert not met
            running._take(Ready(1, b""))
        assert met == [1]


async def test_a_rank_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.island.island, "TERMINATE_GRACE_S", 0.2)
    script = "trap '' TERM; (trap '' TERM; sleep 60) & echo up; wait; wait"
    async with standing_in(tmp_path, script) as running:
        log = tmp_path / "run" / "trainer-rank0.log"
        assert await holds(lambda: "up" in log.read_text(), WAIT_S)
        processes = pids(running) + children(pids(running)[0])
        started = time.monotonic()
        await running.stop()
        assert time.monotonic() - started < PROMPT_S
    assert len(processes) == 2
    assert await all_gone(processes, PROMPT_S)


async def test_the_ranks_die_with_the_daemon(tmp_path: Path) -> None:
    daemon = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        DAEMON,
        str(tmp_path),
        str(KITS),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert daemon.stdout is not None
        async with asyncio.timeout(WAIT_S):
            processes = [int(pid) for pid in (await daemon.stdout.readline()).split()]
    finally:
        daemon.kill()
        await daemon.wait()
    assert len(processes) == 2
    assert await all_gone(processes, PROMPT_S)


@asynccontextmanager
async def standing_in(directory: Path, script: str, **changes: Any) -> AsyncIterator[Island]:
    """An island whose ranks run a shell script in the place of the trainer."""
    shell = directory / "stand-in"
    shell.write_text(f"#!/bin/sh\n{script}\n")
    shell.chmod(0o755)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "executable", str(shell))
        async with island(directory, **changes) as running:
            yield running
