"""When a trainer is taken to hang, and all that it is not taken to hang for."""

from __future__ import annotations

import math

import pytest
from trainer_kit import apply, begin

from node.island.silence import COMPILED, SILENT_S, TIMES, TOLD, UNTIMED, Silence
from node.trainer.channel import (
    Applied,
    Awaited,
    Command,
    InnerSteps,
    Ready,
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
READY = Ready(8, b"digest")


def life(*said: Command | Report, wait_s: float = math.inf, compiles: bool = False) -> Silence:
    """What a trainer was told, or has told, without any time in between."""
    silence = Silence(wait_s, compiles)
    for one in said:
        (silence.came if isinstance(one, Report) else silence.sent)(one)
    return silence


def training(*said: Command | Report, wait_s: float = math.inf) -> Silence:
    """The same, of one that has begun and taken a step."""
    return life(begin(), BEGUN, STEP, *said, wait_s=wait_s)


def hangs_after(silence: Silence, most: float = 20 * SILENT_S) -> float | None:
    """Seconds of silence after which it is taken to hang; None: not within ``most``."""
    waited = 0.0
    while waited < most:
        waited += LOOK_S
        if silence.waited(LOOK_S):
            return waited
    return None


def words(silence: Silence, seconds: float) -> list[tuple[float, str]]:
    """What people are told in so many seconds of silence, and after how many."""
    told, waited = [], 0.0
    while waited < seconds:
        waited += LOOK_S
        silence.waited(LOOK_S)
        if (word := silence.word()) is not None:
            told.append((waited, word.text))
    return told


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
        life(READY),  # others have yet to let it in
        training(SNAPSHOT),  # waits for a round, as long as that takes
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


@pytest.mark.parametrize(
    ("said", "does"),
    [
        ((), "builds its model"),
        ((READY, begin()), "takes in what it begins with"),
        ((READY, begin(), BEGUN), "takes its first inner step"),
        ((READY, begin(), BEGUN, Save("a")), "copies what a checkpoint is to have"),
    ],
)
@pytest.mark.parametrize("compiles", [False, True])
def test_up_to_its_first_step_it_has_hours_and_people_are_told_long_before(
    said: tuple[Command | Report, ...], does: str, compiles: bool
) -> None:
    """Nobody has timed it, and it may compile; but a device may hang in it as well."""
    most = UNTIMED * SILENT_S * (COMPILED if compiles else 1)
    assert hangs_after(life(*said, compiles=compiles), 2 * most) == most + LOOK_S
    told, hours = TOLD * SILENT_S + LOOK_S, "1d00h" if compiles else "6h00m"
    text = (
        f"the trainer has said nothing for 10m: it {does}{', and may compile' * compiles}; after "
        f"{hours} it is taken to hang, and started again (E406)"
    )
    assert words(life(*said, compiles=compiles), most) == [(told, text)]


def test_of_each_long_silence_people_are_told_once() -> None:
    silence = training()
    step = "the trainer has said nothing for 10m: it takes an inner step; after 1h00m it is taken"
    ((after, text),) = words(silence, SILENT_S)
    assert after == TOLD * SILENT_S + LOOK_S
    assert text.startswith(step)
    silence.came(STEP)
    assert words(silence, SILENT_S) == [], "it took an hour before"
    assert words(training(SNAPSHOT), 20 * SILENT_S) == []


def test_who_goes_on_without_a_round_that_does_not_come_hangs_if_it_does_not() -> None:
    waits = training(SNAPSHOT, wait_s=60.0)
    assert hangs_after(waits) == 60.0 + SILENT_S + LOOK_S
    waits.came(STEP)  # it has gone on
    assert hangs_after(waits, SILENT_S) is None
    assert hangs_after(training(SNAPSHOT, InnerSteps(0), wait_s=60.0)) is None, "it rests"


def test_an_evaluation_may_take_long_until_one_was_timed() -> None:
    evaluation, done = apply(1, evaluate=True), Applied(1, 3, 24, 2.0)
    assert hangs_after(training(evaluation)) == UNTIMED * SILENT_S + LOOK_S
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
