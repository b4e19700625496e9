"""``node simulate``: an island that others have left behind downloads by the rules of a node."""

from __future__ import annotations

from typing import Any

import pytest

from bootstrap.manifest_rounds import Rounds
from gossip.exchange import readers
from node.entry.arrival import Arrival
from node.replicas.replica import OuterReplica
from node.simulate import swarm
from node.simulate.scenario import Scenario
from node.simulate.world import Result, simulate
from protocols.errors import OperatorError

LEFT_BEHIND: dict[str, Any] = {
    "mode": "async",
    "islands": 3,
    "stragglers": 1,
    "straggler_factor": 30.0,  # so that many rounds pass in a step of it
    "dynamic_steps": False,
    "rounds": 12,
    "inner_steps": 4,
    "hidden": 16,
    "batch": 8,
}


def run(monkeypatch: pytest.MonkeyPatch, in_vain: int = 0) -> tuple[list[tuple[int, str]], Result]:
    """Rounds missed and what was kept, by download; the first ``in_vain`` bring nothing."""
    jumped, jump, fetch = list[tuple[int, str]](), OuterReplica.jump, Arrival.fetch
    left = [in_vain]

    async def noted(
        replica: OuterReplica, vectors: Any, state: Any, *, keep: str, **more: Any
    ) -> None:
        jumped.append((state.place.round - replica.place.round, keep))
        await jump(replica, vectors, state, keep=keep, **more)

    async def fetched(arrival: Arrival, *args: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OperatorError("E502", "no state", "nobody is further", "wait")
        return await fetch(arrival, *args)

    monkeypatch.setattr(swarm, "KEPT", 2)
    monkeypatch.setattr(readers, "AWAY_S", 0.0)  # else what it misses after its first is replayed
    monkeypatch.setattr(OuterReplica, "jump", noted)
    monkeypatch.setattr(Arrival, "fetch", fetched)
    return jumped, simulate(Scenario.model_validate(LEFT_BEHIND))


def test_work_that_is_too_late_for_a_node_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    jumped, result = run(monkeypatch)
    late = [keep for missed, keep in jumped if missed > Rounds().max_staleness]
    assert late
    assert set(late) == {"nothing"}
    assert "downloads_in_vain" not in result.notes


def test_a_download_in_vain_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    jumped, result = run(monkeypatch, in_vain=1)
    assert jumped, "who was ahead is asked again"
    assert result.notes["downloads_in_vain"] == 1
