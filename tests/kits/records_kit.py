"""Signed records as the DHT of a run holds them."""

from __future__ import annotations

from typing import Any

from identity_kit import identity

from protocols.envelope import seal
from protocols.identity import Identity, PeerId
from protocols.messages import PeerRecord
from protocols.p2p import bindings

bindings()

from hivemind.dht.routing import DHTID  # noqa: E402
from hivemind.utils import MSGPackSerializer  # noqa: E402

RUN = b"\x07" * 32
NOW = 1_800_000_000.0
KEY = DHTID.generate(f"run/{RUN.hex()}/islands")
ALICE, BOB = identity(1), identity(2)


def sealed(
    who: Identity = ALICE, about: PeerId | None = None, sequence: int = 1, **changes: Any
) -> bytes:
    record = PeerRecord(about or who.peer_id, ("192.0.2.1:4390",), "")
    options = {"purpose": "record", "run": RUN, "expires": NOW + 600.0} | changes
    return seal(who, record, sequence=sequence, **options)


def value(sequence: int, who: Identity = ALICE) -> bytes:
    packed: bytes = MSGPackSerializer.dumps(sealed(who, sequence=sequence))
    return packed
