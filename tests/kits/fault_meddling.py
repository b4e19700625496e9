"""The transport of a member: it counts what goes out, as it is before it is packed.

That of the victim doubles what it sends, or spoils the parts that it merged, once told to.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any

from fault_traffic import Move, move_of

from protocols.bodies import BufferFeed
from protocols.errors import TransportError
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.transport import Buffer, CallHandler, Feed, PullHandler, PushHandler


class Meddling:
    """Passes everything on, and meddles with it once told to."""

    def __init__(self, inner: HttpTransport) -> None:
        self.inner = inner
        self.doubles = False
        self.spoils = False
        self.moves: list[Move] = []  # all slices and merged parts that went out, or began to
        self.came: list[tuple[PeerId, Move]] = []  # merged parts that were pushed here, all of each
        self.said: Counter[PeerId] = Counter()  # bytes of all else, by who got them
        self.favoured: PeerId | None = None  # it alone gets a part, and nobody a slice:
        self.after: Callable[[], None] = lambda: None  # called once it has the part

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def call(self, peer: PeerId, name: str, body: bytes, **options: Any) -> bytes:
        """The call, twice at the same time."""
        self.said[peer] += len(body)
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

    def on_call(self, name: str, handler: CallHandler, **options: Any) -> None:
        """As the inner one, and what is answered counts."""

        async def answer(peer: PeerId, body: bytes) -> bytes:
            reply = await handler(peer, body)
            self.said[peer] += len(reply)
            return reply

        self.inner.on_call(name, answer, **options)

    def on_push(self, name: str, handler: PushHandler, **options: Any) -> None:
        """As the inner one, and parts that have come are noted."""

        async def take(peer: PeerId, header: bytes, incoming: Any) -> bytes:
            move = move_of(name, peer, header, incoming.length)
            reply = await handler(peer, header, incoming)
            if move is not None and move.merged:
                self.came.append((peer, move.arrived(self.inner.peer_id)))
            return reply

        self.inner.on_push(name, take, **options)

    def on_pull(self, name: str, handler: PullHandler, **options: Any) -> None:
        """As the inner one, and what is given counts."""

        async def answer(peer: PeerId, header: bytes) -> Any:
            return self._counted(name, peer, header, await handler(peer, header))

        self.inner.on_pull(name, answer, **options)

    def _counted(self, name: str, peer: PeerId, header: bytes, body: Any) -> Any:
        """A body that counts what is taken of it; one that is no slice or part counts at once."""
        move = move_of(name, peer, header, body.length)
        if move is None or not hasattr(body, "next"):
            self.said[peer] += len(header) + body.length
            return body
        self.moves.append(move)
        return Counted(body, move)

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Feed, *, timeout: float
    ) -> bytes:
        """The push, with one bit flipped in it, or the same bytes once more afterwards."""
        if self.favoured is not None and (name == "slice" or peer != self.favoured):
            await asyncio.Event().wait()
        body = self._counted(name, peer, header, body)
        if self.spoils and name == "merged":
            body = Spoilt(body)
        if not self.doubles:
            reply = await self.inner.push(peer, name, header, body, timeout=timeout)
            if name == "merged" and self.favoured == peer:
                self.after()
            return reply
        copied = Copied(body)
        reply = await self.inner.push(peer, name, header, copied, timeout=timeout)
        with contextlib.suppress(TransportError):  # it is not wanted any more
            again = BufferFeed(bytes(copied.copy))
            await self.inner.push(peer, name, header, again, timeout=timeout)
        return reply


class Counted:
    """A feed of which is noted how much was taken."""

    def __init__(self, inner: Feed, move: Move) -> None:
        self.inner, self.move = inner, move

    @property
    def length(self) -> int:
        return self.inner.length

    def next(self) -> Buffer | None:
        piece = self.inner.next()
        self.move.given += len(piece or b"")
        return piece

    def attach(self, wake: Callable[[], None]) -> None:
        self.inner.attach(wake)


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
