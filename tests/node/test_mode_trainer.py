"""What modes ask of a trainer: to contribute at will, to rest, to forget its moments."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from trainer_kit import TARGET, Bench, apply, begin, committing, merge, tiny_manifest

from node.trainer.channel import Command, InnerSteps, Report, Snapshot, StepDone, Stop
from node.trainer.fragment_progress import FragmentProgress, due, due_at_will
from node.trainer.optimizer_state import optimizer_steps
from node.trainer.trainer_state import StepTotals


def test_at_will_steps_count_from_the_last_contribution() -> None:
    progress = FragmentProgress(frozenset(), unsent=StepTotals(steps=6))
    assert due([progress], 2, 8) == due_at_will([progress], 8) == []
    progress.carried = StepTotals(steps=2)  # sent, and not merged: with the next round there is
    assert due([progress], 2, 8) == []  # who has a common beat waits for its turn
    assert due_at_will([progress], 8) == [0]
    progress.send()
    assert due_at_will([progress], 8) == []
    progress.answer(1, contributed=True, reset=False)
    progress.unsent = StepTotals(steps=7)
    assert due_at_will([progress], 8) == []


def test_at_will_fragments_begin_one_after_the_other_and_keep_apart() -> None:
    fragments = [FragmentProgress(frozenset()) for _ in range(4)]
    turns: dict[int, list[int]] = {}
    for step in range(1, 41):
        for progress in fragments:
            progress.unsent += StepTotals(steps=1)
        for fragment in due_at_will(fragments, 8):
            turns.setdefault(fragment, []).append(step)
            fragments[fragment].send()
            fragments[fragment].answer(step, contributed=True, reset=False)
    assert len({steps[0] for steps in turns.values()}) == 4
    for steps in turns.values():
        assert {b - a for a, b in itertools.pairwise(steps)} == {8}


def test_rounds_of_others_do_not_put_a_contribution_off(tmp_path: Path) -> None:
    """Lock-step would count its steps anew with each of them, and it would never be due."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, Snapshot):
            return [Stop()]
        if isinstance(report, StepDone) and report.step < TARGET:
            base, sent = bench.vectors.tensors()
            assert bench.vectors.try_claim()
            sent.copy_(base)
            return [apply(report.step, contributed=False)]
        return []

    script = Bench(tmp_path, answer).run(begin(at_will=True))
    (snapshot,) = script.of(Snapshot)
    assert snapshot.steps == TARGET


@pytest.mark.parametrize("evaluate", [False, True])
def test_where_nothing_is_to_be_kept_the_base_is_taken_as_it_is(
    tmp_path: Path, evaluate: bool
) -> None:
    expected: list[torch.Tensor] = []

    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert bench.vectors.try_claim()
        base, sent = bench.vectors.tensors()
        theta, work = sent.clone(), sent - base
        sent.copy_(base)
        sent[::3] = torch.nan
        base += 0.7 * work
        expected.append(base + work)
        expected[0][::3] = base[::3]
        assert not expected[0][::3].equal(theta[::3])
        return [apply(1, contributed=False, evaluate=evaluate, voids=True), Stop()]

    bench = Bench(tmp_path, answer)
    bench.run(begin())
    assert bench.theta[::3].equal(expected[0][::3])
    assert torch.allclose(bench.theta, expected[0], atol=1e-6)


def test_who_is_not_drawn_rests_until_it_is_needed(tmp_path: Path) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert bench.vectors.try_claim()
        merge(bench.vectors)
        if report.round == 1:
            return [Stop()]
        return [apply(1, target_steps=0)]

    bench = Bench(tmp_path, answer)
    looks = 0
    receive = bench.script.receive

    def woken(timeout: float) -> Command | None:
        nonlocal looks
        if bench.trainer.resting and not bench.script.commands:
            looks += 1
            if looks == 3:
                bench.script.commands.append(InnerSteps(TARGET))
        return receive(timeout)

    bench.script.receive = woken  # type: ignore[method-assign]
    script = bench.run(begin())
    assert looks == 3
    assert [snapshot.steps for snapshot in script.of(Snapshot)] == [TARGET, TARGET]
    assert len(script.of(StepDone)) == 2 * TARGET


def test_moments_may_end_with_the_round(tmp_path: Path) -> None:
    kept, forgot = (Bench(tmp_path / name, committing(2)) for name in ("kept", "forgot"))
    first = kept.run(begin()).losses
    second = forgot.run(begin(forgets=True)).losses
    assert first[: TARGET + 1] == second[: TARGET + 1]
    assert first[-1] != second[-1]
    assert kept.trainer.optimizer.state
    assert not forgot.trainer.optimizer.state


@pytest.mark.parametrize(
    ("at_will", "fragment", "contributed", "left"),
    [
        (False, 0, True, 0),
        (False, 0, False, 0),  # it was late for its round, and another one begins all the same
        (False, 1, True, 2),
        (True, 0, True, 0),
        (True, 0, False, 2),  # of another island's work
        (True, 1, True, 2),
    ],
)
def test_moments_are_forgotten_once_a_cycle(
    tmp_path: Path, at_will: bool, fragment: int, contributed: bool, left: int
) -> None:
    trainer = Bench(tmp_path, committing(1), manifest=tiny_manifest(fragments=2)).trainer
    trainer.begin(begin(forgets=True, at_will=at_will, others=(0,)))
    for _ in range(2):
        trainer.inner_step()
    trainer.apply(apply(1, fragment=fragment, contributed=contributed))
    assert optimizer_steps(trainer.optimizer) == left
    trainer.apply(apply(2, fragment=1, contributed=False, reset=True))
    assert not trainer.optimizer.state


def test_windows_of_a_snapshot_of_earlier_ranks_are_not_read_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path, committing(1))
    trainer = bench.trainer
    read: list[int] = []
    batch = trainer.data.batch

    def noted(round: int, slot: int, slots: int, step: int, rows: range | None = None) -> Any:
        read.append(step)
        return batch(round, slot, slots, step, rows)

    trainer.data = cast(Any, SimpleNamespace(batch=noted))
    trainer.begin(begin(round_step=TARGET))
    for _ in range(2):
        trainer.inner_step()
    assert sorted(set(read)) == [TARGET, TARGET + 1]
    assert bench.vectors.try_snapshot()
    trainer.take_snapshot()
    (said,) = (r for r in bench.script.reports if isinstance(r, Snapshot))
    assert (said.steps, said.round_step) == (2, TARGET + 2)
    trainer.apply(apply(0, contributed=False, reset=True, round_step=TARGET + 1))
    trainer.inner_step()
    assert read[-1] == TARGET + 1
    trainer.apply(apply(1))
    trainer.inner_step()
    assert read[-1] == 0
