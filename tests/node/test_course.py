"""What an island's trainer is told to do next, without a trainer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from conductor_kit import quiet_swarm
from replica_kit import ME, OTHER

from bootstrap.manifest import Manifest
from node.island.beginning import Beginning
from node.island.course import UNTIMED_ETA_S, Course
from node.island.pace import Pace
from node.trainer.channel import StepDone
from protocols.messages import UNKNOWN_ETA_S

NOBODY = quiet_swarm()


def replicas(count: int) -> Any:
    """At round 0, which hold nothing."""
    return tuple(
        SimpleNamespace(
            me=ME,
            roster=(ME, OTHER),
            place=SimpleNamespace(round=0, work=0),
            turning=None,
            voids=False,
            brought=None,
            relived=False,
        )
        for _ in range(count)
    )


def made(fragments: int = 1, **tables: Any) -> Course:
    """With an H of 100 steps."""
    tables["rounds"] = {"inner_steps": 100, "fragments": fragments} | tables.get("rounds", {})
    manifest = Manifest.model_validate(tables)
    events = cast(Any, SimpleNamespace(emit=lambda event: None))
    return Course(
        manifest, ME, replicas(fragments), Pace(), events, own_inner_steps=0, streams=False
    )


def begun(course: Course, checkpoint: Path | None = None, read: int = 0) -> Any:
    return course.begin(Beginning(course.manifest, checkpoint=checkpoint), NOBODY, read)


def steps(course: Course, count: int) -> None:
    for n in range(count):
        done = StepDone(0, n, 3.0, None, 0.1, 64, 0.5)
        course.pace.add(done)
        course.heard(done)


def test_a_cycle_begins_with_what_is_not_read_again() -> None:
    course = made()
    assert begun(course, read=30).round_step == 30
    assert (course.target, course.since) == (100, 30)
    assert begun(made(mode="async"), read=30).round_step == 30


@pytest.mark.parametrize(
    ("round_", "work", "step", "mode", "told"),
    [
        (0, 0, 0, "diloco", True),
        (1, 0, 0, "diloco", True),  # the roll was called, as --wait-for has it
        (1, 640, 0, "diloco", False),
        (1, 0, 5, "diloco", False),
        (2, 0, 0, "diloco", False),
        (1, 0, 0, "gossip", False),  # another island's state, which it has trained
    ],
)
def test_the_model_that_a_run_starts_from_is_evaluated(
    round_: int, work: int, step: int, mode: str, told: bool
) -> None:
    course = made(mode=mode)
    course.pace.step = step
    place: Any = course.replicas[0].place
    place.round, place.work = round_, work
    assert begun(course).evaluate is told


@pytest.mark.parametrize("fragment", [0, 1])
@pytest.mark.parametrize("contributed", [True, False])
def test_fragment_0_s_rounds_divide_cycles(fragment: int, contributed: bool) -> None:
    course = made(2)
    begun(course)
    steps(course, 40)
    course.merged(fragment, contributed=contributed, reset=False, steps_read=7)
    assert course.since == (40 if fragment else 7)


@pytest.mark.parametrize(
    ("contributed", "reset", "since"), [(True, False, 0), (False, True, 0), (False, False, 40)]
)
def test_at_will_steps_count_from_the_last_contribution(
    contributed: bool, reset: bool, since: int
) -> None:
    course = made(mode="async")
    begun(course)
    steps(course, 40)
    course.merged(0, contributed=contributed, reset=reset, steps_read=7)
    assert course.since == since


def test_the_next_snapshot_of_each_fragment_is_foreseen() -> None:
    course = made(2)
    begun(course)
    assert course.eta(0) == UNTIMED_ETA_S < UNKNOWN_ETA_S, "no step was timed yet"
    steps(course, 40)
    second = course.eta(0) - course.eta(1)
    assert course.eta(0) == pytest.approx(30.0)
    assert second == pytest.approx(25.0), "half a cycle earlier"
    course.replicas[1].place.round = 1  # type: ignore[misc]
    assert course.eta(1) == pytest.approx(55.0), "it has had its turn in this cycle"


def test_an_evaluation_is_due_once_a_multiple_and_of_fragment_0_only() -> None:
    course = made(2, rounds={"eval_every": 10})
    begun(course)
    for replica in course.replicas:
        replica.place.round = 12  # type: ignore[misc]
    assert not course.evaluates(1)
    assert course.evaluates(0)
    assert not course.evaluates(0)


def test_ranks_that_begin_pass_over_what_was_due_while_they_were_gone() -> None:
    course = made(rounds={"eval_every": 10})
    course.replicas[0].place.round = 12  # type: ignore[misc]
    begun(course)
    assert not course.evaluates(0)


def test_an_island_at_rest_is_needed_once_it_is_drawn() -> None:
    course = made(mode="fedavg")
    drawn = False
    cast(Any, course.targets).drawn = lambda swarm: drawn
    begun(course)
    assert course.target == 0
    assert not course.needed(NOBODY)
    drawn = True
    assert course.needed(NOBODY)
    course.aim(NOBODY)
    assert course.target == 100
    assert not course.needed(NOBODY)
