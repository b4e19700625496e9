"""Every layout against one process: losses, validation loss and pseudo-gradient are the same.

Real ranks with gloo on this machine's few cores: all of them are for ``make test-layouts``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.layout_cases import CASES, REFUSED, STEPS, Case, manifest_of, reason
from benchmarks.layouts import Alone, compare, run
from node.trainer.dims import ParallelDims
from node.trainer.layout import Layout
from node.trainer.moments import MomentLayout

pytestmark = pytest.mark.timeout(600)

# what is cut inside a matrix, and between layers, and a mesh of one
QUICK = ("TP, sequence parallel", "PP, ZBV", "one rank, offload")


@pytest.fixture(scope="module")
def alone() -> Alone:
    """What one process came to, by model: computed once."""
    return {}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("layouts")


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=() if case.name in QUICK else pytest.mark.layouts)
        for case in CASES
    ],
)
def test_a_layout_computes_what_one_process_does(case: Case, directory: Path, alone: Alone) -> None:
    row = compare(case, directory, alone)
    assert "problem" not in row, row["problem"]
    assert len(row["losses"]) == 10
    assert row["ok"], {key: row[key] for key in row if key != "losses"}
    if not case.settings.get("bf16"):
        assert row["loss_difference"] < 5e-5
        assert row["validation_difference"] < 5e-5
        assert row["delta_largest"] < 1e-5
    assert row["losses"][-1] < row["losses"][0] - 0.5  # it learns at all


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_cannot_be_is_refused_by_the_flag(case: Case) -> None:
    assert reason(case).startswith("--")


@pytest.mark.layouts
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_checkpoint_is_gone_on_from_in_another_layout(tmp_path: Path, optimizer: str) -> None:
    """Written by a pipeline, read by shards of cut matrices: the losses are those of no break."""
    inner = {"optimizer": optimizer}
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    whole, _ = run(Case("alone", inner=inner), tmp_path / "whole")
    pipeline = Case("PP", ParallelDims(pp=2), inner=inner)
    first, _ = run(pipeline, tmp_path / "first", save=str(checkpoint))
    shards = Case("FSDP x TP", ParallelDims(dp_shard=2, tp=2), inner=inner)
    rest, _ = run(shards, tmp_path / "rest", resume=str(checkpoint))
    assert not whole.text + first.text + rest.text
    half = STEPS // 2  # training goes on while a checkpoint is written
    assert len(first.losses) >= half
    assert first.losses[:half] + rest.losses == pytest.approx(whole.losses, abs=5e-5)


@pytest.mark.layouts
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize(
    "dims",
    [ParallelDims(pp=2), ParallelDims(dp_shard=2, tp=2), ParallelDims(dp_replicate=2, dp_shard=2)],
    ids=str,
)
def test_moments_pass_through_a_layout_as_they_are(
    tmp_path: Path, dims: ParallelDims, optimizer: str
) -> None:
    """Taken from a donor's file by all ranks and given to the next newcomer: the same bytes."""
    case = Case(str(dims), dims, inner={"optimizer": optimizer})
    manifest = manifest_of(case)
    moment_layout = MomentLayout.of(Layout.of_manifest(manifest), manifest.inner)
    moments = torch.rand(moment_layout.size, generator=torch.Generator().manual_seed(0))
    taken, given = tmp_path / "taken", tmp_path / "given"
    taken.write_bytes(moments.numpy().tobytes())
    outcome, _ = run(case, tmp_path / "run", moments=(str(taken), str(given)))
    assert not outcome.text
    assert len(outcome.losses) == STEPS
    assert given.read_bytes() == moments.numpy().tobytes()
    assert not taken.exists()
