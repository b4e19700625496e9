"""Who is to blame for all failures of a round: the fewest that explain them."""

from __future__ import annotations

from itertools import permutations

import pytest

from gossip.rounds.blame import Failures
from protocols.identity import PeerId

A, B, C, D, E = (PeerId(name) for name in "ABCDE")
WAIT = 0.25


def known_to(me: PeerId, *failures: tuple[PeerId, PeerId]) -> Failures:
    """All at second 0."""
    known = Failures(me)
    for teller, peer in failures:
        known.note(teller, peer, 0.0)
    return known


def certain(failures: Failures, now: float) -> set[PeerId]:
    found = failures.explained()
    times = {peer: failures.certain_at(peer, of, WAIT) for peer, of in found.items()}
    return {peer for peer, at in times.items() if at is not None and now >= at}


@pytest.mark.parametrize("me", [A, B, C])
def test_of_two_it_is_the_one_that_is_named(me: PeerId) -> None:
    assert known_to(me, (A, B)).explained().keys() == {B}


@pytest.mark.parametrize(("me", "other"), [(A, B), (B, A)])
def test_where_two_name_each_other_each_knows_the_other_first(me: PeerId, other: PeerId) -> None:
    assert known_to(me, (A, B), (B, A)).explained().keys() == {other}


def test_of_two_it_is_rather_the_one_whose_slices_were_waited_for_in_vain() -> None:
    failures = known_to(C, (A, B))
    failures.hint(A)
    assert failures.explained().keys() == {A}
    assert certain(failures, WAIT) == {A}
    failures.note(D, B, 0.0)  # what fails weighs more than what is late
    assert failures.explained().keys() == {B}


def test_who_waited_in_vain_for_several_takes_it_on_itself() -> None:
    failures = known_to(A, (A, B))
    failures.hint(B)
    assert failures.explained().keys() == {B}
    failures.hint(C)
    assert failures.explained().keys() == {A}
    failures.clear()
    failures.note(A, B, 1.0)
    assert failures.explained().keys() == {B}


def test_who_names_two_alone_is_to_blame_itself() -> None:
    for me in (A, B, C, D):
        assert known_to(me, (A, B), (A, C)).explained().keys() == {A}


def test_two_who_fail_several_are_to_blame_and_not_those_who_say_so() -> None:
    failures = [(teller, named) for teller in (A, B, C) for named in (D, E)]
    assert known_to(A, *failures).explained().keys() == {D, E}
    assert known_to(A, *failures[:4]).explained().keys() == {D, E}  # two each: the named ones


def test_that_the_silent_fail_others_says_nothing_of_these() -> None:
    failures = known_to(A, (A, B), (A, C), (A, D))
    assert failures.explained({B, C}).keys() == {D}
    assert failures.explained({B}).keys() == {A}


def test_when_all_fail_all_it_is_nearly_all() -> None:
    assert len(known_to(A, *permutations((A, B, C, D), 2)).explained()) == 3


def test_it_is_certain_when_others_could_have_said_so_too() -> None:
    failures = known_to(A, (A, B))
    assert certain(failures, 0.2) == set()
    assert certain(failures, 0.25) == {B}
    failures.note(A, C, 1.0)  # and now it is me
    assert certain(failures, 1.2) == set()
    assert certain(failures, 1.25) == {A}
    failures.note(D, C, 1.3)
    failures.note(D, B, 1.3)  # others see it as well: it was not me
    assert certain(failures, 1.3) == {B, C}


def test_what_happened_under_an_earlier_plan_is_known_and_counts_no_more() -> None:
    failures = known_to(A, (B, C))
    failures.replanned()
    assert not failures
    assert certain(failures, 9.0) == set()
    failures.note(B, D, 9.0)  # it goes through them one by one
    assert failures
    assert certain(failures, 9.25) == {B}
    failures.clear()
    assert failures.explained() == {}
    assert failures.mine() == {}
