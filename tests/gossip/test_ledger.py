"""What is kept of the last rounds for those who missed them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gossip_kit import PLACE, decided

from gossip.exchange.ledger import RESERVE, Ledger, Parts, stored
from gossip.place import Place
from protocols.identity import Identity
from protocols.memory import virtual_time
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


def big(certificate: Certificate, number: int, size: int) -> dict[tuple[int, int], torch.Tensor]:
    """Encoded parts of ``size`` bytes each."""
    return {
        (result.start, result.stop): torch.full((size,), number, dtype=torch.uint8)
        for result in certificate.outcome.parts
    }


def test_what_has_no_room_in_memory_is_served_from_files(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.exchange.ledger.SMALL", 1000)
    ledger = Ledger(keep=5, size=1000, directory=tmp_path)  # 2000 bytes in memory, 8000 in all
    made = rounds(identities(2), 6)
    for number, certificate in enumerate(made[:3]):  # 1800 bytes each
        ledger.add(certificate, big(certificate, number, 900))
    assert [round_ for round_, _ in ledger.excess()] == [1, 0]
    for round_, parts in ledger.excess():
        ledger.replace(round_, parts, stored(parts, tmp_path))
    assert ledger.excess() == []
    assert list(tmp_path.iterdir()) == []  # the files have no names
    for number, certificate in enumerate(made[:3]):
        for result in certificate.outcome.parts:
            data = ledger.part(number, result.start, result.stop, result.digest)
            assert data is not None
            assert torch.equal(data, torch.full((900,), number, dtype=torch.uint8))
    for number in (3, 4, 5):
        ledger.add(made[number], big(made[number], number, 900))
    assert ledger.certificate(1) is None  # more than a state download is not kept
    assert ledger.certificate(2) == made[2]


def test_fp32_parts_leave_memory_at_once_and_without_space_altogether(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.exchange.ledger.SMALL", 1000)
    ledger = Ledger(keep=5, size=1000, directory=tmp_path)
    (certificate,) = rounds(identities(2), 1)
    parts = big(certificate, 1, 2000)
    ledger.add(certificate, parts)
    assert ledger.excess() == [(0, parts)]
    with pytest.raises(OSError, match="No such file"):
        stored(parts, tmp_path / "gone")
    ledger.replace(0, parts, None)
    assert ledger.newest() == certificate
    first = certificate.outcome.parts[0]
    assert ledger.part(0, first.start, first.stop, first.digest) is None
    ledger.replace(0, parts, parts)  # it is forgotten
    assert ledger.part(0, first.start, first.stop, first.digest) is None


def test_rounds_of_which_there_is_nothing_stay_where_they_are(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state was downloaded, and what came before it was not."""
    monkeypatch.setattr("gossip.exchange.ledger.SMALL", 1000)
    ledger = Ledger(keep=5, size=1000, directory=tmp_path)
    before, after = rounds(identities(2), 2)
    ledger.add(before, {})
    ledger.add(after, big(after, 1, 2000))
    virtual_time.run(ledger.make_room(virtual_time.inline))
    assert ledger.excess() == []
    assert ledger.since(0, 5) == (before, after)
    first = after.outcome.parts[0]
    data = ledger.part(1, first.start, first.stop, first.digest)
    assert data is not None
    assert torch.equal(data, torch.ones(2000, dtype=torch.uint8))


def test_without_a_directory_the_newest_round_is_always_kept(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.exchange.ledger.SMALL", 1000)
    ledger = Ledger(keep=5, size=1000)
    made = rounds(identities(2), 3)
    for number, certificate in enumerate(made):
        ledger.add(certificate, big(certificate, number, 2000))
    assert ledger.excess() == []
    assert ledger.since(2, 5) == (made[2],)
    assert ledger.certificate(1) is None


def test_rounds_that_somebody_needs_are_kept_while_there_is_room(
    identities: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.exchange.ledger.MOST", 6)
    needed: int | None = 1
    room = 1
    ledger = Ledger(keep=2, needed=lambda: needed, room=lambda: room)
    made = rounds(identities(2), 10)
    for certificate in made[:6]:
        ledger.add(certificate, {})
    assert ledger.since(1, 10) == tuple(made[1:6])
    assert ledger.certificate(0) is None
    for certificate in made[6:8]:
        ledger.add(certificate, {})
    assert ledger.since(2, 10) == tuple(made[2:8])  # six at most
    room = 0  # the disk is needed for a checkpoint
    ledger.add(made[8], {})
    assert ledger.since(7, 10) == tuple(made[7:9])
    assert ledger.certificate(6) is None
    needed, room = None, 1
    ledger.add(made[9], {})
    assert ledger.certificate(7) is None


@pytest.mark.parametrize("saved", [16000, 0])  # bytes of a checkpoint, of who makes any
def test_rounds_in_files_leave_room_for_a_checkpoint_and_a_reserve(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int
) -> None:
    monkeypatch.setattr("gossip.exchange.ledger.SMALL", 1000)
    monkeypatch.setattr("gossip.exchange.ledger.RESERVE", 500)
    before = saved + 500 + 1800 + 900  # there is room for one round of 1800 bytes, and for no other
    files: list[weakref.ref[Parts]] = []

    class File(dict[tuple[int, int], torch.Tensor]):
        pass  # unlike a dict it can be referred to weakly

    def left() -> int:
        return before - 1800 * sum(file() is not None for file in files)

    def kept(parts: Parts, directory: Path) -> Parts:
        found = File(stored(parts, directory))
        files.append(weakref.ref(found))
        return found

    monkeypatch.setattr("gossip.exchange.ledger.stored", kept)
    ledger = Ledger(1, 1000, tmp_path, needed=lambda: 0, room=lambda: left() - saved)
    made = rounds(identities(2), 6)
    for number, certificate in enumerate(made):
        ledger.add(certificate, big(certificate, number, 900))
        virtual_time.run(ledger.make_room(virtual_time.inline))
        assert left() - saved >= 500
    assert len(files) > 1
    assert ledger.since(4, 10) == tuple(made[4:])  # one in memory, one in a file
    assert ledger.certificate(3) is None
    first = made[4].outcome.parts[0]
    assert ledger.part(4, first.start, first.stop, first.digest) is not None


def test_rounds_that_are_kept_in_any_case_take_no_checkpoints_room(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.exchange.ledger.SMALL", 1000)
    ledger = Ledger(5, 1000, tmp_path, room=lambda: RESERVE + 3999)
    (certificate,) = rounds(identities(2), 1)
    ledger.add(certificate, big(certificate, 1, 2000))
    virtual_time.run(ledger.make_room(virtual_time.inline))
    first = certificate.outcome.parts[0]
    assert ledger.newest() == certificate
    assert ledger.part(0, first.start, first.stop, first.digest) is None


def test_nobody_needs_more_bytes_than_those_of_the_state(
    identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gossip.exchange.ledger.SMALL", 1000)
    ledger = Ledger(keep=2, size=1000, directory=tmp_path, needed=lambda: 0)  # 8000 in all
    made = rounds(identities(2), 6)
    for number, certificate in enumerate(made):
        ledger.add(certificate, big(certificate, number, 900))  # 1800 bytes
        virtual_time.run(ledger.make_room(virtual_time.inline))
    assert ledger.since(2, 10) == tuple(made[2:])
    assert ledger.certificate(1) is None
