"""Knobs that follow from measurements: what is chosen, who decides, and what is told of it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gossip_kit import EVERYBODY, announce_of

from bootstrap.manifest import Manifest
from node.choosing import Chooser
from node.monitor.console import render
from node.monitor.event_log import EventLog
from node.monitor.events import KnobSet
from node.monitor.state import NodeState
from node.monitor.views import NodeView
from node.pace import Pace
from protocols.messages import Announce


def chooser(steps_per_second: float = 10.0, own: int = 0, **rounds: Any) -> Chooser:
    manifest = Manifest.model_validate({"model": {"n_layers": 4}, "rounds": rounds})
    return Chooser(manifest, Pace(steps_per_second=steps_per_second), EventLog(), own)


def other(number: int = 1, **changes: Any) -> Announce:
    return announce_of(EVERYBODY[number].peer_id, **changes)


def told(of: Chooser) -> list[KnobSet]:
    return [r.event for r in of.events.recent if isinstance(r.event, KnobSet)]


def test_what_is_fixed_stays() -> None:
    one = chooser(inner_steps=40, dynamic_steps=False)
    one.exchange.add(10.0)
    assert one.steps([other(steps_per_second=40.0)]) == 40
    assert told(one) == []


def test_the_slower_take_fewer_steps_and_say_why() -> None:
    one = chooser(inner_steps=40)
    assert one.steps([other(steps_per_second=40.0)]) == 10
    (event,) = told(one)
    assert (event.name, event.value, event.before) == ("own_steps", 10, None)
    assert event.inputs == {"inner_steps": 40.0, "steps_per_second": 10.0, "fastest": 40.0}
    one.steps([other(steps_per_second=41.0)])
    assert len(told(one)) == 1, "a choice that is about the same is not told again"
    one.steps([other(steps_per_second=10.0)])
    assert (told(one)[-1].value, told(one)[-1].before) == (40, 10)


def test_the_operator_has_the_last_word() -> None:
    one = chooser(own=7, inner_steps=40)
    assert one.steps([other(steps_per_second=40.0)]) == 7
    assert "--inner-steps" in told(one)[0].why


def test_steps_grow_until_waiting_is_a_twentieth_and_no_further_than_allowed() -> None:
    one = chooser(inner_steps=20, most_steps=200)
    assert one.steps([]) == 20
    assert "no exchange" in told(one)[0].why
    one.exchange.add(0.5)  # 5 steps' worth: 95 steps beside it
    assert one.steps([]) == 95
    share = 0.5 / (0.5 + 95 / 10)
    assert share == pytest.approx(0.05, abs=1e-3)
    slow = chooser(inner_steps=20, most_steps=200)
    slow.exchange.add(30.0)
    assert slow.steps([]) == 200
    assert "coarser codec" in next(event for event in told(slow) if event.name == "inner_steps").why


def test_each_fragment_of_a_round_is_waited_for() -> None:
    one = chooser(inner_steps=20, most_steps=400, fragments=4, tau=2)
    one.exchange.add(0.5)  # 3 steps' worth beyond τ, four times a round
    assert one.steps([]) == 228
    share = 4 * 0.3 / (4 * 0.3 + 228 / 10)
    assert share == pytest.approx(0.05, abs=1e-3)


def test_all_islands_take_the_most_that_anybody_asks_for() -> None:
    one = chooser(inner_steps=20, most_steps=200)
    one.exchange.add(0.2)
    asked = [other(steps_per_second=10.0, wanted_steps=150), other(2, steps_per_second=10.0)]
    assert one.steps(asked) == 150
    assert one.wanted == 38
    assert one.steps([dataclasses.replace(a, wanted_steps=10**9) for a in asked]) == 200


def test_tau_follows_from_the_transfer() -> None:
    one = chooser(inner_steps=40, fragments=2)
    assert one.tau() == 1
    one.transfer.add(0.35)
    assert one.tau() == 4
    assert told(one)[-1].name == "tau"
    assert chooser(inner_steps=40, fragments=2, tau=3).tau() == 3


def test_choices_are_lines_and_stand_in_the_state() -> None:
    one = chooser(inner_steps=40)
    state = NodeState(NodeView(peer="me"), log=one.events)
    one.steps([other(steps_per_second=40.0)])
    line = render(told(one)[0])
    assert line.startswith("own_steps is 10: slower")
    assert "fastest 40" in line
    knob = state.brief()["knobs"]["own_steps"]
    assert (knob["value"], knob["inputs"]["fastest"]) == (10, 40.0)


def test_who_began_late_ends_with_the_others() -> None:
    one = chooser(steps_per_second=10.0)
    assert one.together(20, 1000, [12.0, 30.0]) == 320
    assert one.together(20, 1000, [97.0]) is None  # about the same end
    assert one.together(20, 1000, [500.0]) is None  # it is the others who end with it
    assert one.together(20, 1000, []) is None
    assert one.together(0, 1000, [0.0]) == 1


@pytest.mark.parametrize("claim", [1e4, 1e18, 1.7e308])
def test_one_that_claims_to_be_fast_does_not_stop_the_others(claim: float) -> None:
    one = chooser(inner_steps=80)
    assert one.steps([other(1, steps_per_second=claim)]) == 10
    honest = [other(number, steps_per_second=10.0) for number in (1, 2)]
    assert one.steps([*honest, other(3, steps_per_second=claim)]) == 10
    # what two say is believed
    pair = [other(number, steps_per_second=400.0) for number in (3, 4)]
    assert one.steps([*honest, *pair, other(4, steps_per_second=claim)]) == 2


@pytest.mark.parametrize("claim", [1e18, 1.7e308])
def test_no_claim_is_beyond_the_arithmetic(claim: float) -> None:
    one = chooser(inner_steps=20, most_steps=200)
    one.exchange.add(5.0)
    assert one.steps([other(steps_per_second=claim, wanted_steps=2**62)]) >= 1
    assert one.wanted <= 200
    assert one.together(5, 100, [claim]) is None
    assert one.together(5, 100, [claim, 2.0]) is None
