"""An island's ranks as processes: they train as the loop alone, and resume each other's work."""

from __future__ import annotations

from pathlib import Path

import pytest
from island_kit import LONG, PROMPT_S, Losses, Watch, all_gone, island, pids
from trainer_kit import TARGET, Bench, apply, begin, merge

import node.island.rendezvous
from node.trainer.channel import (
    Command,
    Donate,
    Donated,
    Ready,
    Report,
    Snapshot,
    StepDone,
    Stop,
    Stopped,
)
from node.trainer.optim import REENTRY_STEPS
from node.trainer.settings import SETTINGS_FILE

pytestmark = pytest.mark.timeout(240)  # up to five starts of Python and torch in one test


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


@pytest.mark.parametrize("memory", [True, False])
async def test_ranks_meet_at_no_file_on_a_disk_that_may_be_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: bool
) -> None:
    """It grows with the process group of their first checkpoint, which is to be skipped then."""
    if not memory:  # a system without unnamed files
        monkeypatch.setattr(node.island.rendezvous, "FILES", tmp_path / "nothing")
    run = tmp_path / "run"
    async with island(tmp_path, ranks=2) as running:
        watch = Watch(running)
        await watch.begin(target_steps=LONG)
        await watch.save(tmp_path / "saved")
        there = {file.name for file in run.iterdir()}
        logs = {"trainer-rank0.log", "trainer-rank1.log", SETTINGS_FILE}
        assert len(there - logs) == (0 if memory else 1)
    assert {file.name for file in run.iterdir()} == logs


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
    for file in (given, again):
        file.touch()
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
        assert given.exists()  # the conductor removes it
