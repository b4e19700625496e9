from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from trainer_kit import (
    TARGET,
    Bench,
    apply,
    begin,
    merge,
    tiny_settings,
    tiny_vectors,
)

import node.island
import node.rank_process
from node.island import Event, Island
from node.rank_ends import TrainerDied
from node.trainer.channel import (
    Applied,
    Begin,
    ChannelClosedError,
    Checkpoint,
    Command,
    Donate,
    Donated,
    Evaluated,
    Ready,
    Report,
    Saved,
    Snapshot,
    StepDone,
    Stop,
    Stopped,
)
from node.trainer.optim import REENTRY_STEPS
from node.trainer.settings import (
    EXIT_CRASHED,
    EXIT_OUT_OF_MEMORY,
    EXIT_RANK_LOST,
    EXIT_REFUSED,
    EXIT_STUCK,
)

pytestmark = pytest.mark.timeout(240)  # up to five starts of Python and torch in one test

WAIT_S = 60.0  # for anything; a loaded machine imports torch slowly
LONG = 500  # steps of a round that is not over while a test looks at it
PROMPT_S = 5.0  # for the news of a rank's death


@asynccontextmanager
async def island(directory: Path, **changes: Any) -> AsyncIterator[Island]:
    settings = tiny_settings(directory, **changes)
    vectors = tiny_vectors(settings.manifest)
    async with Island(settings, vectors, directory / "run") as running:
        yield running
    vectors.close()


async def until(running: Island, kind: type[Any], seen: list[Event] | None = None) -> Any:
    """The next event of a kind; anything unexpected in between fails with its own words."""
    async with asyncio.timeout(WAIT_S):
        while True:
            event = await running.next_event()
            if seen is not None:
                seen.append(event)
            if isinstance(event, kind):
                return event
            assert not isinstance(event, TrainerDied), f"{event.text}\n{event.log_tail}"


Losses = dict[int, float | None]  # by inner step


class Watch:
    """Sees all losses of an island, over restarts."""

    def __init__(self, running: Island) -> None:
        self.running = running
        self.losses: Losses = {}

    async def until(self, kind: type[Any]) -> Any:
        seen: list[Event] = []
        event = await until(self.running, kind, seen)
        self.losses |= {e.step: e.loss for e in seen if isinstance(e, StepDone)}
        return event

    async def begin(self, **beginning: Any) -> None:
        await self.until(Ready)
        await self.running.send(begin(**beginning))
        await self.until(Applied)

    async def two_rounds(self) -> None:
        """Two short rounds that commit, then a long one is begun."""
        await self.until(Ready)
        await self.running.send(begin(evaluate=True))  # must not leave copies of θ in any rank
        await self.until(Evaluated)
        await self.until(Applied)
        for target in (TARGET, LONG):
            snapshot = await self.until(Snapshot)
            await self.running.claim()
            merge(self.running.vectors)
            await self.running.send(apply(snapshot.round + 1, target_steps=target, evaluate=True))
            await self.until(Applied)

    async def save(self, directory: Path) -> Begin:
        """Write a checkpoint somewhere in the long round; the command that resumes from it."""
        directory.mkdir()  # noqa: ASYNC240 - nothing else runs in this loop
        await self.running.send(Checkpoint(str(directory)))
        assert (await self.until(Saved)).problem == ""
        return begin(round=2, target_steps=LONG, resume=str(directory))

    async def resume(self, command: Begin, steps: int) -> None:
        """Begin from a checkpoint and take some steps."""
        await self.until(Ready)
        await self.running.send(command)
        await self.until(Applied)
        for _ in range(steps):
            await self.until(StepDone)


def expected(directory: Path) -> Losses:
    """The losses of two rounds and a long one, of the loop alone, in this process."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        if report.round == 2:
            return [Stop()]
        assert bench.vectors.try_claim()
        merge(bench.vectors)
        return [apply(report.round + 1, target_steps=(TARGET, LONG)[report.round])]

    return dict(enumerate(Bench(directory, answer).run(begin()).losses, start=1))


def pids(running: Island) -> list[int]:
    return [rank.process.pid for rank in running._ranks]


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # an orphan that nobody has reaped yet is gone as well
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def holds(condition: Callable[[], bool], within: float) -> bool:
    """Whether a condition comes true in time."""
    deadline = time.monotonic() + within
    while not condition() and time.monotonic() < deadline:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(0.02)
    return condition()


async def all_gone(processes: list[int], within: float) -> bool:
    return await holds(lambda: all(map(gone, processes)), within)


async def test_a_process_trains_as_the_loop_alone_and_resumes(tmp_path: Path) -> None:
    alone = expected(tmp_path / "alone")
    async with island(tmp_path) as running:
        watch = Watch(running)
        await watch.two_rounds()
        resume = await watch.save(tmp_path / "saved")
        processes = pids(running)
        await running.restart()
        before, watch.losses = watch.losses, {}
        await watch.resume(resume, 20)
        await running.stop()
        assert isinstance(await watch.until(Stopped), Stopped)
    assert len(before) >= 2 * TARGET
    assert len(watch.losses) >= 20
    assert before.items() <= alone.items()
    assert watch.losses.items() <= alone.items()
    assert await all_gone(processes, PROMPT_S)
    assert not list((tmp_path / "run").glob("ranks-*"))


async def test_two_ranks_equal_one_and_each_resumes_the_other(tmp_path: Path) -> None:
    alone = expected(tmp_path / "alone")
    async with island(tmp_path, ranks=2) as running:
        watch = Watch(running)
        await watch.two_rounds()
        resume = await watch.save(tmp_path / "of-two")
        await running.restart(ranks=1)
        await watch.resume(resume, 10)
        resume = await watch.save(tmp_path / "of-one")
        await running.restart(ranks=2)
        await watch.resume(resume, 10)
    assert len(watch.losses) >= 2 * TARGET + 20
    assert watch.losses == pytest.approx({step: alone[step] for step in watch.losses}, rel=1e-3)
    short = {step: loss for step, loss in watch.losses.items() if step <= 2 * TARGET}
    assert short == pytest.approx({step: alone[step] for step in short}, rel=1e-5)


async def test_one_rank_takes_the_moments_of_two(tmp_path: Path) -> None:
    given, again = tmp_path / "given", tmp_path / "again"
    async with island(tmp_path, ranks=2) as running:
        watch = Watch(running)
        await watch.begin(target_steps=LONG)
        for _ in range(REENTRY_STEPS):
            await watch.until(StepDone)
        await running.send(Donate(str(given)))
        donated = await watch.until(Donated)
        assert donated.problem == ""
        moments = given.read_bytes()
        await running.restart(ranks=1)
        steps = donated.steps
        assert steps >= REENTRY_STEPS
        await watch.until(Ready)
        await running.send(begin(target_steps=0, moments=str(given), moments_steps=steps))
        await running.send(Donate(str(again)))  # at rest: no inner step comes before it
        donated = await watch.until(Donated)
        assert (donated.steps, donated.problem) == (steps, "")
        assert again.read_bytes() == moments
        assert not given.exists()


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
        assert (await until(running, Ready)).ranks == 1
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
    monkeypatch.setattr(node.rank_process, "OOM_COUNTER", counter)
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


TRACE = "frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x57 (0x7f0c in libc10.so)"


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


async def test_a_rank_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.island, "TERMINATE_GRACE_S", 0.2)
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


DAEMON = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from trainer_kit import tiny_settings, tiny_vectors, begin
from node.island import Island
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


async def test_the_ranks_die_with_the_daemon(tmp_path: Path) -> None:
    daemon = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        DAEMON,
        str(tmp_path),
        str(Path(__file__).parent),
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
