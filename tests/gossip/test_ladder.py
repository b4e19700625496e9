"""The ladder of codecs: the finest that fits, and no flutter."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossip.plans.ladder import (
    FIRST_WAIT,
    LONGER,
    LONGEST_WAIT,
    OVERRUN,
    RECENT,
    ROOM,
    Ladder,
    budget_s,
    choose,
    hidden_share,
)
from protocols.codecs import codec
from protocols.errors import LocalProtocolError

RUNGS = ("fp32", "bf16", "int8", "int4", "int2", "top12", "top3")
SIZE = 125e6  # elements


def seconds(bandwidth: float, name: str) -> float:
    """Four islands: 2(N − 1)/N of the bytes through each link."""
    return 1.5 * SIZE * codec(name).bits / 8 / bandwidth


def chosen(bandwidth: float, budget: float, previous: str | None = None) -> str:
    return choose(RUNGS, lambda name: seconds(bandwidth, name), budget, Ladder(previous))


@dataclass
class Run:
    """Rounds of 200 s of which exchanges may take 10, over links that carry what they carry."""

    carries: float  # bytes a second
    announced: float  # what is believed
    spare: float = 0.0  # bytes that pass at once: a token bucket that is full in every round
    overhead_s: float = 0.0  # of each exchange
    past: Ladder = field(default_factory=lambda: Ladder("fp32"))
    taken: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def play(self, rounds: int) -> list[str]:
        """So many more rounds; returns their codecs."""
        for _ in range(rounds):
            known = self.past.seconds(0.0) is not None
            name = choose(
                RUNGS,
                lambda name: seconds(self.announced, name),
                10.0,
                self.past,
                (lambda name: self.past.seconds(self.bytes(name)) or 0.0) if known else None,
            )
            took = self.overhead_s + max(self.bytes(name) - self.spare, 0.0) / self.carries
            self.past.note(RUNGS, name, took, self.bytes(name), 10.0)
            self.taken.append(name)
            self.seconds.append(took)
        return self.taken[-rounds:]

    def bytes(self, name: str) -> float:
        return seconds(1.0, name)


@pytest.mark.parametrize(
    ("mbit", "expected"),
    [(10_000, "fp32"), (500, "bf16"), (200, "int8"), (100, "int4"), (50, "int2"), (20, "top12"),
     (5, "top3"), (0.1, "top3")],
)  # fmt: skip
def test_slower_links_get_coarser_codecs(mbit: float, expected: str) -> None:
    budget = budget_s(round_s=200.0, exposed=0.05, overlapped=0.0)
    assert chosen(mbit * 125_000, budget) == expected


def test_what_is_hidden_behind_inner_steps_costs_nothing() -> None:
    slow = 100 * 125_000
    assert budget_s(200.0, 0.05, 0.1) == pytest.approx(30.0)
    assert chosen(slow, budget_s(200.0, 0.05, 0.0)) == "int4"
    assert chosen(slow, budget_s(200.0, 0.05, 0.1)) == "bf16"


def test_inner_steps_hide_as_much_of_a_long_round_as_of_a_short_one() -> None:
    assert [hidden_share(round_s, 5.0, 0.5) for round_s in (5.0, 20.0, 200.0)] == [1.0, 0.5, 0.05]
    assert hidden_share(20.0, 5.0, 0.0) == hidden_share(0.0, 5.0, 0.5) == 0.0


@pytest.mark.parametrize(("took", "kept"), [(20.5, True), (20.7, False)])
def test_of_what_is_hidden_no_fifth_more_is_waited(took: float, kept: bool) -> None:
    """3 s of 20 may be waited, and 17 are hidden: in all it comes to 20.6 s."""
    past = Ladder()
    past.note(RUNGS, "int8", took, 1e6, 20.0, 17.0)
    takes = {"int8": took, "int4": 1.0}
    found = choose(RUNGS, lambda _: 99.0, 20.0, past, lambda name: takes.get(name, 99.0), 17.0)
    assert found == ("int8" if kept else "int4")
    before = Ladder("int4")
    before.note(RUNGS, "int8", took, 1e6, 20.0, 17.0)
    assert before.back_to == (None if kept else "int4")


def test_links_that_vary_by_a_tenth_do_not_change_the_codec() -> None:
    for start in (2e6, 5e6, 1e7, 3e7, 1e8):
        previous = chosen(start, 10.0)
        for turn in range(20):
            now = chosen(start * (1.1 if turn % 2 else 0.92), 10.0, previous)
            if turn:  # the first may still move up to where it belongs
                assert now == previous
            previous = now


def test_down_at_once_and_up_one_by_one() -> None:
    assert chosen(1e5, 10.0, "fp32") == "top3"
    taken, name = [], "top3"
    for _ in range(8):
        name = chosen(1e12, 10.0, name)
        taken.append(name)
    assert taken == [*reversed(RUNGS[:-1]), "fp32", "fp32"]


@given(
    st.lists(st.sampled_from(RUNGS), min_size=1, unique=True),
    st.floats(1e3, 1e13),
    st.floats(0, 1e6),
    st.sampled_from((*RUNGS, None)),
)
def test_the_choice_is_a_rung_that_fits_if_any_does(
    names: list[str], bandwidth: float, budget: float, previous: str | None
) -> None:
    rungs = sorted(names, key=lambda name: -codec(name).bits)
    found = choose(rungs, lambda name: seconds(bandwidth, name), budget, Ladder(previous))
    assert found in rungs
    if any(seconds(bandwidth, name) <= budget for name in rungs):
        assert seconds(bandwidth, found) <= OVERRUN * budget
    else:
        assert found == rungs[-1] or (
            found == previous and seconds(bandwidth, found) <= OVERRUN * budget
        )
    # and with the same links it comes to rest
    for _ in rungs:
        found = choose(rungs, lambda name: seconds(bandwidth, name), budget, Ladder(found))
    assert choose(rungs, lambda name: seconds(bandwidth, name), budget, Ladder(found)) == found
    at = rungs.index(found)
    assert not at or seconds(bandwidth, rungs[at - 1]) > ROOM * budget


def test_links_that_carry_more_than_is_known_of_them_are_noticed() -> None:
    run = Run(carries=1e5, announced=1e5)
    assert run.play(3) == ["top3"] * 3
    run.carries = 1e12  # and nothing that is sent is long enough to show it
    assert run.play(8) == ["top3", *reversed(RUNGS[:-1]), "fp32"]


def test_a_step_up_that_makes_the_exchange_too_long_is_taken_back_at_once() -> None:
    size = seconds(1.0, "int2")
    run = Run(carries=size / 100, announced=size / 100, spare=size)  # int2 passes, int4 does not
    run.past = Ladder("int2", _newest=(1e12, 1.0))
    taken = run.play(400)
    tried = [number for number, name in enumerate(taken) if name == "int4"]
    assert set(taken) == {"int4", "int2"}
    gaps = [later - sooner for sooner, later in pairwise(tried)]
    assert gaps[:4] == [FIRST_WAIT + 1, 17, 33, 65]
    assert all(gap <= LONGEST_WAIT + 1 for gap in gaps)
    run.carries = 1e12
    assert run.play(LONGEST_WAIT + 8)[-1] == "fp32"  # but it is not given up for good


def test_what_is_no_longer_with_finer_codecs_is_no_reason_to_step_down() -> None:
    """Where the time is that of busy machines, or of round trips, coarser codecs help nobody."""
    run = Run(carries=1e12, announced=1e12, overhead_s=15.0)
    run.past = Ladder("top3", _took=15.0)
    assert run.play(20)[-1] == "fp32"
    assert run.taken[:6] == [*reversed(RUNGS[:-1])]


def test_a_finer_codec_that_does_well_is_not_held_up_next_time() -> None:
    past = Ladder("int4")
    past.note(RUNGS, "int8", 100.0, 1.0, 10.0)
    assert past.back_to == "int4"
    past.note(RUNGS, "int4", 1.0, 1.0, 10.0)
    assert past.waits("int8")
    for _ in range(FIRST_WAIT):
        past.note(RUNGS, "int4", 1.0, 1.0, 10.0)
    assert not past.waits("int8")
    for _ in range(FIRST_WAIT + 1):
        past.note(RUNGS, "int8", 1.0, 1.0, 10.0)
    past.note(RUNGS, "int4", 1.0, 1.0, 10.0)  # the links have become slower since
    assert not past.waits("int8")
    past.note(RUNGS, "int8", None, 0.0, 10.0)  # something went wrong in it
    assert (past.back_to, past.seconds(1.0)) == (None, None)
    past.note(RUNGS, "int4", 1.0, 1.0, 10.0)  # and it did not last
    for _ in range(FIRST_WAIT):  # no longer than at first: it had done well
        assert past.waits("int8")
        past.note(RUNGS, "int4", 1.0, 1.0, 10.0)
    assert not past.waits("int8")


@pytest.mark.parametrize(
    ("took_before", "took", "taken_back"),
    [
        (1.0, 1.01 * OVERRUN * 10.0, True),
        (1.0, 0.99 * OVERRUN * 10.0, False),  # no longer than a codec may take that is in use
        (11.0, 1.01 * LONGER * 11.0, True),
        (11.0, 0.99 * LONGER * 11.0, False),  # it was as long before: finer or not is all one
    ],
)
def test_a_finer_codec_may_take_as_long_as_any_and_as_long_as_the_one_before(
    took_before: float, took: float, taken_back: bool
) -> None:
    past = Ladder()
    past.note(RUNGS, "int4", took_before, 1e6, 10.0)
    past.note(RUNGS, "int8", took, 2e6, 10.0)
    assert past.back_to == ("int4" if taken_back else None)
    assert past.waits("int8") == taken_back


def test_without_a_budget_no_codec_takes_too_long() -> None:
    """No round has been timed yet, so nothing is known of what one may wait."""
    past = Ladder("int4")
    past.note(RUNGS, "int8", 100.0, 1.0, 0.0)
    assert (past.back_to, past.waits("int8")) == (None, False)


def test_a_step_up_from_before_a_codec_of_another_kind_is_none_that_did_not_last() -> None:
    past = Ladder("int4")
    for name in ("int8", "other", "int8", "int4"):
        past.note(RUNGS, name, 1.0, 1.0, 10.0)
    assert not past.waits("int8")


def test_an_exchange_in_which_nothing_moved_says_nothing_of_others() -> None:
    past = Ladder()
    past.note(RUNGS, "int4", 1.0, 0.0, 10.0)  # nobody else was there
    assert past.seconds(1e6) is None


def test_time_that_bytes_do_not_cost_does_not_count_against_a_finer_codec() -> None:
    """A line through the last exchanges of two codecs tells it from the time of a byte."""
    each = 2.0 / seconds(1.0, "int2")
    past = Ladder()

    def exchanged(name: str) -> None:
        past.note(RUNGS, name, 3.0 + each * seconds(1.0, name), seconds(1.0, name), 10.0)

    def expected(name: str) -> float:
        found = past.seconds(seconds(1.0, name))
        assert found is not None
        return found

    exchanged("int2")
    assert expected("int4") == pytest.approx(5.0 * codec("int4").bits / codec("int2").bits)
    exchanged("top12")
    for name in RUNGS:
        assert expected(name) == pytest.approx(3.0 + each * seconds(1.0, name))
    for _ in range(RECENT - 1):
        exchanged("top12")
    assert expected("top3") == pytest.approx(3.0 + each * seconds(1.0, "top3"))
    assert not past.settled
    exchanged("top12")  # that was long ago
    assert past.settled
    assert expected("top3") == pytest.approx(
        (3.0 + each * seconds(1.0, "top12")) * codec("top3").bits / codec("top12").bits
    )


@pytest.mark.parametrize("overhead_s", [1.0, 4.0, 6.9])
def test_links_that_are_wide_again_are_noticed_beside_machines_that_take_their_time(
    overhead_s: float,
) -> None:
    """In proportion to bytes a finer codec would take too long; in truth it takes no longer."""
    run = Run(carries=1e12, announced=seconds(1.0, "int2") / 8.0, overhead_s=overhead_s)
    run.past = Ladder("int2", _newest=(seconds(1.0, "int2"), 8.0))
    run.play(RECENT + 2)
    assert run.taken[-1] == ("fp32" if overhead_s == 1.0 else "int4")
    run.play(5 * (RECENT + 2))
    assert run.taken[-1] == "fp32"


def test_a_finer_codec_that_does_not_fit_is_tried_ever_less_often() -> None:
    run = Run(carries=seconds(1.0, "int2") / 6.9, announced=1.0)
    run.past = Ladder("int2", _newest=(seconds(1.0, "int2"), 6.9))
    taken = run.play(1000)
    assert set(taken) == {"int2", "int4"}
    tried = [number for number, name in enumerate(taken) if name == "int4"]
    gaps = [later - sooner for sooner, later in pairwise(tried)]
    assert gaps[-1] == LONGEST_WAIT + 1
    assert len(tried) <= 5 + 1000 / LONGEST_WAIT


def test_what_would_take_far_too_long_is_not_tried() -> None:
    rungs, past = ("fp32", "top3"), Ladder("top3")
    for _ in range(5 * RECENT):
        past.note(rungs, "top3", 6.0, seconds(1.0, "top3"), 10.0)
        assert choose(
            rungs,
            lambda name: seconds(1.0, name),
            10.0,
            past,
            lambda name: past.seconds(seconds(1.0, name)) or 0.0,
        ) == "top3"  # fmt: skip
    assert past.settled


@pytest.mark.parametrize(
    ("share", "larger", "tried"),
    [
        (0.6, 0.99 * 3.0 / 0.6, True),
        (0.6, 1.01 * 3.0 / 0.6, False),
        (0.99 * ROOM, 2.0, True),
        (1.01 * ROOM, 2.0, False),  # there is no room for more, whatever its time is made of
    ],
)
def test_what_might_be_far_too_long_is_tried_where_there_is_room_now(
    share: float, larger: float, tried: bool
) -> None:
    """``share`` of the budget is taken, and the finer codec sends so many times as much."""
    sizes, past = {"finer": larger, "coarse": 1.0}, Ladder("coarse")
    for _ in range(RECENT + 1):
        past.note(tuple(sizes), "coarse", share * 10.0, 1.0, 10.0)
    found = choose(
        tuple(sizes), lambda _: 1e9, 10.0, past, lambda name: past.seconds(sizes[name]) or 0.0
    )
    assert found == ("finer" if tried else "coarse")


def test_where_the_codec_before_was_of_another_kind_the_links_decide() -> None:
    past = Ladder()
    past.note(("other",), "other", 1.0, seconds(1.0, "fp32"), 10.0)
    assert (
        choose(
            RUNGS,
            lambda name: seconds(100 * 125_000, name),
            10.0,
            past,
            lambda name: past.seconds(seconds(1.0, name)) or 0.0,
        )
        == "int4"
    )
    assert past.explained(RUNGS, "int4", 10.0).why == "what the links carry as they were measured"


def test_two_exchanges_that_make_no_sense_together_are_not_joined() -> None:
    """The links have become slower between them: a coarser codec took longer."""
    past = Ladder()
    past.note(RUNGS, "int4", 1.0, 2e6, 10.0)
    past.note(RUNGS, "int2", 4.0, 1e6, 10.0)
    assert past.seconds(2e6) == pytest.approx(8.0)


@given(
    st.floats(1e3, 1e10), st.floats(1e3, 1e10), st.floats(0, 1e9), st.floats(0, 5.0),
    st.integers(20, 400),
)  # fmt: skip
def test_however_wrong_the_speeds_are_few_rounds_take_long_and_no_rung_is_lost(
    carries: float, announced: float, spare: float, overhead_s: float, rounds: int
) -> None:
    run = Run(carries, announced, spare, overhead_s)
    run.past = Ladder("top3")
    run.play(rounds)
    coarsest = overhead_s + max(run.bytes("top3") - spare, 0.0) / carries
    long = [took > max(1.01 * OVERRUN * 10.0, 1.3 * coarsest) for took in run.seconds]
    tries = len(RUNGS) * (5 + rounds / LONGEST_WAIT)  # 8, 16, 32, 64 rounds apart, and so on
    honest = announced <= 1.2 * carries  # else it is for those who announce to measure
    assert not honest or sum(long) <= tries
    run.carries = run.announced = 1e12
    run.overhead_s = 0.0
    run.play(LONGEST_WAIT + len(RUNGS) * (FIRST_WAIT + 1))
    assert run.taken[-1] == "fp32"


def test_a_codec_is_explained_by_what_was_seen_before_it() -> None:
    past = Ladder()

    def why(codec: str, budget: float = 10.0) -> str:
        return past.explained(RUNGS, codec, budget, 3.0).why

    assert why("fp32", 0.0) == "no round has been timed yet"
    assert why("int4") == "what the links carry as they were measured"
    past.note(RUNGS, "int8", 2.0, 1e6, 10.0)
    found = past.explained(RUNGS, "bf16", 10.0, 3.0)
    assert found.inputs == {"budget_s": 10.0, "expected_s": 3.0, "last_s": 2.0}
    assert (found.codec, found.why) == ("bf16", "there is room for a finer one")
    assert why("int8").startswith("its bytes pass in time")
    past.note(RUNGS, "bf16", 40.0, 2e6, 10.0)
    assert why("int8") == "the finer one made the exchange too long"
    assert why("int4") == "the one before takes longer than may be waited"


def test_a_ladder_needs_rungs_and_a_budget() -> None:
    with pytest.raises(LocalProtocolError):
        choose((), lambda _: 1.0, 1.0, Ladder())
    with pytest.raises(LocalProtocolError):
        choose(RUNGS, lambda _: 1.0, float("nan"), Ladder())
