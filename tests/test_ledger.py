"""What is kept of the last rounds for those who missed them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gossip_kit import PLACE, decided

from gossip.ledger import Ledger
from gossip.validity import Place
from protocols.identity import Identity
from protocols.messages import Certificate

Identities = Callable[[int], list[Identity]]


def rounds(identities: list[Identity], count: int) -> list[Certificate]:
    places = [Place(PLACE.run, 0, number, bytes([number]) * 32, b"s", 0) for number in range(count)]
    return [decided(identities, place) for place in places]


def test_the_newest_rounds_are_kept(identities: Identities) -> None:
    ledger = Ledger(keep=3)
    assert ledger.newest() is None
    made = rounds(identities(2), 5)
    for certificate in made:
        ledger.add(certificate, {})
    assert ledger.newest() == made[4]
    assert ledger.certificate(1) is None
    assert ledger.certificate(2) == made[2]
    assert ledger.certificate(5) is None


def test_rounds_in_order_from_one_on(identities: Identities) -> None:
    ledger = Ledger(keep=4)
    made = rounds(identities(2), 6)
    for certificate in made:
        ledger.add(certificate, {})
    assert ledger.since(3, 10) == tuple(made[3:])
    assert ledger.since(2, 2) == tuple(made[2:4])
    assert ledger.since(1, 10) == ()  # gone: what follows it is of no use
    assert ledger.since(6, 10) == ()
    assert ledger.since(2, 0) == ()


def test_a_gap_ends_the_answer(identities: Identities) -> None:
    ledger = Ledger(keep=5)
    made = rounds(identities(2), 4)
    for number in (0, 1, 3):
        ledger.add(made[number], {})
    assert ledger.since(0, 10) == tuple(made[:2])


def test_parts_by_round_range_and_digest(identities: Identities) -> None:
    ledger = Ledger(keep=2)
    certificate = decided(identities(2))
    first, second = certificate.outcome.parts
    data = torch.arange(4, dtype=torch.uint8)
    ledger.add(certificate, {(first.start, first.stop): data})
    round_ = certificate.outcome.round
    assert ledger.part(round_, first.start, first.stop, first.digest) is data
    assert ledger.part(round_, first.start, first.stop, b"x" * 32) is None
    assert ledger.part(round_ + 1, first.start, first.stop, first.digest) is None
    assert ledger.part(round_, second.start, second.stop, second.digest) is None  # not kept
    ledger.clear()
    assert ledger.part(round_, first.start, first.stop, first.digest) is None
