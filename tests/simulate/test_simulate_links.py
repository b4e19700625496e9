"""``node simulate`` where links are measured: what follows from them, and links of unlike width."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bootstrap.manifest_rounds import Rounds
from node.entry.arrival import Arrival
from node.simulate.run import manifest_of
from node.simulate.scenario import Scenario
from node.simulate.world import Result, World, decide, simulate

SMALL: dict[str, Any] = {
    "islands": 3,
    "rounds": 8,
    "inner_steps": 8,
    "hidden": 16,
    "batch": 16,
    "inner_lr": 1e-2,
    "latency": 0.005,
}
WIDE, NARROW = 12.5e6, 5e4  # bytes a second


def run(mode: str, **changes: Any) -> Result:
    return simulate(Scenario.model_validate(SMALL | {"mode": mode} | changes))


def told(result: Result, name: str) -> list[dict[str, Any]]:
    written: Any = result.to_json()["decisions"]
    return [one for one in written if one["name"] == name]


def test_certified_rounds_step_down_the_ladder_where_links_are_narrow() -> None:
    wide, narrow = (run("diloco", codec="auto", bandwidth=rate) for rate in (WIDE, NARROW / 5))
    assert {one["value"] for one in told(wide, "codec")} == {"int4"}
    assert "rounds_int2" not in wide.notes
    assert narrow.notes["rounds_int2"] > narrow.notes["rounds_int4"]
    changes = [one for one in told(narrow, "codec") if one["before"] == "int4"]
    assert {one["island"] for one in changes} == {0, 1, 2}
    for one in changes:
        assert one["value"] == "int2"
        assert one["virtual_s"] > 0
        assert one["inputs"]["last_s"] > one["inputs"]["budget_s"] > 0
        assert one["why"] == "the one before takes longer than may be waited"


@pytest.mark.parametrize("mode", ["streaming", "eager"])
def test_rounds_that_inner_steps_hide_step_down_as_well_where_these_hide_too_little(
    mode: str,
) -> None:
    """However long rounds become by a fine codec, no more of its time is hidden."""
    wide, narrow = (
        run(mode, rounds=12, codec="auto", bandwidth=rate) for rate in (WIDE, NARROW / 2.5)
    )
    assert {one["value"] for one in told(wide, "codec")} == {"int4"}
    assert "rounds_int2" not in wide.notes
    assert narrow.notes["rounds_int2"] > 2 * narrow.notes["rounds_int4"]
    first = next(one for one in told(narrow, "codec") if one["before"] == "int4")
    steps = 8 if mode == "eager" else 2  # a quarter of them
    assert first["inputs"]["last_s"] > first["inputs"]["budget_s"] > steps * 0.1


def test_what_inner_steps_hide_is_sent_in_the_finest_codec() -> None:
    whole, hidden = (
        run(mode, rounds=12, codec="auto", bandwidth=2 * NARROW) for mode in ("diloco", "eager")
    )
    assert whole.notes["rounds_int2"] > whole.notes["rounds_int4"]
    assert "rounds_int2" not in hidden.notes


@pytest.mark.parametrize("mode", ["diloco", "streaming"])
def test_certified_rounds_get_as_long_as_the_links_ask_for(mode: str) -> None:
    wide, narrow = (run(mode, most_steps=32, bandwidth=rate) for rate in (WIDE, NARROW))
    assert wide.notes["last_inner_steps"] == 8
    assert narrow.notes["last_inner_steps"] > 8
    assert narrow.points[-1].bytes < wide.points[-1].bytes
    chosen = [one for one in told(narrow, "inner_steps") if one["before"] == 8]
    assert chosen
    assert all(one["inputs"]["exchange_s"] > 0 for one in chosen)


def test_a_narrow_link_is_one_islands_and_what_it_costs_is_seen() -> None:
    one = Scenario.model_validate(SMALL | {"stragglers": 1, "narrow": 1, "narrow_factor": 50})
    nodes = sorted(World(one).nodes.values(), key=lambda node: node.born)
    assert [node.step_s for node in nodes] == [0.4, 0.1, 0.1]
    assert [node.bandwidth for node in nodes] == [12.5e6, 12.5e6 / 50, 12.5e6]
    given = {"narrow_factor": 3, "bandwidth": NARROW}
    narrow, wide = (run("diloco", narrow=n, **given) for n in (1, 0))
    assert narrow.points[-1].time > wide.points[-1].time + 2
    assert narrow.notes["unmerged_steps"] == 0
    asks = SMALL | {"inner_steps": 0, "narrow": 1, "bandwidth": NARROW}
    assert decide(Scenario.model_validate(asks))[0].inner_steps > SMALL["inner_steps"]


def test_a_scenario_says_what_a_manifest_would() -> None:
    auto = manifest_of(Scenario(codec="auto"), 5).rounds
    assert auto.codecs == Rounds().codecs
    assert manifest_of(Scenario(mode="gossip", codec="auto"), 5).rounds.codecs == ("bf16", "int8")
    assert manifest_of(Scenario(mode="server"), 5).rounds.staleness == 0
    assert manifest_of(Scenario(mode="server", bound=2), 5).rounds.staleness == 2
    assert manifest_of(Scenario(rule="trimmed"), 5).merge.rule == "trimmed"


@pytest.mark.parametrize(("slower", "steps"), [(1.05, 40), (4.0, 10), (40.0, 5)])
def test_a_round_is_reckoned_with_the_steps_that_nodes_take(slower: float, steps: int) -> None:
    """Who is nearly as fast takes all, and one that is far ahead alone counts for no more."""
    asks = SMALL | {"islands": 3, "inner_steps": 40, "stragglers": 2, "straggler_factor": slower}
    nodes = World(Scenario.model_validate(asks)).nodes.values()
    assert sorted(node.chosen_steps for node in nodes) == [steps, steps, 40]


@pytest.mark.slow
def test_a_run_that_makes_progress_over_narrow_links_is_not_ended() -> None:
    """Where something is exchanged after each step, a round has as many transfers as steps."""
    asks = {"islands": 2, "rounds": 1, "inner_steps": 60, "codec": "fp32", "bandwidth": 1e4}
    result = run("allreduce", hidden=96, batch=1, **asks)
    assert result.notes["rounds"] == 60
    assert result.points[-1].time > 700  # the limit was 600 and a few


def test_as_many_islands_are_replaced_however_long_rounds_take() -> None:
    asks = {"islands": 4, "rounds": 10, "inner_steps": 4, "codec": "fp32", "churn": 0.5}
    fast, slow = (run("diloco", bandwidth=width, **asks) for width in (WIDE, NARROW))
    assert slow.points[-1].time > 4 * fast.points[-1].time
    assert fast.notes["replaced"] == slow.notes["replaced"] == 2


def test_who_is_replaced_counts_also_where_its_successor_still_downloads_at_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fetched(arrival: Arrival, *args: Any) -> Any:
        await asyncio.sleep(1e6)

    monkeypatch.setattr(Arrival, "fetch", fetched)
    result = run("diloco", islands=4, rounds=5, inner_steps=4, churn=0.5)
    assert result.notes["replaced"] == 4 * 0.5 * 5 / 10


@pytest.mark.parametrize(("mode", "codec"), [("diloco", "int4"), ("gossip", "int8")])
def test_as_many_islands_are_replaced_where_several_go_in_each_round(mode: str, codec: str) -> None:
    asks = {"islands": 8, "rounds": 4, "inner_steps": 4, "codec": codec, "churn": 2.5}
    first, again = (run(mode, **asks) for _ in range(2))
    assert first.notes["replaced"] == 8 * 2.5 * 4 / 10
    assert again.points == first.points
    assert first.loss < first.points[0].loss - 0.1


def test_a_swarm_from_which_all_go_before_newcomers_are_let_in_keeps_half_of_its_islands() -> None:
    """Or nobody would be left who can decide on a round, and the run would not end."""
    asks = {"islands": 6, "rounds": 3, "inner_steps": 4, "churn": 10.0}
    result = run("diloco", bandwidth=NARROW, **asks)
    assert result.notes["rounds"] == 3
    assert 3 <= result.notes["replaced"] <= 3 * 3


def test_steps_that_islands_had_no_time_for_are_told() -> None:
    asks = {"islands": 4, "rounds": 10, "inner_steps": 4, "codec": "fp32"}
    slow = run("diloco", bandwidth=NARROW, churn=2.0, **asks)
    left_out = slow.notes["steps_not_taken"]
    assert left_out == 4 * 10 * 4 - round(4 * slow.points[-1].steps)
    assert left_out > 0.05 * 4 * 10 * 4
    assert "steps_not_taken" not in run("diloco", bandwidth=NARROW, **asks).notes


@pytest.mark.parametrize("most", [4, 30, 2000])
def test_h_that_is_left_open_stays_below_what_it_may_grow_to(most: int) -> None:
    asks = SMALL | {"mode": "server", "inner_steps": 0, "most_steps": most, "bandwidth": 5000}
    scenario, notes = decide(Scenario.model_validate(asks | {"exposed": 0.02}))
    assert scenario.inner_steps == min(most, notes["inner_steps"])
    wide, notes = decide(Scenario.model_validate(asks | {"exposed": 0.5}))
    assert wide.inner_steps < scenario.inner_steps or scenario.inner_steps == most
