"""Which codec a letter has, by what letters have taken."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from gossip_kit import EVERYBODY, announce_of

from gossip.pairs.letter_times import LetterTerms, LetterTimes
from gossip.plans.ladder import Budget
from protocols.messages import Announce

BYTES = {"fp32": 4000, "bf16": 2000, "int8": 1000}
NONE, SECOND = Budget(0.0, 0.0), Budget(1.0, 0.0)
ME, A, B = (EVERYBODY[number].peer_id for number in range(3))


def times(**terms: Any) -> LetterTimes:
    return LetterTimes(LetterTerms(tuple(BYTES), **terms), BYTES.__getitem__)


def said(peer: str = ME, upload: float = 0.0, download: float = 0.0) -> Announce:
    return announce_of(peer, upload=upload, download=download, steps_per_second=10.0)


def test_the_budget_is_what_may_be_exposed_and_what_inner_steps_hide() -> None:
    assert times().budget(10.0, said(), 1).whole_s == pytest.approx(0.5)
    assert times(overlap_steps=5).budget(10.0, said(), 1).whole_s == pytest.approx(1.0)
    assert times(overlap_steps=5).budget(10.0, said(), 2).whole_s == pytest.approx(0.5)
    assert times(fragments=5).budget(10.0, said(), 1).whole_s == pytest.approx(0.1)
    assert times(overlap_steps=500).budget(10.0, said(), 1).whole_s == pytest.approx(10.5)
    still = dataclasses.replace(said(), steps_per_second=0.0)
    assert times(overlap_steps=5).budget(10.0, still, 1).whole_s == pytest.approx(0.5)
    assert times().budget(0.0, said(), 1) == (0.0, 0.0)


def test_before_a_round_was_timed_letters_are_as_fine_as_they_may_be() -> None:
    assert times().choose(NONE, said(upload=1.0), [said(A)]).codec == "fp32"


def test_the_first_one_goes_by_the_link_as_it_was_measured() -> None:
    assert times().choose(SECOND, said(upload=2500.0), [said(A)]).codec == "bf16"
    assert times().choose(SECOND, said(upload=2500.0), [said(A), said(B)]).codec == "int8"


def test_letters_get_coarser_and_finer_by_what_they_took() -> None:
    one, to = times(), [said(A)]
    one.note(one.choose(SECOND, said(), to), 4.0, [A], SECOND)
    assert one.choose(SECOND, said(), to).codec == "int8"
    one.note(one.choose(SECOND, said(), to), 0.1, [A], SECOND)
    chosen = one.choose(SECOND, said(), to)
    assert chosen.codec == "bf16", "one rung at a time"
    one.note(chosen, 0.2, [A], SECOND)
    assert one.choose(SECOND, said(), to).codec == "fp32"


def test_a_slow_peer_among_others_changes_nothing_and_two_in_a_row_do() -> None:
    one, to = times(), [said(A)]
    for took, peer, wanted in ((0.1, A, "fp32"), (4.0, B, "fp32"), (0.1, A, "fp32")):
        one.note(one.choose(SECOND, said(), to), took, [peer], SECOND)
        assert one.choose(SECOND, said(), to).codec == wanted
    one.note(one.choose(SECOND, said(), to), 4.0, [B], SECOND)
    one.note(one.choose(SECOND, said(), to), 4.0, [A], SECOND)
    assert one.choose(SECOND, said(), to).codec == "int8"


def test_a_slow_peer_changes_nothing_however_often_it_comes_while_there_are_others() -> None:
    one, to = times(), [said(A)]
    one.note(one.choose(SECOND, said(), to), 0.1, [A], SECOND)
    for _ in range(3):
        one.note(one.choose(SECOND, said(), to), 60.0, [B], SECOND)
        assert one.choose(SECOND, said(), to).codec == "fp32"
    one.note(one.choose(SECOND, said(), to), 60.0, [B], SECOND, nobody_else=True)
    assert one.choose(SECOND, said(), to).codec == "int8"


def test_a_partner_with_a_narrow_link_gets_a_coarse_letter_that_says_nothing_of_others() -> None:
    one = times()
    one.note(one.choose(SECOND, said(), [said(A)]), 0.1, [A], SECOND)
    narrow = one.choose(SECOND, said(), [said(B, download=1000.0)])
    assert narrow == ("int8", False)
    assert one.chosen is not None
    assert (one.chosen.codec, one.chosen.why) == ("int8", "the receiver's link is narrow")
    one.note(narrow, 9.0, [B], SECOND)
    one.note(narrow, 9.0, [B], SECOND)
    assert one.choose(SECOND, said(), [said(A, download=1e6)]) == ("fp32", True)


def test_a_choice_is_told_with_what_it_follows_from() -> None:
    one, to = times(), [said(A)]
    one.note(one.choose(SECOND, said(), to), 4.0, [A], SECOND)
    one.choose(SECOND, said(), to)
    assert one.chosen is not None
    assert one.chosen.inputs == {"budget_s": 1.0, "last_s": 4.0}
    assert one.chosen.why == "the one before takes longer than may be waited"


def test_one_codec_is_no_choice() -> None:
    one = LetterTimes(LetterTerms(("int8",)), BYTES.__getitem__)
    assert one.chosen is None
    one.note(one.choose(SECOND, said(), [said(A)]), 100.0, [A], SECOND)
    assert one.choose(SECOND, said(), [said(A, download=1.0)]) == ("int8", True)


@pytest.mark.parametrize(("took", "kept"), [(20.5, True), (20.7, False)])
def test_of_what_is_hidden_no_fifth_more_is_waited(took: float, kept: bool) -> None:
    """3 s of 20 may be waited, and 17 are hidden: in all it comes to 20.6 s."""
    one, to = times(exposed=0.15, overlap_steps=170), [said(A)]
    budget = one.budget(20.0, said(), 1)
    assert budget == pytest.approx((20.0, 17.0))
    one.note(one.choose(budget, said(), to), took, [A], budget)
    assert (one.choose(budget, said(), to).codec == "fp32") == kept


@pytest.mark.parametrize(("download", "wide"), [(195.2, True), (193.0, False)])
def test_nor_by_a_receiver_whose_link_is_narrow(download: float, wide: bool) -> None:
    one = times(exposed=0.15, overlap_steps=170)
    found = one.choose(one.budget(20.0, said(), 1), said(), [said(A, download=download)])
    assert found == (("fp32", True) if wide else ("bf16", False))
