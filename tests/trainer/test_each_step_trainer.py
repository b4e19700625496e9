"""What rounds of gradients and eager rounds ask of a trainer."""

from __future__ import annotations

from pathlib import Path

import torch
from trainer_kit import TARGET, Bench, apply, begin

from node.trainer.channel import (
    Applied,
    Command,
    Report,
    Save,
    Shift,
    Shifted,
    Snapshot,
    StepDone,
    Stop,
)


def test_a_gradient_is_sent_and_no_step_is_taken(tmp_path: Path) -> None:
    """One batch a round; θ is the outer state, and the next gradient is taken there."""
    gradients: list[torch.Tensor] = []

    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        base, sent = bench.vectors.tensors()
        assert bench.vectors.try_claim()
        gradients.append(sent.clone())
        base -= 0.5 * sent
        return [Stop()] if report.round == 3 else [apply(report.round + 1, evaluate=True)]

    bench = Bench(tmp_path, answer)
    script = bench.run(begin(target_steps=1, gradients=True))
    assert len(script.of(StepDone)) == len(gradients) == 4
    assert all(0 < gradient.norm() <= 1.0001 for gradient in gradients)  # each is clipped
    assert not gradients[0].equal(gradients[1])
    assert not bench.trainer.optimizer.state
    losses = [r.validation_loss for r in script.of(Applied) if r.validation_loss is not None]
    assert losses[-1] < losses[0]


def test_a_gradient_that_comes_too_late_is_dropped(tmp_path: Path) -> None:
    seen: list[int] = []

    def answer(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert bench.vectors.try_claim()
        seen.append(report.steps)
        return [Stop()] if len(seen) == 3 else [apply(len(seen), contributed=False)]

    Bench(tmp_path, answer).run(begin(target_steps=1, gradients=True))
    assert seen == [1, 1, 1]


def test_the_step_of_a_gradient_that_a_checkpoint_does_not_have_comes_again(tmp_path: Path) -> None:
    """Its gradient is in nobody's hands any more: the same one is sent as without the break."""
    sent: list[torch.Tensor] = []

    def first(bench: Bench, report: Report) -> list[Command]:
        if not isinstance(report, Snapshot):
            return []
        assert bench.vectors.try_claim()
        sent.append(bench.vectors.tensors()[1].clone())
        if report.round == 0:
            return [apply(1)]
        return [Save(str(tmp_path)), Stop()]

    def second(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, Snapshot):
            sent.append(bench.vectors.tensors()[1].clone())
            return [Stop()]
        return []

    one, two = Bench(tmp_path, first), Bench(tmp_path, second)
    before = one.run(begin(target_steps=1, gradients=True))
    after = two.run(begin(round=1, target_steps=1, gradients=True, resume=str(tmp_path)))
    assert torch.equal(sent[1], sent[2])
    again, once = after.of(StepDone)[0], before.of(StepDone)[1]
    assert (again.step, again.loss, again.position) == (once.step, once.loss, once.position)
    assert two.trainer.tokens == one.trainer.tokens


def test_a_shift_moves_the_parameters_and_leaves_the_snapshot_out(tmp_path: Path) -> None:
    before: list[torch.Tensor] = []

    def answer(bench: Bench, report: Report) -> list[Command]:
        _, sent = bench.vectors.tensors()
        if isinstance(report, Snapshot):
            before.append(sent.clone())
            sent.fill_(0.25)
            return [Shift()]
        if isinstance(report, Shifted):
            assert bench.trainer.fragments[0].outstanding is not None
            assert bench.vectors.snapshot() == 0
            return [Stop()]
        return []

    bench = Bench(tmp_path, answer)
    bench.run(begin(tau=TARGET))
    name = bench.trainer.weights.names[0]
    where = bench.trainer.layout.views(before[0])[name]
    assert torch.allclose(bench.trainer.weights.local(name)[0], where + 0.25)
