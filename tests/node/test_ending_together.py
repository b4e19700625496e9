"""Islands that are merged once (mode btm) end at about one time, without a trainer or a network."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from gossip_kit import EVERYBODY, announce_of

from bootstrap.manifest import Manifest
from node.island.course import UNTIMED_ETA_S, Course
from node.island.pace import Pace
from node.monitor.event_log import EventLog
from node.trainer.channel import StepDone
from protocols.messages import UNKNOWN_ETA_S, Announce

H = 1000
STEP_S = 0.1
SAID_S = 0.5  # after which an announcement is heard
NEAR = 0.05 * H


@dataclass
class Branch:
    """An island that trains, at a clock of its own, and what it said when."""

    number: int
    course: Course
    step_s: float
    now: float
    said: list[tuple[float, Announce]] = field(default_factory=list)

    @property
    def done(self) -> int:
        return self.course.since

    @property
    def ready(self) -> bool:
        return self.done >= self.course.target

    def say(self) -> None:
        """What others are told by now."""
        timed = {"eta": self.course.eta(0), "steps_per_second": self.course.pace.steps_per_second}
        if self.ready:
            timed["eta"] = 0.0
        peer = EVERYBODY[self.number].peer_id
        one = announce_of(peer, ready=self.ready, steps=self.done, **timed)
        self.said.append((self.now, one))

    def heard(self, now: float) -> tuple[float, Announce] | None:
        """The newest that has come by then."""
        return next((told for told in reversed(self.said) if told[0] <= now - SAID_S), None)

    def train(self, others: list[Branch], jitter: random.Random, spread: float) -> None:
        """One inner step, and a look at the others."""
        seconds = self.step_s * jitter.lognormvariate(0, spread)
        self.now += seconds
        done = StepDone(0, self.done + 1, 3.0, None, 0.1, 64, seconds)
        self.course.pace.add(done)
        self.course.heard(done)
        told = {one.number: heard for one in others if (heard := one.heard(self.now))}
        end = self.course.ends_with_others(swarm_of([*told.values()], self.now))
        if end is not None:
            self.course.take(end)
        self.say()


def swarm_of(told: list[tuple[float, Announce]], now: float) -> Any:
    """In which these announcements were made at these times."""
    at = {one.peer: (when, one.eta) for when, one in told}
    membership = SimpleNamespace(
        members_alive=lambda now: [one for _, one in told],
        eta=lambda peer, now: max(0.0, at[peer][1] - (now - at[peer][0])),
    )
    return SimpleNamespace(membership=membership, now=lambda: now)


def branch(
    number: int = 0, *, began: float = 0.0, step_s: float = STEP_S, own: int = 0, **tables: Any
) -> Branch:
    run = {"mode": "btm", "rounds": {"inner_steps": H}} | tables
    manifest, place = Manifest.model_validate(run), SimpleNamespace(round=0, work=0)
    replica: Any = SimpleNamespace(place=place, turning=None)
    me = EVERYBODY[number].peer_id
    course = Course(
        manifest, me, (replica,), Pace(), EventLog(), own_inner_steps=own, streams=False
    )
    course.take(own or H)
    made = Branch(number, course, step_s, began)
    made.say()  # before a step was timed
    return made


def trained(*branches: Branch, spread: float = 0.3, seed: int = 1) -> list[int]:
    """How many steps each has taken, in the end."""
    jitter = random.Random(seed)
    while running := [one for one in branches if not one.ready]:
        one = min(running, key=lambda one: one.now)
        one.train([other for other in branches if other is not one], jitter, spread)
    return [one.done for one in branches]


@pytest.mark.parametrize("spread", [0.1, 0.6])
@pytest.mark.parametrize("islands", [2, 3])
def test_islands_of_one_pace_take_all_steps_however_their_steps_vary(
    islands: int, spread: float
) -> None:
    """Or fall short by what they are behind when the first has come to its end."""
    for seed in range(2):
        branches = [branch(number) for number in range(islands)]
        done = trained(*branches, spread=spread, seed=seed)
        assert max(done) == H
        assert min(done) >= H - 2 * NEAR
        first = min(one.now for one in branches if one.done == H)
        for one in branches:
            assert one.done == H or one.now == pytest.approx(first, abs=NEAR * STEP_S)


def test_what_is_said_before_a_step_was_timed_is_no_end() -> None:
    """A minute, which is nearer than any end of a run of hours."""
    for said in (
        {"eta": UNTIMED_ETA_S, "steps_per_second": 0.0},
        {"eta": UNKNOWN_ETA_S, "steps_per_second": 10.0},  # its ranks are started again
        {"eta": 1.0, "steps_per_second": 10.0, "role": "server"},
        {"eta": 1.0, "steps_per_second": 10.0, "status": "leaving"},
    ):
        one = branch()
        other = announce_of(EVERYBODY[1].peer_id, ready=False, **said)
        for _ in range(20):
            done = StepDone(0, one.done + 1, 3.0, None, 0.1, 64, STEP_S)
            one.course.pace.add(done)
            one.course.heard(done)
            assert one.course.ends_with_others(swarm_of([(0.0, other)], 0.0)) is None


@pytest.mark.parametrize("late", [1, 2, 3])
def test_all_who_begin_late_end_with_the_one_that_was_there(late: int) -> None:
    """The more of them there are: each has all of the others' ends before its own."""
    first = branch()
    began = 0.4 * H * STEP_S
    others = [branch(n, began=began * (1 + 0.1 * n)) for n in range(1, late + 1)]
    done = trained(first, *others)
    assert done[0] == H
    for other in others:
        assert other.done < 0.6 * H
        assert other.now == pytest.approx(first.now, abs=NEAR * STEP_S)


def test_who_is_slower_ends_with_the_others() -> None:
    quick, slow = branch(0), branch(1, step_s=4 * STEP_S)
    assert trained(quick, slow)[0] == H
    assert slow.done == pytest.approx(H / 4, abs=NEAR)
    assert slow.now == pytest.approx(quick.now, abs=NEAR * STEP_S)


def test_an_end_moves_away_again_as_the_others_turn_out_slower() -> None:
    first, late = branch(0), branch(1, began=0.5 * H * STEP_S)
    jitter = random.Random(1)
    while late.now < 0.7 * H * STEP_S:
        one = min((first, late), key=lambda one: one.now)
        one.train([late if one is first else first], jitter, 0.0)
    assert late.course.target == pytest.approx(H / 2, abs=NEAR)
    first.step_s *= 2
    assert trained(first, late, spread=0.0)[0] == H
    assert late.done == pytest.approx(0.8 * H, abs=NEAR)


def test_who_takes_few_steps_by_its_operators_word_ends_nobody_elses_training() -> None:
    own = branch(1, own=H // 10)
    assert trained(branch(0), own, branch(2)) == [H, H // 10, H]


@pytest.mark.parametrize("slower", [2, 4])
def test_nor_where_it_is_the_quickest_of_all(slower: int) -> None:
    """It never takes all of the run's steps, so when it would have taken them is no end."""
    for seed in range(2):
        slow, own = branch(0, step_s=slower * STEP_S), branch(1, own=H // 10)
        assert trained(slow, own, seed=seed) == [H, H // 10]


def test_an_island_with_few_steps_of_its_own_can_begin_but_names_no_end() -> None:
    own, more = branch(own=H // 10), branch(own=2 * H)
    for one in (own, more):
        assert one.course.eta(0) == UNTIMED_ETA_S, "a run's creator counts it"
        done = StepDone(0, 1, 3.0, None, 0.1, 64, STEP_S)
        one.course.pace.add(done)
        one.course.heard(done)
    assert own.course.eta(0) == UNKNOWN_ETA_S
    assert more.course.eta(0) == pytest.approx((H - 1) * STEP_S)


def test_an_end_with_others_that_are_gone_is_none_any_more() -> None:
    """Unless somebody waits who has come to it."""
    slow, quick = branch(0, step_s=4 * STEP_S), branch(1)
    jitter = random.Random(1)
    while quick.now < 0.3 * H * STEP_S:
        one = min((slow, quick), key=lambda one: one.now)
        one.train([quick if one is slow else slow], jitter, 0.0)
    assert slow.course.target == pytest.approx(H / 4, abs=NEAR)
    assert trained(slow, spread=0.0) == [H]


def test_who_has_ended_with_one_that_is_gone_holds_no_end_and_keeps_its_own() -> None:
    one = branch()
    one.course.take(300)
    short = announce_of(EVERYBODY[1].peer_id, ready=True, steps=280)
    done = StepDone(0, 10, 3.0, None, 0.1, 64, STEP_S)
    for _ in range(10):
        one.course.pace.add(done)
        one.course.heard(done)
    assert one.course.ends_with_others(swarm_of([(0.0, short)], 1.0)) is None
    whole = announce_of(EVERYBODY[2].peer_id, ready=True, steps=H)
    assert one.course.ends_with_others(swarm_of([(0.0, short), (0.0, whole)], 1.0)) == 10


def test_among_strangers_one_word_ends_nobodys_training() -> None:
    strangers: Any = {"merge": {"trust": "open"}}
    liar = announce_of(EVERYBODY[3].peer_id, ready=True, steps=H)
    islands = [branch(n, **strangers) for n in range(3)]
    lie = branch(3, **strangers)
    lie.course.since, lie.said = H, [(-9.0, liar)]
    done = trained(*islands, lie)
    assert min(done) >= H - NEAR


@pytest.mark.parametrize("since", [508, 509, 510])
def test_the_first_step_of_a_life_which_compiles_ends_nothing(since: int) -> None:
    """By its pace, another's end would be three steps away."""
    one = branch()
    one.course.since = since
    other = announce_of(EVERYBODY[1].peer_id, ready=False, eta=70.0, steps_per_second=10.0)
    while not one.ready:
        seconds = 20.0 if one.done == since else STEP_S
        one.now += seconds
        done = StepDone(0, one.done + 1, 3.0, None, 0.1, 64, seconds)
        one.course.pace.add(done)
        one.course.heard(done)
        end = one.course.ends_with_others(swarm_of([(0.0, other)], one.now))
        if end is not None:
            one.course.take(end)
    assert one.done == H or one.now == pytest.approx(70.0, abs=NEAR * STEP_S)
    assert one.done > since + NEAR


def test_an_end_that_was_brought_forward_is_not_what_others_hear() -> None:
    one = branch()
    done = StepDone(0, 1, 3.0, None, 0.1, 64, STEP_S)
    for _ in range(50):
        one.course.pace.add(done)
        one.course.heard(done)
    one.course.take(60)
    assert one.course.eta(0) == pytest.approx((H - 50) * STEP_S)


def test_a_called_roll_shortens_nobodys_training_by_a_pace_of_the_moment() -> None:
    """Rounds that merge nothing have all choose their steps again."""
    one = branch()
    one.course.pace.steps_per_second = 8.0
    assert one.course.chooser.steps([announce_of(EVERYBODY[1].peer_id)]) == H
