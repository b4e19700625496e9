"""The training loop of one rank, in this process, with a daemon that is played."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_kit import TARGET, Bench, apply, begin, committing, merge, tiny_manifest

from node.trainer.channel import (
    Applied,
    Command,
    Evaluated,
    Report,
    Save,
    Saved,
    Snapshot,
    StepDone,
    Stop,
    Stopped,
)
from node.trainer.cross_entropy import mean_loss
from node.trainer.data import IGNORED, targets
from protocols.errors import OperatorError


def steps_before(script_reports: list[Report], kind: type) -> int:
    """Inner steps before the first report of a kind."""
    index = next(i for i, r in enumerate(script_reports) if isinstance(r, kind))
    return sum(isinstance(r, StepDone) for r in script_reports[:index])


def test_rounds_repeat_exactly_and_the_loss_falls(tmp_path: Path) -> None:
    one = Bench(tmp_path, committing(10)).run(begin())
    two = Bench(tmp_path, committing(10)).run(begin())
    assert one.losses == two.losses
    assert len(one.losses) == 10 * TARGET
    assert one.losses[-1] < one.losses[0] - 0.5
    assert [s.steps for s in one.of(Snapshot)] == [TARGET] * 10
    assert one.of(Snapshot)[0].tokens == TARGET * 4 * 16


def test_theta_is_exactly_base_when_nothing_was_learnt_since(tmp_path: Path) -> None:
    bench = Bench(tmp_path, committing(2))
    bench.run(begin())
    assert torch.equal(bench.theta, bench.vectors.tensors()[0])


def test_work_since_the_snapshot_is_carried_onto_the_new_base(tmp_path: Path) -> None:
    seen: dict[str, torch.Tensor] = {}

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == TARGET + 3:  # three steps overlapped
            seen["theta"] = bench.theta
            seen["sent"] = bench.vectors.tensors()[1].clone()
            bench.vectors.try_claim()
            merge(bench.vectors)
            return [apply(1), Stop()]
        return []

    bench = Bench(tmp_path, answer, manifest=tiny_manifest(overlap_steps=8))
    script = bench.run(begin())
    base = bench.vectors.tensors()[0]
    assert not torch.equal(seen["theta"], seen["sent"])
    assert torch.equal(bench.theta, base + (seen["theta"] - seen["sent"]))
    assert script.waited == 0
    assert bench.trainer.fragments[0].unsent.steps == 3


def test_a_round_without_this_island_keeps_all_its_work(tmp_path: Path) -> None:
    seen: dict[str, torch.Tensor] = {}

    def answer(bench: Bench, report: Report) -> list[Command]:
        base, sent = bench.vectors.tensors()
        if isinstance(report, StepDone) and report.step == 2:
            assert bench.vectors.try_claim()
            assert bench.vectors.snapshot() is None
            sent.copy_(base)  # the old outer state
            base += 0.01
            seen["expected"] = base + (bench.theta - sent)
            return [apply(1, contributed=False)]
        if isinstance(report, Applied) and report.round == 1:
            seen["theta"] = bench.theta
        return [Stop()] if isinstance(report, Snapshot) else []

    script = Bench(tmp_path, answer).run(begin())
    assert torch.equal(seen["theta"], seen["expected"])
    (snapshot,) = script.of(Snapshot)
    assert (snapshot.round, snapshot.steps) == (1, TARGET + 2)  # with the two steps before


def test_a_snapshot_that_nobody_merged_counts_towards_the_next(tmp_path: Path) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        if report.round == 1:
            return [Stop()]
        base, sent = bench.vectors.tensors()
        assert bench.vectors.try_claim()
        assert bench.vectors.snapshot() == 0
        sent.copy_(base)
        return [apply(1, contributed=False)]

    first, second = Bench(tmp_path, answer).run(begin()).of(Snapshot)
    assert (first.steps, second.steps) == (TARGET, 2 * TARGET)
    assert second.tokens == 2 * first.tokens


def test_claimed_vectors_get_no_snapshot(tmp_path: Path) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == 1:
            assert bench.vectors.try_claim()
            bench.vectors.tensors()[1].fill_(7.0)
        if isinstance(report, StepDone) and report.step == TARGET + 2:
            assert bool((bench.vectors.tensors()[1] == 7.0).all())
            bench.vectors.clear()
        return [Stop()] if isinstance(report, Snapshot) else []

    script = Bench(tmp_path, answer).run(begin())
    assert steps_before(script.reports, Snapshot) == TARGET + 2


@pytest.mark.parametrize(("overlap", "wait"), [(0, 3.0), (5, 3.0), (0, 0.0)])
def test_it_waits_once_and_trains_on(tmp_path: Path, overlap: int, wait: float) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        return [Stop()] if isinstance(report, StepDone) and report.step == TARGET + 9 else []

    bench = Bench(tmp_path, answer, manifest=tiny_manifest(overlap_steps=overlap), wait_s=wait)
    script = bench.run(begin())
    assert script.waited == pytest.approx(wait)
    assert len(script.of(Snapshot)) == 1  # the second waits for the answer to the first


@pytest.mark.parametrize(("step_s", "ahead"), [(0.5, 21), (5.0, 13)])
def test_of_a_daemon_that_stands_still_it_is_a_few_rounds_ahead_at_most(
    tmp_path: Path, step_s: float, ahead: int
) -> None:
    """More would be merged as one round's work, which ruins a lone island."""
    alive, waited_at = 10 * TARGET, list[int]()  # inner steps while it lives, though no round comes

    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, StepDone):
            return []
        bench.script.now += step_s
        if report.step <= alive:
            bench.vectors.beat()
        return [Stop()] if report.step == alive + ahead + 2 else []

    bench = Bench(tmp_path, answer, wait_s=0.0)
    assert bench.trainer.leader is not None
    bench.trainer.leader.bounded = False  # as where islands contribute at will
    receive = bench.script.receive

    def waiting(timeout: float) -> Command | None:
        if timeout > 0.0 and bench.trainer.begun:
            waited_at.append(bench.trainer.step)
            if len(waited_at) == 1000:  # it goes on, and has nothing to say for now
                bench.vectors.beat()
        return receive(timeout)

    bench.script.receive = waiting  # type: ignore[method-assign]
    bench.run(begin())
    assert waited_at == [alive + ahead] * 1000


def test_while_a_round_lasts_it_trains_for_three_more_at_most(tmp_path: Path) -> None:
    """The daemon lives, and its link is slow. More would be one step of the outer optimizer."""
    ahead, waits, waited_at = 4 * TARGET, 50, list[int]()

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone):
            bench.vectors.beat()
            return [Stop()] if report.step > ahead else []
        return []

    bench = Bench(tmp_path, answer, wait_s=0.0)
    receive = bench.script.receive

    def waiting(timeout: float) -> Command | None:
        if timeout > 0.0 and bench.trainer.begun:
            bench.vectors.beat()
            waited_at.append(bench.trainer.step)
            if len(waited_at) == waits:  # the round is over
                assert bench.vectors.try_claim()
                merge(bench.vectors)
                bench.script.commands.append(apply(1))
        return receive(timeout)

    bench.script.receive = waiting  # type: ignore[method-assign]
    script = bench.run(begin())
    assert waited_at == [ahead] * waits
    assert [snapshot.steps for snapshot in script.of(Snapshot)] == [TARGET, 3 * TARGET]


def test_every_snapshot_gets_its_own_wait(tmp_path: Path) -> None:
    """The answer comes after the wait was over and one more step was taken; twice."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and bench.trainer.fragments[0].outstanding is not None:
            bench.vectors.try_claim()
            merge(bench.vectors)
            return [apply(report.round + 1), *([Stop()] if report.round else [])]
        return []

    script = Bench(tmp_path, answer, wait_s=3.0).run(begin())
    assert script.waited == pytest.approx(2 * 3.0)
    assert [a.waited_s for a in script.of(Applied)] == pytest.approx([0.0, 3.0, 3.0])
    assert [s.steps for s in script.of(Snapshot)] == [TARGET, TARGET + 1]  # taken while waiting


def test_reset_takes_base_and_mends_the_moments(tmp_path: Path) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == 2:
            state = next(iter(bench.trainer.optimizer.state.values()))
            state["exp_avg"].view(-1)[0] = math.nan
            return [apply(1, reset=True), Stop()]
        return []

    bench = Bench(tmp_path, answer)
    script = bench.run(begin())
    assert torch.equal(bench.theta, bench.vectors.tensors()[0])
    assert bench.trainer.fragments[0].unsent.steps == 0
    assert [applied.dropped for applied in script.of(Applied)] == [0, 2]
    moments = [s["exp_avg"] for s in bench.trainer.optimizer.state.values()]
    assert all(bool(m.isfinite().all()) for m in moments)
    assert any(bool(m.any()) for m in moments)  # the good ones are kept


def test_steps_without_a_finite_gradient_are_counted_beside_the_others(tmp_path: Path) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        return [Stop()] if isinstance(report, Snapshot) else []

    bench = Bench(tmp_path, answer)
    real, steps = bench.trainer.engine.gradients, iter(range(100))
    bench.trainer.engine.gradients = lambda *given: (
        real(*given) if next(steps) % 3 == 2 else math.nan
    )
    (taken,) = bench.run(begin(target_steps=9)).of(Snapshot)
    assert (taken.steps, taken.skipped, taken.finite) == (9, 6, True)
    assert taken.tokens == sum(done.tokens for done in bench.script.of(StepDone))


def test_a_lost_island_says_so_and_is_found_again(tmp_path: Path) -> None:
    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == 1:
            with torch.no_grad():
                bench.trainer.weights.local("norm.weight")[0].fill_(math.nan)
        if isinstance(report, Snapshot) and not report.finite:
            return [apply(1, reset=True)]
        return [Stop()] if isinstance(report, Snapshot) else []

    script = Bench(tmp_path, answer).run(begin(target_steps=20))
    bad, good = script.of(Snapshot)
    assert (bad.finite, bad.steps) == (False, 4)  # long before its twenty steps
    assert good.finite
    assert good.round == 1
    assert [(r.loss, r.finite) for r in script.of(StepDone)[1:4]] == [(None, False)] * 3
    assert script.losses[4] is not None


@pytest.mark.parametrize("stop_at", [2 * TARGET, 2 * TARGET + 2])
def test_a_restart_changes_nothing(tmp_path: Path, stop_at: int) -> None:
    """Stopped at a round's boundary or within a round, resumed from the checkpoint."""
    unbroken = Bench(tmp_path, committing(4))
    whole = unbroken.run(begin())

    def answer(bench: Bench, report: Report) -> list[Command]:
        at_boundary = isinstance(report, Applied) and report.step == stop_at
        within = isinstance(report, StepDone) and report.step == stop_at and stop_at % TARGET
        if at_boundary or within:
            return [Save(str(tmp_path)), Stop()]
        return committing(99)(bench, report)

    before = Bench(tmp_path, answer)
    first = before.run(begin())
    assert first.of(Saved) == [Saved(str(tmp_path), "", False)]
    after = Bench(tmp_path, committing(4))
    after.vectors.base[:] = before.vectors.base
    second = after.run(begin(round=2, resume=str(tmp_path)))
    assert first.losses + second.losses == whole.losses
    assert second.of(Stopped) == whole.of(Stopped)
    ends = [(bench.trainer.step, bench.trainer.tokens) for bench in (after, unbroken)]
    assert ends[0] == ends[1]


def test_a_checkpoint_of_another_round_or_model_is_refused(tmp_path: Path) -> None:
    Bench(tmp_path, committing(1)).run(begin(), Save(str(tmp_path)))
    with pytest.raises(OperatorError, match="made at round 0, not 3"):
        Bench(tmp_path, committing(1)).run(begin(round=3, resume=str(tmp_path)))
    for file in (tmp_path / "trainer").glob("*.safetensors"):
        file.write_bytes(b"nothing")
    with pytest.raises(OperatorError, match="cannot resume") as caught:
        Bench(tmp_path, committing(1)).run(begin(resume=str(tmp_path)))
    assert caught.value.code == "E404"


def test_a_failing_disk_does_not_stop_training(tmp_path: Path) -> None:
    script = Bench(tmp_path, committing(1)).run(begin(), Save(str(tmp_path / "missing")))
    (saved,) = script.of(Saved)
    assert "No such file" in saved.problem
    assert not saved.full
    assert len(script.losses) == TARGET


def test_evaluation_is_of_base_alone(tmp_path: Path) -> None:
    """With work in flight, Applied tells the loss of the outer state, not that of θ."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == TARGET + 2:
            bench.vectors.try_claim()
            merge(bench.vectors)
            return [apply(1, evaluate=True), Stop()]
        return []

    bench = Bench(tmp_path, answer, manifest=tiny_manifest(overlap_steps=8))
    script = bench.run(begin())
    of_base = script.of(Applied)[1].validation_loss
    assert bench.trainer.evaluate() != of_base
    bench.trainer.layout.load_from(bench.vectors.tensors()[0], bench.trainer.engine.parts[0])
    assert bench.trainer.evaluate() == of_base


def test_evaluation_counts_the_targets_that_training_counts(tmp_path: Path) -> None:
    """Where documents are apart: nothing before a document's first token says what it is."""
    plain = tiny_manifest()
    apart = {"attention": "document", "document_end": ord(" ")}
    manifest = plain.model_copy(update={"model": plain.model.model_copy(update=apart)})
    trainer = Bench(tmp_path, committing(1), manifest=manifest).trainer
    windows, model = trainer.validation, trainer.engine.parts[0]
    counting = targets(windows, ord(" "))
    assert (counting == IGNORED).any()
    wanted = mean_loss(model(windows[:, :-1]), counting).item()
    assert trainer.evaluate() == pytest.approx(wanted, rel=1e-6)
    trainer.evaluated_at_once = 3
    assert trainer.evaluate() == pytest.approx(wanted, rel=1e-6)


def test_a_fragment_is_taken_in_also_where_its_evaluation_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the evaluation puts aside of the other fragments comes back too."""
    parts = 2
    benches = [
        Bench(tmp_path, committing(1), manifest=tiny_manifest(fragments=parts)) for _ in range(2)
    ]
    well, failing = benches

    def fails(*given: object) -> float:
        raise MemoryError

    monkeypatch.setattr(failing.trainer.engine, "evaluate", fails)
    for bench in benches:
        trainer = bench.trainer
        trainer.begin(begin(others=(0,) * (parts - 1)))
        trainer.inner_step()
        assert bench.vectors.try_snapshot(1)
        trainer.take_snapshot(1)
        trainer.inner_step()
        assert bench.vectors.try_claim(1)
        merge(bench.vectors)
        command = apply(1, fragment=1, evaluate=True)
        if bench is failing:
            with pytest.raises(MemoryError):
                trainer.apply(command)
        else:
            trainer.apply(command)
        assert bench.script.of(Applied)[-1].fragment == 1
    assert torch.equal(well.theta, failing.theta)
    assert not torch.equal(well.theta, well.vectors.tensors()[0])


def test_the_first_evaluation_is_before_the_first_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, committing(1))
    untrained = Bench(tmp_path, committing(0))
    untrained.trainer.begin(begin())
    script = bench.run(begin(evaluate=True))
    kinds = [type(report) for report in script.reports]
    assert kinds.index(Evaluated) < kinds.index(Applied) < kinds.index(StepDone)
    assert script.of(Evaluated) == [Evaluated(0, 0, untrained.trainer.evaluate())]


def test_the_wait_for_data_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path, committing(1))
    kind: Any = type(bench.trainer.data)
    given = kind.batch

    def slow(*args: Any) -> Any:
        time.sleep(0.02)
        return given(*args)

    monkeypatch.setattr(kind, "batch", slow)
    steps = bench.run(begin()).of(StepDone)
    assert all(step.data_s is not None and 0.02 <= step.data_s <= step.seconds for step in steps)


def test_text_that_is_too_short(tmp_path: Path) -> None:
    bench = Bench(tmp_path, committing(1))
    (tmp_path / "tokens").write_bytes(b"short")
    with pytest.raises(OperatorError, match="too few") as caught:
        type(bench.trainer)(bench.settings, bench.trainer.ranks, None)
    assert caught.value.code == "E601"


@pytest.mark.parametrize(
    ("name", "what"), [("tokens", "training tokens"), ("shard", "evaluation text")]
)
def test_a_file_that_is_gone_is_told_in_words(tmp_path: Path, name: str, what: str) -> None:
    bench = Bench(tmp_path, committing(1))
    (tmp_path / name).unlink()
    with pytest.raises(OperatorError, match=what) as caught:
        type(bench.trainer)(bench.settings, bench.trainer.ranks, None)
    assert caught.value.code == "E601"
    assert str(tmp_path / name) in caught.value.what
    assert caught.value.why == "No such file or directory"  # without a number


def test_work_that_is_never_called_for_is_due_after_two_rounds(tmp_path: Path) -> None:
    """An island that is late in every round still gets to send what it has."""

    def answer(bench: Bench, report: Report) -> list[Command]:
        base, sent = bench.vectors.tensors()
        if isinstance(report, Snapshot):
            return [Stop()]
        if isinstance(report, StepDone) and report.step % (TARGET - 1) == 0:  # just too early
            assert bench.vectors.try_claim()
            sent.copy_(base)
            return [apply(report.round + 1, contributed=False)]
        return []

    script = Bench(tmp_path, answer).run(begin())
    (snapshot,) = script.of(Snapshot)
    assert snapshot.steps == 2 * TARGET
