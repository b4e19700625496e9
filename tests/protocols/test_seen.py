"""How a machine learns as what others see its connections."""

from __future__ import annotations

import pytest
from address_kit import DEAD, dead, named

from protocols.http.transport import HttpTransport
from protocols.identity import Identity
from protocols.seen import seen_from


async def test_a_peer_is_asked_at_whichever_of_its_addresses_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with HttpTransport(Identity.generate(), listen="127.0.0.1:0") as peer:
        assert peer.listening is not None
        named(monkeypatch, "peer.example", DEAD, "127.0.0.1")
        with dead(peer.listening[1]):
            seen, port = await seen_from(f"peer.example:{peer.listening[1]}", 0)
    assert seen == f"127.0.0.1:{port}"
