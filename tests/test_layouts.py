"""Every layout against one process: losses, validation loss and pseudo-gradient are the same.

Real ranks with gloo on this machine's few cores: all of them are for ``make test-layouts``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.layouts import CASES, Case, Outcome, compare

pytestmark = pytest.mark.timeout(600)

QUICK = ("TP, sequence parallel", "PP, ZBV")  # what is cut inside a matrix, and between layers


@pytest.fixture(scope="module")
def alone() -> dict[str, tuple[Outcome, Path]]:
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
def test_a_layout_computes_what_one_process_does(
    case: Case, directory: Path, alone: dict[str, tuple[Outcome, Path]]
) -> None:
    row = compare(case, directory, alone)
    assert "problem" not in row, row["problem"]
    assert len(row["losses"]) == 10
    assert row["loss_difference"] < 5e-5
    assert row["validation_difference"] < 5e-5
    assert row["delta_largest"] < 1e-5
    assert row["losses"][-1] < row["losses"][0] - 0.5  # it learns at all
