"""``node simulate``: what newcomers are, and what their first rounds count for, by mode."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, cast

import pytest
from suites import slow

from node.entry.arrival import Arrival
from node.replicas.own_state import OwnReplica
from node.simulate.decisions import Decisions
from node.simulate.scenario import Scenario
from node.simulate.swarm import Members
from node.simulate.world import World, simulate
from protocols.errors import OperatorError
from protocols.messages import Certificate

ISLANDS = 4
REPLACED: dict[str, Any] = {
    "islands": ISLANDS,
    "churn": 0.3,
    "rounds": 13,
    "inner_steps": 8,
    "hidden": 16,
    "batch": 16,
    "inner_lr": 1e-2,
}


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("diloco", {}),
        ("streaming", {"rounds": 15}),
        ("async", {}),
        ("sparta", {"codec": "bf16", "share": 0.25, "rounds": 8, "churn": 0.6}),
        *slow(("server", {"bound": 2}), ("fedavg", {})),
    ],
)
def test_a_newcomers_work_counts_for_a_quarter_then_a_half_then_three_quarters(
    mode: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    worlds, weights = list[World](), defaultdict[int, dict[int, float]](dict)
    made, told = World.__post_init__, Decisions.committed

    def remembered(world: World) -> None:
        made(world)
        worlds.append(world)

    def committed(decisions: Decisions, certificate: Certificate) -> None:
        told(decisions, certificate)
        outcome = certificate.outcome
        for one in outcome.contributors:
            node = worlds[-1].nodes.get(one.peer)
            if node is not None and outcome.fragment == 0:
                # of 2401.09135's rates, tokens² / steps, what a token counts for by its batch
                weights[node.born][outcome.round] = one.weight / one.tokens

    monkeypatch.setattr(World, "__post_init__", remembered)
    monkeypatch.setattr(Decisions, "committed", committed)
    simulate(Scenario.model_validate(REPLACED | {"mode": mode} | changes))
    (usual,) = {weight for born in range(ISLANDS) for weight in weights[born].values()}
    came = [list(weights[born].values())[:4] for born in weights if born >= ISLANDS]
    came = [first for first in came if len(first) >= 2]  # others came too late
    assert came
    for first in came:
        assert first == pytest.approx([usual * n for n in (0.25, 0.5, 0.75, 1.0)][: len(first)])


def test_who_takes_the_place_of_another_is_as_slow_and_narrow_and_lies_as_it_did() -> None:
    asks = REPLACED | {"stragglers": 1, "narrow": 1, "attackers": 1}
    world = World(Scenario.model_validate(asks))
    before = list(world.nodes.values())
    for gone in before:
        came = world.replace(gone)
        assert came.me not in [one.me for one in before]
        kept = ("shard", "step_s", "bandwidth", "honest")
        assert [getattr(came, name) for name in kept] == [getattr(gone, name) for name in kept]
    assert len(world.nodes) == ISLANDS
    assert sorted(one.honest for one in world.nodes.values()) == [False, True, True, True]
    assert len({one.step_s for one in world.nodes.values()}) == 2
    assert len({one.bandwidth for one in world.nodes.values()}) == 2


def test_what_an_island_sent_before_it_was_replaced_counts() -> None:
    world = World(Scenario.model_validate(REPLACED))
    gone = next(iter(world.nodes.values()))
    gone.transport.stats.sent(gone.me, "slice", 1000)
    gone.transport.stats.sent(gone.me, "announce", 400)
    gone.transport.stats.sent(gone.me, "chunk", 9000)  # of the state, to a newcomer
    before = world.bytes_a_parameter(), world.control_bytes()
    assert before == (1000 / ISLANDS / len(world.start), 400 / ISLANDS)
    world.replace(gone)
    assert (world.bytes_a_parameter(), world.control_bytes()) == before


def test_a_newcomer_to_pairs_begins_with_what_the_others_have_by_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its download took some rounds of theirs."""
    jumped, jump = list[tuple[int, int]](), OwnReplica.jump

    async def noted(replica: OwnReplica, vectors: Any, state: Any, **more: Any) -> None:
        assert replica.trainer is not None
        jumped.append((replica.place.round, state.place.round))
        await jump(replica, vectors, state, **more)

    monkeypatch.setattr(OwnReplica, "jump", noted)
    slow = {"mode": "gossip", "codec": "int8", "fragments": 2, "bandwidth": 2e4, "churn": 1.0}
    result = simulate(Scenario.model_validate(REPLACED | {"islands": 3, "step_s": 0.5} | slow))
    assert result.notes["replaced"] > 0
    assert jumped
    assert all(later > before for before, later in jumped)


def test_a_newcomer_that_finds_no_state_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, left = Arrival.fetch, [2]

    async def fetched(arrival: Arrival, *args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OperatorError("E502", "no state", "nobody has announced one", "wait")
        return await fetch(arrival, *args)

    monkeypatch.setattr(Arrival, "fetch", fetched)
    result = simulate(Scenario.model_validate(REPLACED))
    assert result.notes["downloads_in_vain"] == 2
    assert result.notes["replaced"] > 0


@pytest.mark.parametrize("mode", ["sparta", "btm"])
def test_who_has_not_begun_is_no_part_of_what_a_run_has_come_to(mode: str) -> None:
    asks = REPLACED | {"mode": mode, "codec": "bf16", "start_steps": 2}
    world = World(Scenario.model_validate(asks))
    for node in world.nodes.values():
        node.learner.load(world.start + 1.0)
        node.steps = 5
    world.replace(next(iter(world.nodes.values())))
    (found,) = Members(world, cast(Any, None)).views()
    assert found.allclose(world.start + 1.0, atol=1e-5)
