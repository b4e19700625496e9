"""For how many rounds nothing of a member was merged, by the runs that outcomes tell it in."""

from __future__ import annotations

import dataclasses

from gossip_kit import EVERYBODY, decided, roster_of

from gossip.missed import Missed
from protocols.counts import pack_counts


def test_who_is_in_some_part_has_missed_nothing_and_who_is_in_none_has() -> None:
    outcome = decided(EVERYBODY).outcome
    roster = roster_of(EVERYBODY)
    missed = Missed()
    missed.note(outcome)
    assert missed.rounds(outcome.round + 1) == dict.fromkeys(roster, 0)
    first, *others = outcome.parts
    size = first.stop - first.start
    parts = (
        dataclasses.replace(first, counts=pack_counts([size, size, 0, 0, 1])),
        *(dataclasses.replace(part, counts=pack_counts([size, 0, 0, 0, size])) for part in others),
    )
    missed.note(dataclasses.replace(outcome, round=outcome.round + 1, parts=parts))
    rounds = missed.rounds(outcome.round + 2)
    assert [rounds[peer] for peer in roster] == [0, 0, 1, 1, 0]


def test_who_left_is_forgotten_and_who_comes_has_missed_nothing() -> None:
    outcome = decided(EVERYBODY).outcome
    missed = Missed()
    stayed = outcome.next_roster[:3]
    missed.note(dataclasses.replace(outcome, next_roster=stayed, parts=()))
    assert missed.rounds(outcome.round + 1) == dict.fromkeys(stayed, 0)
    missed.note(dataclasses.replace(outcome, round=outcome.round + 1, parts=()))
    rounds = missed.rounds(outcome.round + 2)
    assert [rounds[peer] for peer in outcome.next_roster] == [1, 1, 1, 0, 0]
