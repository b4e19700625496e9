"""Simulated islands that are slow, lie or are replaced: their work counts, or does no harm."""

from __future__ import annotations

from typing import Any

import pytest
from simulate_kit import SMALL, run
from suites import slow

from bootstrap.manifest_gossip import PAIRED
from node.simulate.scenario import IN_FRAGMENTS, MODES, Scenario
from node.simulate.world import Node, World
from node.trainer.fragment_progress import OVERDUE

LIKE_ALLREDUCE = ("onebit-adam", "powersgd")  # a round for each step, of all islands


def test_a_slow_island_holds_nobody_up_and_its_steps_count() -> None:
    waiting = run("diloco", stragglers=1, dynamic_steps=False, quorum=1.0)
    going = run("diloco", stragglers=1)
    assert going.points[-1].time < 0.5 * waiting.points[-1].time
    assert going.points[-1].steps > 4 * 8 * (2 + 1 / 5) / 3


@pytest.mark.parametrize(
    ("mode", "changes"),
    [("diloco", {"islands": 4, "stragglers": 1}), ("fedavg", {"islands": 4, "sample": 0.5})],
)
def test_tokens_are_equal_whoever_makes_a_round(mode: str, changes: dict[str, Any]) -> None:
    result = run(mode, rounds=20, **changes)
    under_way = SMALL["inner_steps"]
    assert 0 <= result.points[-1].steps - 20 * SMALL["inner_steps"] <= 1.5 * under_way


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("diloco", {}),
        ("async", {}),
        ("server", {"bound": 0}),
        ("server", {"bound": 2}),
        ("fedavg", {}),
        ("streaming", {}),
        ("eager", {}),
        ("btm", {}),
        ("sparta", {"share": 0.25}),
        ("gossip", {}),
        ("gossip", {"pairs": "average"}),
        ("gossip", {"fragments": 2}),
        ("push-sum", {}),
    ],
)
def test_one_of_four_that_is_four_times_slower_contributes_all_it_learns(
    mode: str, changes: dict[str, Any], dynamic: bool
) -> None:
    one = {"islands": 4, "stragglers": 1, "rounds": 8, "dynamic_steps": dynamic}
    result = run(mode, **one, **changes)
    # all but what was under way when the run ended: a round's steps at most; and where the others'
    # beat is too quick for it, it is due with the work of two rounds
    beaten = not dynamic and mode in ("diloco", "fedavg", "streaming")
    # it has sent, and trains on; or the last round was drawn without it; or a fragment's turn was
    # not there yet when the steps were over
    more = (not dynamic and mode in ("server", "fedavg")) or result.scenario.pieces > 1
    assert result.notes["unmerged_steps"] <= (1 + OVERDUE * beaten + more) * SMALL["inner_steps"]
    assert result.loss < result.points[0].loss - 0.2


@pytest.mark.parametrize(
    ("mode", "changes", "left"),
    [
        ("allreduce", {}, 0),
        ("onebit-adam", {}, 0),
        ("powersgd", {}, 0),
    ],
)
def test_lock_step_waits_for_the_slowest_and_has_all_of_its_work(
    mode: str, changes: dict[str, Any], left: int
) -> None:
    """Nothing is lost, and it takes as long as the slowest needs: four times."""
    result = run(mode, islands=4, stragglers=1, latency=0.01, **changes)
    steps = SMALL["rounds"] * SMALL["inner_steps"]
    assert result.notes["unmerged_steps"] <= left
    assert result.points[-1].steps == steps  # of every island, the slow one too
    slowest = steps * Scenario().step_s * Scenario().straggler_factor
    assert slowest <= result.points[-1].time < 2 * slowest
    assert result.loss < result.points[0].loss - 0.2


def test_a_liar_ruins_the_mean_and_not_the_open_merge() -> None:
    open_, mean = (
        run("diloco", islands=5, attackers=1, attack=8.0, rule=rule) for rule in ("open", "mean")
    )
    assert open_.loss < mean.loss - 0.5


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        *[(mode, {}) for mode in MODES if mode not in LIKE_ALLREDUCE],
        *[(mode, {"fragments": 3}) for mode in PAIRED],
        *slow(*[(mode, {}) for mode in LIKE_ALLREDUCE]),
        *slow(*[(mode, {"fragments": 3}) for mode in IN_FRAGMENTS if mode not in PAIRED]),
    ],
)
def test_islands_that_are_replaced_do_not_stop_it(mode: str, changes: dict[str, Any]) -> None:
    result = run(mode, islands=4, rounds=8, churn=1.5, **changes)
    assert result.notes["replaced"] >= 2
    assert result.loss < result.points[0].loss - 0.5


def test_who_is_replaced_in_a_run_that_merges_once_is_not_asked_whether_it_is_over() -> None:
    result = run("btm", islands=4, rounds=8, churn=0.3)
    assert result.notes["replaced"] == 1
    assert result.loss < result.points[0].loss - 1.5


def test_who_replaces_an_island_has_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    replace, shards = World.replace, list[list[int]]()

    def noted(world: World, gone: Node) -> Node:
        node = replace(world, gone)
        shards.append(sorted(one.shard for one in world.nodes.values()))
        return node

    monkeypatch.setattr(World, "replace", noted)
    run("diloco", islands=4, rounds=12, churn=1.5)
    assert len(shards) >= 5
    assert shards == [[0, 1, 2, 3]] * len(shards)
