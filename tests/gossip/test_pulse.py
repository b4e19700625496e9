"""Heartbeats of a few bytes: only their origin can make them."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from gossip.membership.drift import ETA, ETA_S, SPEED, outdated
from gossip.membership.pulse import LENGTH, Beat, HashChain, beats_in, leads, packed, tags_in
from protocols.identity import PeerId
from protocols.messages import BEAT_BYTES, PULSE_BYTES, TAG_BYTES, Announce, Standing

ME, OTHER = PeerId("peer-a"), PeerId("peer-b")


def test_each_beat_leads_to_all_before_it_and_to_none_after() -> None:
    chain = HashChain(ME, b"secret")
    values = [chain.pulse, *(chain.next() for _ in range(LENGTH))]
    assert chain.spent
    assert len(set(values)) == LENGTH + 1
    assert {len(value) for value in values} == {PULSE_BYTES}
    for to in (0, 1, 30, LENGTH - 1):
        for number in (0, 1, 2, 31, LENGTH):
            assert leads(ME, number, values[number], to, values[to]) == (number > to)


def test_nobody_else_can_make_a_beat() -> None:
    chain, dice = HashChain(ME, b"secret"), random.Random(3)
    pulse, first, second = chain.pulse, chain.next(), chain.next()
    assert leads(ME, 2, second, 0, pulse)
    assert not leads(OTHER, 2, second, 0, pulse)  # in another one's name
    assert not leads(ME, 3, second, 0, pulse)  # for a later one
    assert not leads(ME, 2, first, 0, pulse)
    assert not leads(ME, LENGTH + 1, second, 0, pulse)
    assert not any(leads(ME, 1, dice.randbytes(PULSE_BYTES), 0, pulse) for _ in range(1000))
    assert HashChain(ME, b"another").pulse != pulse


def test_beats_stand_one_behind_the_other() -> None:
    dice = random.Random(5)
    beats = [
        Beat(dice.randbytes(TAG_BYTES), n, dice.randbytes(PULSE_BYTES)) for n in (0, 1, LENGTH)
    ]
    data = b"".join(beat.packed() for beat in beats)
    assert len(data) == 3 * BEAT_BYTES
    assert list(beats_in(data)) == beats
    assert list(beats_in(data + b"x" * (BEAT_BYTES - 1))) == beats
    # what has no chain of its own moves none of those behind it
    none = Beat(bytes(TAG_BYTES), 0, b"")
    assert list(beats_in(none.packed() + data))[1:] == beats


def test_tags_stand_one_behind_the_other() -> None:
    tags = {bytes([n]) * TAG_BYTES for n in range(5)}
    assert tags_in(packed(tags)) == tags


SAID = Announce(
    ME, "island", "active", 1, (), "0", "", 3, b"h", b"s", 9,
    eta=60.0, tokens_per_second=1000.0, steps_per_second=2.0, upload=1e6, loss=3.0, position=10,
    others=(Standing(True, 3, b"h", b"s", 9, eta=30.0),),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "passed", "expected"),
    [
        ({}, 0.0, False),
        ({"loss": 2.0, "position": 99, "total_tokens": 10**9}, 0.0, False),
        ({"eta": 50.0, "others": (replace(SAID.others[0], eta=20.0),)}, 10.0, False),
        ({}, ETA_S / 2, False),
        ({"eta": 60.0 + ETA_S + ETA * 60.0 + 0.1}, 0.0, True),
        ({}, 10.0, True),  # nothing has come of it in ten seconds
        ({"eta": 0.0, "others": (replace(SAID.others[0], eta=0.0),)}, 61.0, False),
        ({"tokens_per_second": 1000.0 * (1 - SPEED) + 1}, 0.0, False),
        ({"tokens_per_second": 1000.0 * (1 - SPEED) - 1}, 0.0, True),
        ({"upload": 0.0}, 0.0, True),
        ({"download": 1.0}, 0.0, True),
        ({"ready": True}, 0.0, True),
        ({"round": 4}, 0.0, True),
        ({"sketch": b"x" * 1004}, 0.0, True),
        ({"validation_loss": 2.0}, 0.0, True),
        ({"wanted_steps": 7}, 0.0, True),
        ({"others": ()}, 0.0, True),
        ({"others": (replace(SAID.others[0], eta=20.0),)}, 10.0, True),  # fragment 0 is late
        ({"eta": 50.0, "others": (replace(SAID.others[0], eta=30.0),)}, 10.0, True),
        ({"others": (replace(SAID.others[0], ready=True),)}, 0.0, True),
    ],
)
def test_what_others_decide_by_is_said_anew(
    changes: dict[str, object], passed: float, expected: bool
) -> None:
    now = replace(SAID, **changes)  # type: ignore[arg-type]
    assert outdated(SAID, now, passed) is expected
