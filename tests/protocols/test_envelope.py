"""Envelopes: what holds opens, and everything else is refused for the right reason."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols import envelope as envelopes
from protocols.envelope import CLOCK_SKEW, MAX_LIFETIME, open_envelope, seal
from protocols.errors import (
    BadSignature,
    LocalProtocolError,
    Malformed,
    RemoteProtocolError,
    Stale,
)
from protocols.identity import Identity
from protocols.messages import Blob, Envelope, PeerRecord

NOW = 1_800_000_000.0
ALICE, BOB = (Identity.from_seed(bytes([n]) * 32) for n in (1, 2))
RUN = b"r" * 32
RECORD = PeerRecord(peer=ALICE.peer_id, addresses=("192.0.2.1:4390",), relay="")


def sealed(identity: Identity = ALICE, **changes: Any) -> bytes:
    fields: dict[str, Any] = {"purpose": "record", "expires": NOW + 60, "sequence": 7}
    return seal(identity, RECORD, **(fields | changes))


def opened(data: bytes, **changes: Any) -> envelopes.OpenedEnvelope[PeerRecord]:
    fields: dict[str, Any] = {"purpose": "record", "now": NOW}
    return open_envelope(data, PeerRecord, **(fields | changes))


def forged(data: bytes, **changes: Any) -> bytes:
    """The same envelope with other fields and the old signature."""
    envelope: Envelope = Envelope.decode(data)
    return replace(envelope, **changes).encode()


def test_a_sealed_message_opens() -> None:
    result = opened(sealed())
    assert result.message == RECORD
    assert (result.signer, result.sequence, result.expires) == (ALICE.peer_id, 7, NOW + 60)


def test_sealing_is_deterministic() -> None:
    assert sealed() == sealed()


@pytest.mark.parametrize(
    "changes",
    [
        {"purpose": "announce"},
        {"run": RUN},
        {"sequence": 8},
        {"expires": NOW + 61},
        {"body": replace(RECORD, relay="elsewhere").encode()},
        {"signer": BOB.peer_id},
        {"signature": b"\x00" * 64},
        {"signature": b""},
        {"signature": b"\x00" * 63},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_signature_covers_every_field(changes: dict[str, Any]) -> None:
    data = forged(sealed(), **changes)
    with pytest.raises(BadSignature):
        envelopes.open(data, now=NOW)


def test_what_the_key_signs_elsewhere_is_no_envelope() -> None:
    unsigned = replace(Envelope.decode(sealed()), signature=b"")
    with pytest.raises(BadSignature):
        opened(replace(unsigned, signature=ALICE.sign(unsigned.encode())).encode())


def test_a_signer_that_is_no_key() -> None:
    with pytest.raises(BadSignature):
        opened(forged(sealed(), signer="nobody"))


def test_purpose_and_run_must_be_the_expected_ones() -> None:
    with pytest.raises(Stale, match="'record' where 'announce'"):
        opened(sealed(), purpose="announce")
    with pytest.raises(Stale, match="run"):
        opened(sealed(), run=RUN)
    with pytest.raises(Stale, match="run"):
        opened(sealed(run=RUN))
    assert opened(sealed(run=RUN), run=RUN).message == RECORD


def test_what_is_for_one_recipient_is_refused() -> None:
    with pytest.raises(Stale, match="recipient"):
        opened(forged(sealed(), recipient=BOB.peer_id))


@pytest.mark.parametrize(
    ("age", "held"), [(0, True), (60, True), (60 + CLOCK_SKEW - 1, True), (60 + CLOCK_SKEW, False)]
)
def test_an_envelope_expires(age: float, held: bool) -> None:
    if held:
        opened(sealed(), now=NOW + age)
    else:
        with pytest.raises(Stale, match="expired"):
            opened(sealed(), now=NOW + age)


def test_an_envelope_cannot_live_for_ever() -> None:
    opened(sealed(expires=NOW + MAX_LIFETIME))
    with pytest.raises(Stale, match="too long"):
        opened(sealed(expires=NOW + MAX_LIFETIME + CLOCK_SKEW + 1))
    with pytest.raises(Stale, match="too long"):
        opened(sealed(expires=NOW + 100), max_lifetime=10)
    opened(sealed(expires=NOW + 1e6), max_lifetime=1e7)


def test_a_body_of_another_kind() -> None:
    data = seal(ALICE, Blob(RUN, b"d" * 32), purpose="record", expires=NOW + 60, sequence=1)
    with pytest.raises(Malformed, match="PeerRecord"):
        opened(data)


def test_only_canonical_bytes_are_taken() -> None:
    """Else anybody could make new bytes of an old envelope, and hashes of them differ."""
    values = msgpack.unpackb(sealed())
    assert msgpack.packb(values) == sealed()
    padded = b"\xdc" + len(values).to_bytes(2, "big") + sealed()[1:]  # array 16 for fixarray
    assert msgpack.unpackb(padded) == values
    with pytest.raises(Malformed, match="canonical"):
        opened(padded)
    with pytest.raises(Malformed):
        opened(sealed() + b"\x00")


def test_sealing_too_much_is_our_bug() -> None:
    with pytest.raises(LocalProtocolError):
        sealed(purpose="p" * 65)
    with pytest.raises(LocalProtocolError):
        sealed(sequence=-1)
    with pytest.raises(LocalProtocolError):
        sealed(expires=float("nan"))


def test_an_open_reader_learns_purpose_and_run() -> None:
    envelope = envelopes.open(sealed(run=RUN), now=NOW)
    assert (envelope.purpose, envelope.run, envelope.signer) == ("record", RUN, ALICE.peer_id)


# --- hostile bytes ------------------------------------------------------------------------------


@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        opened(data)


@given(st.integers(0, len(sealed()) - 1), st.integers(1, 255))
def test_no_flipped_byte_gets_through(position: int, flip: int) -> None:
    data = bytearray(sealed())
    data[position] ^= flip
    with pytest.raises(RemoteProtocolError):
        opened(bytes(data))


def test_an_oversized_envelope_is_refused_before_it_is_read() -> None:
    bomb = b"\xdd\x00\x98\x96\x80" + b"\x90" * 10_000_000  # ten million empty arrays
    tracemalloc.start()
    with pytest.raises(Malformed):
        opened(bomb)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000
