"""A batch in parts: its gradient is the same, and out of memory makes the parts smaller."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from trainer_kit import Bench, begin, committing

from node.island.events import shrunk_of
from node.trainer.channel import StepDone
from node.trainer.data import TrainingData
from node.trainer.dims import ParallelDims
from node.trainer.parallel import share
from protocols.errors import OperatorError


def test_micro_batches_add_up(tmp_path: Path) -> None:
    whole = Bench(tmp_path, committing(2)).run(begin()).losses
    parts = Bench(tmp_path, committing(2), micro_batch=1).run(begin()).losses
    assert parts == pytest.approx(whole, rel=1e-4)


def test_bf16_keeps_parameters_in_fp32(tmp_path: Path) -> None:
    fp32 = Bench(tmp_path, committing(2)).run(begin()).losses
    bench = Bench(tmp_path, committing(2), bf16=True)
    assert bench.run(begin()).losses == pytest.approx(fp32, rel=1e-2)
    assert bench.script.losses != fp32
    assert {p.dtype for p in bench.trainer.engine.models.parameters()} == {torch.float32}
    assert bench.trainer.engine.computing.dtype == torch.bfloat16


def test_out_of_memory_halves_the_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, committing(1))
    whole = Bench(tmp_path, committing(1)).run(begin()).losses
    model = bench.trainer.engine.parts[0]
    forward = model.forward

    def limited(x: torch.Tensor) -> torch.Tensor:
        if len(x) > 1:
            raise torch.OutOfMemoryError("too large")
        return forward(x)

    monkeypatch.setattr(model, "forward", limited)
    assert bench.run(begin()).losses == pytest.approx(whole, rel=1e-4)
    assert bench.trainer.micro_batch == 1
    first, *others = bench.script.of(StepDone)
    problem = shrunk_of(first, 0, bench.settings)
    assert problem is not None
    assert (problem.code, first.micro_batch) == ("E401", 1)
    assert "1 sequences at a time" in problem.what
    assert "--recompute full" in problem.fix
    later = [shrunk_of(step, first.halved, bench.settings) for step in others]
    assert not any(later)  # it is told once


def test_where_fsdp_is_in_the_middle_of_a_layer_nothing_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a single rank that offloads: the daemon starts it again, with half the micro-batch."""

    def too_large(*given: object) -> float:
        raise torch.OutOfMemoryError("too large")

    trainer = Bench(tmp_path, committing(1)).trainer
    trainer.ranks = dataclasses.replace(trainer.ranks, mesh=cast(DeviceMesh, object()))
    for name in ("gradients", "evaluate"):
        monkeypatch.setattr(trainer.engine, name, too_large)
    with pytest.raises(torch.OutOfMemoryError):
        trainer.inner_step()
    with pytest.raises(torch.OutOfMemoryError):
        trainer.evaluate()


def test_out_of_memory_in_the_evaluation_leaves_the_micro_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, committing(1))
    whole = bench.trainer.evaluate()
    model, largest = bench.trainer.engine.parts[0], []
    forward = model.forward

    def limited(x: torch.Tensor) -> torch.Tensor:
        largest.append(len(x))
        if len(x) > 3:
            raise torch.OutOfMemoryError("too large")
        return forward(x)

    monkeypatch.setattr(model, "forward", limited)
    assert bench.trainer.evaluate() == pytest.approx(whole, rel=1e-6)
    assert (max(largest), largest[-1]) == (8, 2)  # of a shard of eight
    assert bench.trainer.micro_batch == bench.trainer.batch
    largest.clear()
    bench.trainer.evaluate()
    assert max(largest) == 2  # it is not tried in vain again


def test_an_evaluation_takes_no_more_than_a_micro_batch_at_once(tmp_path: Path) -> None:
    """So it is cured too where the daemon halves that for ranks that cannot try again."""
    short = Bench(tmp_path, committing(1), micro_batch=2).trainer
    assert short.evaluated_at_once == 2
    assert short.evaluate() == pytest.approx(Bench(tmp_path, committing(1)).trainer.evaluate())


def test_a_step_that_compiles_reads_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would read is not known yet: a stream's beginning is far from where a run stands."""
    shapes: list[torch.Size] = []

    def compiled(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            shapes.append(x.shape)
            return forward(x, *rest)

        return noted

    def read(*place: int, rows: range | None = None) -> None:
        raise AssertionError(f"reads at {place}")

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr("node.trainer.engine.check_compiler", lambda *_: None)
    with monkeypatch.context() as patched:
        patched.setattr(TrainingData, "batch", read)
        bench = Bench(tmp_path, committing(1), compile=True, micro_batch=3)
    tried = list(shapes)
    plain = Bench(tmp_path, committing(1), micro_batch=3)
    assert bench.run(begin()).losses == plain.run(begin()).losses
    steps = len(bench.script.of(StepDone))
    assert tried * (steps + 1) == shapes  # and what is compiled is what steps need


@pytest.mark.parametrize("batch", [3, 4, 5, 16, 17])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("micro", [1, 3, 100])
def test_shares_cover_the_batch_in_equally_many_parts(batch: int, ranks: int, micro: int) -> None:
    shares = [share(batch, rank, ranks, micro) for rank in range(ranks)]
    rows = sorted(row for parts in shares for part in parts for row in part)
    assert rows == list(range(batch))
    assert len({len(parts) for parts in shares}) == 1
    assert all(len(part) <= micro for parts in shares for part in parts)
    most = -(-batch // ranks)
    assert len(shares[0]) == -(-most // micro)
    assert all(len(part) for part in shares[0])


def test_more_ranks_than_sequences(tmp_path: Path) -> None:
    bench = Bench(tmp_path, committing(1))
    many = dataclasses.replace(bench.trainer.ranks, size=5, dims=ParallelDims(dp_shard=5))
    with pytest.raises(OperatorError, match="more than the 4 sequences of an inner step"):
        type(bench.trainer)(bench.settings, many, None)
