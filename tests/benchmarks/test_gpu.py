"""What an island's trainer does on a CUDA device, where there is one; one device is enough.

Layouts take one for each rank, with NCCL, and are passed over where there are fewer; but from NCCL
2.30 on ranks may share one, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``.
"""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from script_kit import TARGET as SCRIPTS_TARGET
from script_kit import Played
from script_kit import committing as merging
from torch import Tensor
from trainer_kit import TARGET, Bench, Script, apply, begin, committing

from benchmarks.layout_cases import CASES, Case
from benchmarks.layouts import Alone, compare, on_cuda, run
from diloco.pseudo_gradient import rebase
from node.trainer.channel import (
    Applied,
    Command,
    Donate,
    Donated,
    Report,
    Save,
    Saved,
    Snapshot,
    StepDone,
    Stop,
)
from node.trainer.optim import REENTRY_STEPS
from node.trainer.speed import peak_flops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA: dict[str, Any] = {"device": "cuda", "bf16": False}
LAYOUTS = (
    "DDP",
    "FSDP, ZeRO 3",
    "HSDP x TP",
    "TP, sequence parallel",
    "CP, Ulysses",
    "CP, ring",
    "PP, 1F1B",
    "PP, ZBV",
    "MoE, EP",
    "one rank, offload",
    "FSDP, offload",
    "FSDP x TP, Muon",
    "llama, PP x FSDP x TP",
)
IN_BF16 = tuple(case for case in CASES if case.settings.get("bf16"))


def trained(directory: Path, **settings: Any) -> Script:
    return Bench(directory, committing(3), **settings).run(begin())


def test_in_fp32_it_learns_what_a_cpu_learns(tmp_path: Path) -> None:
    here = trained(tmp_path / "cpu")
    there = Bench(tmp_path / "cuda", committing(3), **CUDA)
    assert there.trainer.ranks.device.type == "cuda"
    assert there.run(begin()).losses == pytest.approx(here.losses, abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_bf16_it_learns_as_well(tmp_path: Path, compiled: bool) -> None:
    exact = trained(tmp_path / "fp32", **CUDA)
    bench = Bench(tmp_path / "bf16", committing(3), device="cuda", bf16=True, compile=compiled)
    assert bench.trainer.engine.computing.dtype == torch.bfloat16
    found = bench.run(begin())
    assert len(found.losses) == 3 * TARGET
    assert found.losses == pytest.approx(exact.losses, abs=0.05)


def test_a_step_tells_its_utilisation_where_the_peak_is_known(tmp_path: Path) -> None:
    shares = [step.mfu for step in trained(tmp_path, device="cuda").of(StepDone)]
    if peak_flops(torch.device("cuda", 0)) is None:
        assert set(shares) == {None}
    else:
        assert all(share is not None and math.isfinite(share) for share in shares)
        assert all(0 < share < 1 for share in shares)


# --- rounds ---------------------------------------------------------------------------------------


def test_a_round_ends_on_what_all_islands_have_bit_for_bit(tmp_path: Path) -> None:
    bench = Bench(tmp_path, committing(3), **CUDA)
    bench.run(begin())
    assert torch.equal(bench.theta, bench.vectors.tensors()[0])


def test_what_was_learnt_meanwhile_is_moved_as_a_cpu_moves_it() -> None:
    random = torch.Generator().manual_seed(0)
    here, new, was = (torch.randn(300_000, generator=random) for _ in range(3))
    there = here.to("cuda")
    rebase(here, new, was)
    rebase(there, new.to("cuda"), was.to("cuda"))
    assert torch.equal(there.cpu(), here)


def test_the_loss_that_is_told_is_that_of_what_all_have(tmp_path: Path) -> None:
    def losses(**settings: Any) -> list[float | None]:
        script = Bench(tmp_path, committing(0), **settings)
        commands = (begin(evaluate=True), apply(1, evaluate=True, reset=True), Stop())
        return [report.validation_loss for report in script.run(*commands).of(Applied)]

    assert losses(**CUDA) == pytest.approx(losses(), abs=1e-4)


def test_a_snapshot_with_nan_is_told_of(tmp_path: Path) -> None:
    """Looked for on the device, before it is sent."""

    def spoiling(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == TARGET:
            first = bench.trainer.weights.names[0]
            bench.trainer.weights.local(first)[0].detach().view(-1)[3] = math.nan
        return committing(1)(bench, report)

    bench = Bench(tmp_path, spoiling, **CUDA)
    snapshots = bench.run(begin()).of(Snapshot)
    assert [snapshot.finite for snapshot in snapshots[:1]] == [False]


def test_memory_that_is_locked_twice_does_no_harm(tmp_path: Path) -> None:
    """As any that the driver refuses to lock: copies work as before, and so do kernels."""
    bench = Bench(tmp_path, committing(1), **CUDA)
    for _ in range(2):
        bench.vectors.lock_pages(torch.device("cuda"))
    assert torch.ones(3, device="cuda").sum() == 3
    bench.run(begin())
    assert torch.equal(bench.theta, bench.vectors.tensors()[0])


# --- what is on disk ------------------------------------------------------------------------------


def kept(bench: Bench) -> dict[str, Tensor]:
    """Parameters and what the optimizer has of each, on the CPU."""
    found: dict[str, Tensor] = {}
    for name, (parameter,) in bench.trainer.weights.parts.items():
        found[name] = parameter.detach().cpu()
        state = bench.trainer.optimizer.state[parameter]
        found |= {f"{name} {key}": value.cpu() for key, value in state.items()}
    return found


def test_a_checkpoint_is_gone_on_from_on_either_device(tmp_path: Path) -> None:
    def saving(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == TARGET + 2:
            return [Save(str(tmp_path)), Stop()]
        return committing(99)(bench, report)

    whole = trained(tmp_path, **CUDA)
    before = Bench(tmp_path, saving, **CUDA)
    first = before.run(begin())
    assert first.of(Saved) == [Saved(str(tmp_path), "", False)]
    base, resume = before.vectors.tensors()[0], begin(round=1, resume=str(tmp_path))
    for settings in (CUDA, {}):
        after = Bench(tmp_path, committing(1), **settings)
        after.vectors.tensors()[0].copy_(base)
        after.run(resume, Stop())
        mine, theirs = kept(after), kept(before)
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) for key in mine)
        after = Bench(tmp_path, committing(3), **settings)
        after.vectors.tensors()[0].copy_(base)
        second = after.run(resume)
        assert first.losses + second.losses == pytest.approx(whole.losses, abs=1e-4)


def test_a_donors_moments_reach_a_newcomer_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "moments"
    path.touch()  # as who asks for them does, and would remove to ask no more
    theirs: dict[str, Tensor] = {}

    def giving(bench: Bench, report: Report) -> list[Command]:
        if isinstance(report, StepDone) and report.step == REENTRY_STEPS:
            theirs.update({key: value.clone() for key, value in kept(bench).items()})
            return [Donate(str(path))]
        if isinstance(report, Donated):
            return [Stop()]
        return committing(10**6)(bench, report)

    donor = Bench(tmp_path, giving, **CUDA)
    (given,) = donor.run(begin()).of(Donated)
    assert (given.steps, given.problem) == (REENTRY_STEPS, "")
    newcomer = Bench(tmp_path, committing(1), **CUDA)
    newcomer.run(begin(moments=str(path), moments_steps=given.steps), Stop())
    mine = kept(newcomer)
    moments = [key for key in theirs if " exp_avg" in key]
    assert moments
    assert all(torch.equal(mine[key], theirs[key]) for key in moments)


# --- scripts --------------------------------------------------------------------------------------


def test_a_script_on_a_gpu_learns_what_one_on_the_cpu_learns() -> None:
    found = []
    for device in ("cpu", "cuda"):
        played = Played(merging, device=device)
        played.train(2 * SCRIPTS_TARGET)
        assert torch.equal(played.theta, played.base)  # a round has just been taken in
        found.append(played.theta)
    here, there = found
    assert torch.allclose(here, there, atol=1e-5)


def test_a_script_comes_back_with_its_moments(tmp_path: Path) -> None:
    """Its optimizer counts steps on the CPU, as torch has it, and is not made to wait for a GPU."""
    before = Played(merging, device="cuda")
    before.train(SCRIPTS_TARGET)
    before.script.commands += [Save(str(tmp_path))]
    before.train()
    before.joined._progress.files.finish()
    (saved,) = before.script.of(Saved)
    assert not saved.problem
    after = Played(merging, device="cuda", round=before.joined.round, resume=str(tmp_path))
    parameters = zip(before.model.parameters(), after.model.parameters(), strict=True)
    for old, new in parameters:
        was, has = before.optimizer.state[old], after.optimizer.state[new]
        assert [value.device for value in has.values()] == [value.device for value in was.values()]
        assert all(torch.equal(has[key], was[key]) for key in was)
    assert torch.equal(after.theta, before.theta)


# --- several ranks, with NCCL ---------------------------------------------------------------------


def enough_devices(ranks: int) -> bool:
    """Whether NCCL takes ``ranks`` on this host's devices, several on one if need be."""
    several = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    return torch.cuda.device_count() >= (1 if several else ranks)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.name in LAYOUTS], ids=lambda case: case.name
)
def test_a_layout_learns_what_a_cpu_learns(case: Case, tmp_path: Path) -> None:
    if not enough_devices(case.dims.size):
        pytest.skip(f"there are fewer than {case.dims.size} CUDA devices")
    there = dataclasses.replace(case, settings=case.settings | CUDA)
    found, _ = run(there, tmp_path / "cuda")
    assert not found.text
    alone, _ = run(Case("alone", model=case.model, inner=case.inner), tmp_path / "cpu")
    assert found.losses == pytest.approx(alone.losses, abs=1e-3)
    assert found.validation == pytest.approx(alone.validation, abs=1e-3)


@pytest.fixture(scope="module")
def alone() -> Alone:
    """What one process has come to, by model and precision."""
    return {}


@pytest.mark.parametrize("case", IN_BF16, ids=lambda case: case.name)
def test_a_layout_in_bf16_learns_what_one_rank_learns(
    case: Case, tmp_path_factory: pytest.TempPathFactory, alone: Alone
) -> None:
    if not enough_devices(case.dims.size):
        pytest.skip(f"there are fewer than {case.dims.size} CUDA devices")
    row = compare(on_cuda(case), tmp_path_factory.mktemp("bf16"), alone)
    assert row["ok"], row
