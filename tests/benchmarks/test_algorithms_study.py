"""The study of algorithms: it resumes, and its figures say what the rows say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from benchmarks import algorithms, algorithms_rows
from benchmarks import algorithms_report as report
from benchmarks.algorithms_figures import figures
from bootstrap.manifest_rounds import Mode
from node.simulate.scenario import Diverged, Scenario

BASE = "data parallel, fp32"
FIRST = "tune gradients 0.008/4/0"


def row(loss: float, sent: float, curve: list[list[float]] | None = None) -> dict[str, object]:
    return {
        "loss": loss,
        "bytes_per_parameter": sent,
        "parameters": 1000,
        "scenario": {"inner_lr": 0.003},
        "curve": curve or [[0, 0, 0, 5.0]],
    }


ROWS = {
    f"{BASE}/4/0": row(2.0, 7200.0),
    f"{BASE}/4/1": row(2.2, 7200.0),
    "DiLoCo, int4/4/0": row(2.01, 48.0),
    "DiLoCo, int2/4/0": row(2.05, 24.0),
    "NoLoCo pairs, H 25, int8/4/0": row(2.03, 60.0),
    "Muon inside, int4/4/0": row(1.98, 48.0),
    "8 islands/8/0": row(2.0, 48.0),
    "8 islands, 2 attack, mean/8/0": row(9.0, 48.0),
    "straggler, waited for/4/0": row(2.0, 1.0, [[0, 0, 0, 5.0], [400, 1, 1, 2.0]]),
    "straggler, fewer steps/4/0": row(2.0, 1.0, [[0, 0, 0, 5.0], [100, 1, 1, 2.01]]),
    "straggler, asynchronous/4/0": row(2.5, 1.0, [[0, 0, 0, 5.0], [90, 1, 1, 2.5]]),
    "straggler, waited for/4/1": row(2.0, 1.0, [[0, 0, 0, 5.0], [400, 1, 1, 2.0]]),
    "straggler, fewer steps/4/1": row(3.0, 1.0, [[0, 0, 0, 5.0], [100, 1, 1, 3.0]]),
    "straggler, asynchronous/4/1": row(2.0, 1.0, [[0, 0, 0, 5.0], [200, 1, 1, 2.0]]),
    "straggler, waited for/4/2": row(2.0, 1.0, [[0, 0, 0, 5.0], [400, 1, 1, 2.0]]),
}


def test_figures_follow_from_the_seeds_that_both_have() -> None:
    found = figures(ROWS)
    assert found["bytes_ratio_at_1pct"] == 150.0
    assert found["bytes_ratio_at_3pct"] == 300.0
    assert found["gossip_vs_diloco_loss"] == pytest.approx(100 * (2.03 / 2.01 - 1), abs=1e-3)
    assert found["muon_vs_dp_loss"] == pytest.approx(-1.0)
    assert found["straggler_speedup"] == 3.0  # 4 and 2 by seed; the third is not known yet
    assert found["byzantine_mean_loss_pct"] == 350.0
    assert found["churn_loss_pct"] is None  # not measured is not zero


def test_what_a_server_sends_is_shared_out() -> None:
    server = row(2.0, 24.0) | {"notes": {"server_bytes": 96.0}}
    found = figures(ROWS | {"server, lock-step, int4/4/0": server})
    assert found["bytes_ratio_at_1pct"] == 150.0  # 48 of each island, as in DiLoCo
    page = report.document(ROWS | {"server, lock-step, int4/4/0": server})
    assert "| server, lock-step, int4 | 48.0 | 150x | 2.0000 | +0.00 % | 1 |" in page


def test_rows_that_start_from_other_parameters_are_not_compared() -> None:
    elsewhere = row(2.01, 48.0, [[0, 0, 0, 4.992]])
    with pytest.raises(ValueError, match=r"DiLoCo, int4/4/0 began at a loss of 4\.992, .* stale"):
        figures(ROWS | {"DiLoCo, int4/4/0": elsewhere})


def test_a_mode_that_diverged_with_one_seed_has_no_figure() -> None:
    failed = {"scenario": {}, "failed": "nan"}
    assert figures(ROWS | {"DiLoCo, int2/4/1": failed})["bytes_ratio_at_3pct"] == 150.0
    found = figures(ROWS | {"Muon inside, int4/4/1": failed, "DiLoCo, int4/4/1": failed})
    assert found["muon_vs_dp_loss"] is None
    assert found["gossip_vs_diloco_loss"] is None


def test_a_run_that_diverges_is_a_row_and_a_fault_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "rows.json"
    raised: list[Exception] = []

    def simulate(scenario: Scenario) -> None:
        raise raised[-1]

    monkeypatch.setattr(algorithms, "simulate", simulate)
    for error in (Diverged("a loss"), ExceptionGroup("all", [Diverged("a loss")])):
        file.unlink(missing_ok=True)
        raised.append(error)
        algorithms.run_for(1e-9, file)
        assert "a loss is no longer a finite number" in algorithms.read(file)[FIRST]["failed"]
    file.unlink()
    for fault in (RuntimeError("a fault"), ExceptionGroup("all", [RuntimeError("a fault")])):
        raised.append(fault)
        with pytest.raises((RuntimeError, ExceptionGroup)):
            algorithms.run_for(1e-9, file)
        assert not file.exists()


def test_the_page_says_what_is_missing_and_what_diverged() -> None:
    rows = ROWS | {"eager, int4/4/0": {"failed": "nan"}}
    page = report.document(rows)
    assert "| DiLoCo, int2 | 24.0 | 300x | 2.0500 | +2.50 % | 1 |" in page
    assert "**Not measured yet:** NoLoCo pairs, int8; " in page
    assert "No mode has been compared at K = 16 yet." in page
    assert "| `churn_loss_pct` | not measured |" in page
    assert "Diverged: eager, int4." in page
    assert "| straggler, fewer steps | 2.5000 | 2 | 100 s, never |" in page
    assert "| `straggler_speedup` | 3.000 | at least 2 | 4.00x, 2.00x |" in page


def test_the_choice_of_a_mode_stands_on_the_rows() -> None:
    page = report.document(ROWS)
    choice = page[page.index("## Which mode to take") :]
    assert "{" not in choice
    assert "loss +0.5 %, with Muon inside -1.0 %, and H 10 as well (not measured)" in choice
    assert "3.0 times as soon" in choice
    assert "the mean +350.0 %" in choice
    for mode in get_args(Mode):
        assert f"`{mode}`" in choice, mode


def test_rows_are_added_one_by_one_and_not_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithms_rows, "ROUNDS", 1)
    monkeypatch.setattr(algorithms_rows, "INNER_STEPS", 1)
    monkeypatch.setattr(algorithms_rows, "MODEL", {"model": "bytes", "hidden": 8, "batch": 4})
    monkeypatch.setattr(algorithms_rows, "TRAINING", {})
    file = tmp_path / "rows.json"
    algorithms.run_for(1e-9, file)
    assert list(algorithms.read(file)) == [FIRST]
    algorithms.run_for(1e-9, file, part=1, parts=2)
    algorithms.run_for(1e-9, file)
    assert list(algorithms.read(file)) == [
        f"tune gradients {lr:g}/4/0" for lr in algorithms_rows.FAMILIES["gradients"][1][:3]
    ]
    assert json.loads(file.read_text())["keys"]["churn_loss_pct"] is None


def test_a_row_with_settings_of_before_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(algorithms_rows, "MODEL", {"model": "bytes", "hidden": 8, "batch": 4})
    monkeypatch.setattr(algorithms_rows, "TRAINING", {})
    monkeypatch.setattr(algorithms_rows, "INNER_STEPS", 1)
    file = tmp_path / "rows.json"
    for rounds in (1, 2):
        monkeypatch.setattr(algorithms_rows, "ROUNDS", rounds)
        algorithms.run_for(1e-9, file)
        assert {name: one["scenario"]["rounds"] for name, one in algorithms.read(file).items()} == {
            FIRST: rounds
        }


def test_a_stale_row_is_made_again_and_compared_with_none_that_stands() -> None:
    key = "DiLoCo, int2/4/0"
    stale = ROWS[key] | {"stale": "its norms decayed"}
    scenario = Scenario()
    made = row(1.0, 1.0) | {"scenario": scenario.model_dump(mode="json")}
    assert algorithms_rows.is_of(made, scenario)
    assert not algorithms_rows.is_of(made | {"stale": "its norms decayed"}, scenario)
    found = figures(ROWS | {key: stale})
    assert found["bytes_ratio_at_3pct"] == 150.0
    page = report.document(ROWS | {key: stale})
    assert "| DiLoCo, int2 † | 24.0 | 300x | 2.0500 | - | 1 |" in page
    assert "†: to be made again, since its norms decayed." in page


TUNED: dict[str, dict[str, object]] = {
    key: row(2.0 + index / 10, 1.0) | {"scenario": scenario.model_dump(mode="json")}
    for index, (key, scenario) in enumerate(algorithms_rows.wanted({}))
}


def test_all_rows_can_be_asked_for_and_have_equal_tokens() -> None:
    rows = dict(algorithms_rows.wanted(TUNED))
    assert len(rows) > 100
    for key, one in rows.items():
        name, islands, _ = key.rsplit("/", 2)
        special = name in algorithms_rows.SPECIAL
        short = name.startswith("straggler") if special else islands != "4"
        steps = 1200 if short else 3600
        if name.endswith("as many tokens"):  # of those that do not attack
            steps = 3600 * one.islands // (one.islands - one.attackers)
        assert one.rounds * one.inner_steps == pytest.approx(steps, rel=0.01), key


def test_a_rate_is_the_best_one_measured_for_its_family() -> None:
    few = {key: value for key, value in TUNED.items() if " 0.008/" not in key}
    assert algorithms_rows.best_rate(few, "AdamW") is None  # some are not known yet
    assert "DiLoCo, int4/4/0" not in dict(algorithms_rows.wanted(few))
    first = "tune Muon 0.024/4/0"
    rows = TUNED | {first: TUNED[first] | {"loss": 1.0}}
    wanted = dict(algorithms_rows.wanted(rows))
    assert wanted[f"{BASE}/4/0"].inner_lr == 0.008
    assert wanted["Muon inside, int4/4/0"].inner_lr == 0.024
    assert wanted["data parallel, PowerSGD/4/0"].inner_lr == 0.008


def test_the_rows_that_are_kept_were_made_with_the_settings_of_the_study() -> None:
    rows = algorithms.read(Path(algorithms.__file__).parent / "results" / "algorithms.json")
    asked = dict(algorithms_rows.wanted(rows))
    for key, one in rows.items():
        assert key in asked, f"{key} is no row of the study"
        if "stale" not in one:
            assert algorithms_rows.is_of(one, asked[key]), f"{key} was made with other settings"
