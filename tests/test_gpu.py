"""What an island's trainer does on a CUDA device, where there is one; one device is enough."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trainer_kit import TARGET, Bench, Script, begin, committing

from node.trainer.channel import Ready, StepDone
from node.trainer.speed import peak_flops

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def trained(directory: Path, **settings: Any) -> Script:
    return Bench(directory, committing(3), **settings).run(begin())


def test_in_fp32_it_learns_what_a_cpu_learns(tmp_path: Path) -> None:
    here = trained(tmp_path / "cpu")
    there = trained(tmp_path / "cuda", device="cuda", bf16=False)
    assert there.of(Ready)[0].device.startswith("cuda")
    assert there.losses == pytest.approx(here.losses, abs=1e-4)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_in_bf16_it_learns_as_well(tmp_path: Path, compiled: bool) -> None:
    exact = trained(tmp_path / "fp32", device="cuda", bf16=False)
    found = trained(tmp_path / "bf16", device="cuda", compile=compiled)
    assert found.of(Ready)[0].dtype == "bfloat16"
    assert len(found.losses) == 3 * TARGET
    assert found.losses == pytest.approx(exact.losses, abs=0.05)


def test_a_step_tells_its_utilisation_where_the_peak_is_known(tmp_path: Path) -> None:
    shares = [step.mfu for step in trained(tmp_path, device="cuda").of(StepDone)]
    if peak_flops(torch.device("cuda", 0)) is None:
        assert set(shares) == {None}
    else:
        assert all(share is not None and math.isfinite(share) for share in shares)
        assert all(0 < share < 1 for share in shares)
