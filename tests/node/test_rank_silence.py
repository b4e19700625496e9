"""When a trainer is taken to hang, and all that it is not taken to hang for."""

from __future__ import annotations

import pytest
from trainer_kit import apply, begin

from node.island.silence import EVALUATION, SILENT_S, TIMES, Silence
from node.trainer.channel import (
    Applied,
    Awaited,
    Command,
    InnerSteps,
    Report,
    Save,
    Saved,
    Shift,
    Shifted,
    Snapshot,
    Staged,
    StepDone,
)

LOOK_S = 5.0
STEP = StepDone(0, 1, 2.0, 1.0, 0.1, 8, 0.5)
SNAPSHOT = Snapshot(0, 3, 24, True)
BEGUN = Applied(0, 0, 0, None, None)


def life(*said: Command | Report) -> Silence:
    """What a trainer was told, or has told, without any time in between."""
    silence = Silence()
    for one in said:
        (silence.came if isinstance(one, Report) else silence.sent)(one)
    return silence


def training(*said: Command | Report) -> Silence:
    """The same, of one that has begun and taken a step."""
    return life(begin(), BEGUN, STEP, *said)


def hangs_after(silence: Silence, most: float = 20 * SILENT_S) -> float | None:
    """Seconds of silence after which it is taken to hang; None: not within ``most``."""
    waited = 0.0
    while waited < most:
        waited += LOOK_S
        if silence.waited(LOOK_S):
            return waited
    return None


@pytest.mark.parametrize(
    "said",
    [
        (),
        (SNAPSHOT, apply(1)),  # it was hanging when the round was over
        (SNAPSHOT, apply(1), Applied(1, 3, 24, None)),
        (Save("a"),),
        (SNAPSHOT, Save("a")),  # also while it waits for a round
        (Save("a"), Staged("a")),
        (Shift(), Shifted()),
        (InnerSteps(0), InnerSteps(4)),
        (Awaited(2, 11.0, (0,)), Awaited(2, 30.0)),
        (Awaited(2, 11.0, (0,)), STEP),
    ],
)
def test_who_has_something_to_do_and_says_nothing_hangs(said: tuple[Command | Report, ...]) -> None:
    assert hangs_after(training(*said)) == SILENT_S + LOOK_S


@pytest.mark.parametrize(
    "silence",
    [
        life(),  # it builds the model
        life(begin()),  # reads a checkpoint
        life(begin(), BEGUN),  # compiles
        life(begin(), BEGUN, Save("a")),
        training(SNAPSHOT),  # waits for a round, which may take for ever
        training(InnerSteps(0)),  # rests
        training(SNAPSHOT, apply(1, target_steps=0), Applied(1, 3, 24, None)),
        training(Awaited(2, 11.0, (0,))),  # says itself after an hour that no data come
        training(Awaited(2, 11.0, (0,)), SNAPSHOT, apply(1)),
        training(SNAPSHOT, Save("a"), Staged("a")),  # writes, and waits
        training(SNAPSHOT, Save("a"), Staged("a"), Saved("a", "", False)),
    ],
)
def test_who_waits_rests_or_has_yet_to_begin_does_not(silence: Silence) -> None:
    assert hangs_after(silence) is None


def test_an_evaluation_may_take_long_until_one_was_timed() -> None:
    evaluation, done = apply(1, evaluate=True), Applied(1, 3, 24, 2.0)
    assert hangs_after(training(evaluation)) == EVALUATION * SILENT_S + LOOK_S
    assert hangs_after(training(evaluation, done, STEP, evaluation)) == SILENT_S + LOOK_S
    slow = training(evaluation)
    assert hangs_after(slow, 5 * SILENT_S) is None
    slow.came(done)
    assert hangs_after(slow, TIMES * 5 * SILENT_S) is None


def test_who_was_slow_may_be_so_again() -> None:
    """As a first step that compiles, or steps of an hour each on a large model's processor."""
    slow = life(begin(), BEGUN)
    assert hangs_after(slow, SILENT_S) is None
    slow.came(STEP)
    assert hangs_after(slow, TIMES * SILENT_S) is None
    assert hangs_after(slow) == LOOK_S


def test_ranks_that_go_on_are_never_taken_to_hang() -> None:
    silence = training()
    for _ in range(100):
        assert hangs_after(silence, SILENT_S) is None
        silence.came(STEP)


def test_what_it_is_told_is_no_sign_of_life() -> None:
    """A daemon that asks for a checkpoint again and again learns nothing by that."""
    silence, waited = training(), 0.0
    while not silence.waited(LOOK_S):
        waited += LOOK_S
        silence.sent(Save("a"))
        assert waited < 2 * SILENT_S
    assert waited == SILENT_S
