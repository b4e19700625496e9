"""``node simulate``: islands that are replaced do not stay in memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from simulate_kit import run

from node.simulate import world as worlds
from node.simulate.learner import Learner
from node.simulate.swarm import Members
from node.simulate.world import Node, World

CHURN: dict[str, Any] = {"islands": 4, "rounds": 6, "inner_steps": 2, "hidden": 8, "churn": 3.0}


def _in_memory(monkeypatch: pytest.MonkeyPatch) -> weakref.WeakSet[Learner]:
    """Learners that there are, at any moment."""
    there, made = weakref.WeakSet[Learner](), Learner.__init__

    def noted(learner: Learner, *args: Any) -> None:
        made(learner, *args)
        there.add(learner)

    monkeypatch.setattr(Learner, "__init__", noted)
    return there


@pytest.mark.parametrize("mode", ["diloco", "gossip"])
def test_nobody_holds_an_island_that_was_replaced(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, over, left = _in_memory(monkeypatch), Members.over, list[int]()

    async def looked(members: Members) -> None:
        await over(members)
        gc.collect()
        living = {id(node.learner) for node in members.world.nodes.values()}
        left.append(sum(id(one) not in living for one in there))

    monkeypatch.setattr(Members, "over", looked)
    result = run(mode, latency=0.01, **CHURN)
    assert result.notes["replaced"] > 4
    assert left[0] <= 1, "whose last exchange may be under way"


def test_large_islands_that_were_replaced_are_gone_before_python_looks_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there, kill, most = _in_memory(monkeypatch), World.kill, list[int]()

    def killed(world: World, node: Node) -> None:
        kill(world, node)
        most.append(len(there))

    monkeypatch.setattr(World, "kill", killed)
    monkeypatch.setattr(worlds, "LEFT", 1)
    result = run("diloco", latency=0.01, **CHURN)
    assert result.notes["replaced"] > 4
    assert max(most) <= 4 + 2, "the living, and who is just being replaced"
