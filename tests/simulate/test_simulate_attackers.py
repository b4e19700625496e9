"""``node simulate`` with islands that lie: what a merge rule is worth, by mode."""

from __future__ import annotations

from typing import Any

import pytest
from suites import slow

from node.simulate.scenario import Scenario
from node.simulate.world import Result, simulate

LIED_TO: dict[str, Any] = {
    "islands": 5,
    "attackers": 1,
    "attack": 8.0,
    "rounds": 4,
    "inner_steps": 8,
    "hidden": 16,
    "batch": 16,
    "inner_lr": 1e-2,
}


def run(mode: str, **changes: Any) -> Result:
    return simulate(Scenario.model_validate(LIED_TO | {"mode": mode} | changes))


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("streaming", {}),
        ("eager", {}),
        ("server", {}),
        ("fedavg", {"sample": 1.0}),
        ("btm", {}),
        ("allreduce", {"codec": "fp32"}),
        *slow(
            ("server", {"fragments": 3}),
            ("powersgd", {}),
            ("onebit-adam", {"seed": 1}),  # else the mean of lies is no number any more
        ),
    ],
)
def test_a_liar_ruins_the_mean_of_every_group_and_not_its_open_merge(
    mode: str, changes: dict[str, Any]
) -> None:
    open_, mean = (run(mode, rule=rule, **changes) for rule in ("open", "mean"))
    assert open_.loss < open_.points[0].loss - 0.3
    assert open_.loss < mean.loss - 0.3


@pytest.mark.parametrize("rule", ["median", "trimmed", "geometric-median", "centered-clip"])
def test_each_robust_rule_withstands_a_liar(rule: str) -> None:
    """Of seven, since trimming a quarter leaves out one of them at each end."""
    result = run("diloco", islands=7, rule=rule)
    assert result.loss < result.points[0].loss - 0.5


def test_where_nobody_is_waited_for_a_liar_is_merged_as_well() -> None:
    """Rounds of others, which come all the time, do not take its lie from it."""
    lied_to, honest = (run("async", rule="mean", attackers=n) for n in (1, 0))
    assert lied_to.notes["unmerged_steps"] <= LIED_TO["inner_steps"]
    assert lied_to.loss > honest.loss + 0.3
