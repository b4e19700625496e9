"""Peers with addresses on a simulated network: who is not known by one is not reached."""

from __future__ import annotations

import asyncio

import pytest
from identity_kit import identity
from p2p_kit import dht_pb2

from protocols.address_book import AddressBook
from protocols.errors import Malformed, RemoteRefused, TransferStalled, Unreachable, Why
from protocols.identity import PeerId
from protocols.p2p import P2P, bindings
from protocols.transport import MAX_CALL_BYTES, CallHandler
from protocols.whereabouts import Whereabouts


class Roads:
    """A network with addresses: who listens where. An id alone leads nowhere."""

    def __init__(self) -> None:
        self.listening: dict[str, Roadside] = {}


class Roadside:
    """A transport that finds peers through its address book, as the real one does."""

    def __init__(self, roads: Roads, peer: PeerId, address: str) -> None:
        self.roads, self.peer_id = roads, peer
        self.book = AddressBook()
        self.handlers: dict[str, CallHandler] = {}
        self.move(address)

    def move(self, address: str) -> None:
        self.roads.listening = {a: t for a, t in self.roads.listening.items() if t is not self}
        if address:
            self.roads.listening[address] = self

    def on_call(self, name: str, handler: CallHandler, *, max_body: int = MAX_CALL_BYTES) -> None:
        self.handlers[name] = handler

    async def call(
        self, peer: PeerId, name: str, body: bytes, *, timeout: float, max_reply: int = 0
    ) -> bytes:
        for attempt in range(2):
            for address in self.book.addresses(peer):
                other = self.roads.listening.get(address)
                if other is None or other.peer_id != peer:
                    self.book.failed(peer, address)
                    continue
                self.book.succeeded(peer, address)
                if name not in other.handlers:
                    raise RemoteRefused("unknown")
                try:
                    return await asyncio.wait_for(other.handlers[name](self.peer_id, body), timeout)
                except TimeoutError:
                    raise TransferStalled(peer) from None
                except Malformed as error:
                    raise RemoteRefused("protocol", str(error)) from error
            if attempt == 0:
                await self.book.resolve(peer)
        known = self.book.addresses(peer)
        raise Unreachable(peer, Why.REFUSED if known else Why.NO_ADDRESS)


class Resident:
    def __init__(self, roads: Roads, number: int) -> None:
        self.identity = identity(number)
        self.peer = self.identity.peer_id
        self.address = f"192.0.2.{number}:4390"
        self.transport = Roadside(roads, self.peer, self.address)
        self.whereabouts = Whereabouts(self.transport, self.identity, self.transport.book)  # type: ignore[arg-type]
        self.whereabouts.publish([self.address])
        self.p2p = P2P(self.transport, self.whereabouts)  # type: ignore[arg-type]

    def move(self, address: str) -> None:
        self.address = address
        self.transport.move(address)
        self.whereabouts.publish([address])

    async def meet(self, other: Resident) -> None:
        """Dial by address once, as a newcomer does with a seed."""
        self.transport.book.add(other.peer, other.address)
        with pytest.raises(bindings().P2PDaemonError, match="no such handler"):
            await self.say(other)

    async def say(self, other: Resident) -> None:
        await self.p2p.call_protobuf_handler(
            other.p2p.peer_id, "none", dht_pb2.PingRequest(), dht_pb2.PingResponse
        )
