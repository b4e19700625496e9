"""Tensors by post: one is sent with a subject, the other waits for that subject, for so long.

In simulations (:mod:`node.simulate`) the modes without certificates (pairs, groups of every step,
owners that are asked) all move their bytes this way, running islands theirs as
:mod:`gossip.letters`: a push whose header is the subject. What comes before it is waited for is
kept, within a bound; what nobody asks for makes room for newer things.

>>> box = Mailbox(transport, max_length=codec.encoded_size(n))
>>> await box.send(partner, "round 7", data, timeout=5)
>>> theirs = await box.receive("round 7", partner, timeout=5)    # None: nothing came
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import torch
from torch import Tensor

from protocols.errors import Malformed, TransportError
from protocols.identity import PeerId
from protocols.transport import CHUNK_BYTES, Incoming, Outgoing, Transport

MAX_SUBJECT = 64  # bytes
KEPT = 256  # bodies nobody has asked for yet; more push out the oldest
_ANY = "*"


class Mailbox:
    """One node's post on a transport; ``max_length`` bytes a body."""

    def __init__(self, transport: Transport, *, max_length: int, kept: int = KEPT) -> None:
        self.transport, self._kept = transport, kept
        self._held: dict[tuple[str, PeerId], Tensor] = {}
        self._waiting: dict[tuple[str, PeerId], asyncio.Future[tuple[PeerId, Tensor]]] = {}
        transport.on_push("mail", self._take, max_length=max_length)

    async def send(self, to: PeerId, subject: str, body: Tensor, *, timeout: float) -> bool:
        """Whether a uint8 body [n] arrived. A peer that is gone costs ``timeout`` s at most."""

        async def chunks() -> AsyncIterator[memoryview]:
            view = memoryview(body.numpy().data)
            for start in range(0, len(view), CHUNK_BYTES):
                yield view[start : start + CHUNK_BYTES]

        try:
            await self.transport.push(
                to, "mail", subject.encode(), Outgoing(len(body), chunks()), timeout=timeout
            )
        except TransportError:  # what a missing exchange means is the mode's to decide
            return False
        return True

    async def receive(self, subject: str, sender: PeerId, *, timeout: float) -> Tensor | None:
        """The body of that subject from that peer; None if none comes within ``timeout`` s."""
        found = await self._receive((subject, sender), timeout)
        return None if found is None else found[1]

    async def receive_any(self, subject: str, *, timeout: float) -> tuple[PeerId, Tensor] | None:
        """The oldest body of that subject and who sent it. One waits for a subject at a time."""
        for key in self._held:
            if key[0] == subject:
                return key[1], self._held.pop(key)
        return await self._receive((subject, PeerId(_ANY)), timeout)

    async def _receive(
        self, key: tuple[str, PeerId], timeout: float
    ) -> tuple[PeerId, Tensor] | None:
        if key in self._held:
            return key[1], self._held.pop(key)
        future: asyncio.Future[tuple[PeerId, Tensor]] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            return None
        finally:
            self._waiting.pop(key, None)

    async def _take(self, peer: PeerId, header: bytes, body: Incoming) -> bytes:
        try:
            subject = header.decode() if len(header) <= MAX_SUBJECT else ""
        except UnicodeDecodeError:
            subject = ""
        if not subject or not subject.isprintable():
            raise Malformed("mail without a proper subject")
        data, at = torch.empty(body.length, dtype=torch.uint8), 0
        async for chunk in body:
            data[at : at + len(chunk)] = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
            at += len(chunk)
        self.put(peer, subject, data)
        return b""

    def put(self, peer: PeerId, subject: str, data: Tensor) -> None:
        """Deliver a body that came, or that a node leaves for itself."""
        for key in ((subject, peer), (subject, PeerId(_ANY))):
            waiting = self._waiting.get(key)
            if waiting is not None and not waiting.done():
                waiting.set_result((peer, data))
                return
        self._held[subject, peer] = data
        while len(self._held) > self._kept:
            self._held.pop(next(iter(self._held)))
