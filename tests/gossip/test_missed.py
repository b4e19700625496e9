"""For how many rounds nothing of a member was merged, by the runs that outcomes tell it in."""

from __future__ import annotations

import dataclasses

from gossip_kit import EVERYBODY, decided, roster_of

from gossip.chain.missed import LONGEST, Missed
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


def test_who_was_left_out_owns_nothing_for_ever_longer_until_it_delivers() -> None:
    outcome = decided(EVERYBODY).outcome
    faulty = outcome.contributors[0].peer
    out = (dataclasses.replace(outcome.contributors[0], active=False), *outcome.contributors[1:])
    size = outcome.parts[0].stop - outcome.parts[0].start
    silent = dataclasses.replace(outcome.parts[0], counts=pack_counts([0, *[size] * 4]))
    missed, round_ = Missed(), 0

    def note(*, left_out: bool = False, delivers: bool = False) -> bool:
        nonlocal round_
        contributors = out if left_out else outcome.contributors
        part = outcome.parts[0] if delivers else silent
        missed.note(
            dataclasses.replace(outcome, round=round_, contributors=contributors, parts=(part,))
        )
        round_ += 1
        return faulty in missed.unreliable(round_)

    assert not note()
    for often in (1, 2, 3):
        assert note(left_out=True)
        assert [note() for _ in range(2**often)] == [True] * (2**often - 1) + [False]
    for _ in range(20):
        assert note(left_out=True)
    assert [note() for _ in range(LONGEST)] == [True] * (LONGEST - 1) + [False]
    assert note(left_out=True)
    assert not note(delivers=True)
    assert note(left_out=True)
    assert [note(), note()] == [True, False], "it counts from the beginning"


def test_who_was_to_merge_a_part_and_did_not_was_left_out() -> None:
    outcome = decided(EVERYBODY).outcome
    faulty = outcome.contributors[0].peer
    part = dataclasses.replace(outcome.parts[0], owner=outcome.contributors[1].peer)
    missed = Missed()
    missed.note(dataclasses.replace(outcome, parts=(part,)), {faulty, part.owner})
    assert missed.unreliable(outcome.round + 1) == {faulty}


def test_a_relay_that_passes_nothing_on_is_not_relied_on_for_ever_longer() -> None:
    outcome = decided(EVERYBODY).outcome
    relay = outcome.contributors[0].peer
    missed, round_ = Missed(), 0

    def note(*, mute: bool = False) -> bool:
        nonlocal round_
        if mute:  # of several parts
            missed.note_mute(relay, round_)
            missed.note_mute(relay, round_)
        missed.note(dataclasses.replace(outcome, round=round_))
        round_ += 1
        return relay in missed.mute(round_)

    for often in (1, 2, 3):
        assert note(mute=True)
        assert [note() for _ in range(2**often)] == [True] * (2**often - 1) + [False]
    for _ in range(8):
        assert not note()
    assert note(mute=True), "it has served for as long as it had not been relied on"
    assert [note(), note()] == [True, False], "it counts from the beginning"
    assert note(mute=True)
    missed.note(dataclasses.replace(outcome, round=round_, next_roster=outcome.next_roster[1:]))
    assert (relay in missed.mute(round_ + 1)) == (relay != outcome.next_roster[0])


def test_what_others_say_of_a_relay_counts_for_a_leader_alone() -> None:
    outcome = decided(EVERYBODY).outcome
    relay, other, round_ = *(c.peer for c in outcome.contributors[:2]), outcome.round
    missed = Missed()
    missed.note_idle(relay, round_)
    missed.note_mute(other, round_)
    missed.note(outcome)
    assert missed.mute(round_ + 2) == {other}
    assert missed.idle(round_ + 2) == {relay, other}
    assert not missed.idle(round_ + 3)


def test_who_brings_nothing_is_doubted_but_gets_its_chances() -> None:
    outcome = decided(EVERYBODY).outcome
    faulty = outcome.contributors[0].peer
    size = outcome.parts[0].stop - outcome.parts[0].start
    silent = (dataclasses.replace(outcome.parts[0], counts=pack_counts([0, *[size] * 4])),)
    missed = Missed()
    doubted = []
    for often in range(1, 2 * LONGEST + 1):
        missed.note(dataclasses.replace(outcome, round=often, parts=silent))
        assert missed.doubtful() <= {faulty}
        if not missed.doubtful():
            doubted.append(often)
    assert doubted == [1, 2, 4, 8, 16, 32, 64, 128]
    missed.note(dataclasses.replace(outcome, round=200, parts=silent))
    assert missed.doubtful() == {faulty}
    others = outcome.contributors[1:]
    away = (dataclasses.replace(silent[0], counts=pack_counts([size] * 4)),)
    missed.note(dataclasses.replace(outcome, round=201, contributors=others, parts=away))
    assert missed.doubtful() == {faulty}  # it was not asked for anything
    missed.note(dataclasses.replace(outcome, round=202))
    assert missed.doubtful() == frozenset()
