"""The transport of a member that doubles what it sends, or spoils the parts that it merged."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from protocols.bodies import BufferFeed
from protocols.errors import TransportError
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.transport import Buffer, Feed


class Meddling:
    """Passes everything on, and meddles with it once told to."""

    def __init__(self, inner: HttpTransport) -> None:
        self.inner = inner
        self.doubles = False
        self.spoils = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def call(self, peer: PeerId, name: str, body: bytes, **options: Any) -> bytes:
        """The call, twice at the same time."""
        if not self.doubles:
            return await self.inner.call(peer, name, body, **options)
        first, _ = await asyncio.gather(
            self.inner.call(peer, name, body, **options),
            self.inner.call(peer, name, body, **options),
            return_exceptions=True,
        )
        if isinstance(first, BaseException):
            raise first
        return first

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Feed, *, timeout: float
    ) -> bytes:
        """The push, with one bit flipped in it, or the same bytes once more afterwards."""
        if self.spoils and name == "merged":
            body = Spoilt(body)
        if not self.doubles:
            return await self.inner.push(peer, name, header, body, timeout=timeout)
        copied = Copied(body)
        reply = await self.inner.push(peer, name, header, copied, timeout=timeout)
        with contextlib.suppress(TransportError):  # it is not wanted any more
            again = BufferFeed(bytes(copied.copy))
            await self.inner.push(peer, name, header, again, timeout=timeout)
        return reply


class Copied:
    """A feed of which a copy is kept."""

    def __init__(self, inner: Feed) -> None:
        self.inner, self.copy = inner, bytearray()

    @property
    def length(self) -> int:
        return self.inner.length

    def next(self) -> Buffer | None:
        piece = self.inner.next()
        self.copy += piece or b""
        return piece

    def attach(self, wake: Callable[[], None]) -> None:
        self.inner.attach(wake)


class Spoilt(Copied):
    """A feed whose first bit is another."""

    def next(self) -> Buffer | None:
        first, piece = not self.copy, super().next()
        if piece is None or not first:
            return piece
        return bytes([piece[0] ^ 1]) + bytes(piece[1:])
