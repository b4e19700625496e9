"""What every transport offers: three ways to talk to a peer that has proven its identity.

``call``
    a small request and a small reply (control messages).
``push``
    a header and a long body of known length; the reply is small (tensors to a peer).
``pull``
    a header; the reply is a long body of known length (tensors from a peer).

Peers are named by :data:`~protocols.identity.PeerId`; where they live is the transport's
:class:`~protocols.address_book.AddressBook`. :mod:`protocols.http.transport` is the real one,
:mod:`protocols.memory.transport` the simulated one; ``tests/kits/contract_kit.py`` says which tests
hold both to the same behaviour.

>>> transport.on_call("greet", greet)               # async def greet(peer, body) -> bytes
>>> await transport.call(peer, "greet", b"hello", timeout=5)
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from protocols.identity import PeerId

Buffer = bytes | bytearray | memoryview

MAX_CALL_BYTES = 64 * 1024
MAX_HEADER_BYTES = 64 * 1024
CHUNK_BYTES = 256 * 1024  # the unit bodies are cut into; see docs/experiments.md
NOT_TAKEN = "it answered before it had the body"  # a push: see :meth:`Transport.push`


class Drain(Protocol):
    """Where a long body goes while it arrives. Called on a thread of the transport's own.

    The methods may do arithmetic and nothing that waits. Those of all feeds and drains of one
    transport, and what :meth:`Transport.post` is given, never run at the same time.
    What one of them raises ends its transfer and no other.
    """

    def room(self) -> memoryview | None:
        """Where the next bytes belong, at least one; None: there is no room until ``wake``.

        Asked again before every write, also where no bytes came since it was asked last.
        """
        ...

    def took(self, count: int) -> None:
        """The first ``count`` bytes of the last room are filled; raises to refuse the rest."""
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """Called once, first. ``wake()``, from any thread, says that there is room again."""
        ...


class Feed(Protocol):
    """A long body on its way out, made while it is sent. Called as a :class:`Drain` is."""

    @property
    def length(self) -> int:
        """Bytes of the whole body."""
        ...

    def next(self) -> Buffer | None:
        """The next bytes, at least one; None: there are none until ``wake``.

        They must not change until the call after this one, or the end of the transfer.
        """
        ...

    def attach(self, wake: Callable[[], None]) -> None:
        """Called once, first. ``wake()``, from any thread, says that there are bytes again."""
        ...


class Incoming(Protocol):
    """A long body on its way in; take it once, by :meth:`into` or as an iterator."""

    @property
    def length(self) -> int:
        """Bytes announced; the transport delivers exactly these or raises."""
        ...

    async def into(self, drain: Drain, *, stall: float = 0.0, slow: bool = False) -> None:
        """Have all of it written where ``drain`` says; raises what ``drain`` raised.

        The transfer may stand still for ``stall`` seconds, where that is longer than usual.
        ``slow``: it may move as slowly as it likes, since its receiver judges its pace.
        """
        ...

    def __aiter__(self) -> AsyncIterator[Buffer]:
        """Its chunks, each valid until the next."""
        ...


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A long body on its way out: ``length`` bytes, as any number of buffers."""

    length: int
    chunks: AsyncIterable[Buffer]


CallHandler = Callable[[PeerId, bytes], Awaitable[bytes]]
PushHandler = Callable[[PeerId, bytes, Incoming], Awaitable[bytes]]
PullHandler = Callable[[PeerId, bytes], Awaitable[Outgoing | Feed]]


class Transport(Protocol):
    """Authenticated links to peers.

    All three verbs raise :class:`~protocols.errors.Unreachable` (no link),
    :class:`~protocols.errors.IdentityMismatch` (another key answers),
    :class:`~protocols.errors.TransferStalled` (no progress for ``timeout`` seconds, or for a
    ``call`` no reply within it) and :class:`~protocols.errors.RemoteRefused` (the handler raised;
    a :class:`~protocols.errors.RemoteProtocolError` in a handler reaches the caller as code
    ``"protocol"``, an unknown name as ``"unknown"``). A handler may raise ``RemoteRefused``
    itself to answer with a code of its own. Handlers run only after the peer's identity has
    been proven.
    """

    @property
    def peer_id(self) -> PeerId: ...

    def on_call(self, name: str, handler: CallHandler, *, max_body: int = MAX_CALL_BYTES) -> None:
        """Answer calls of ``name``; a larger body is refused before it is read."""
        ...

    def on_push(self, name: str, handler: PushHandler, *, max_length: int) -> None:
        """Take bodies of ``name``; a longer announced length is refused before any is read.

        A handler may refuse a body at any time, but takes all of it before it returns.
        """
        ...

    def on_pull(self, name: str, handler: PullHandler, *, slow: bool = False) -> None:
        """Serve bodies of ``name``.

        ``slow``: they may move as slowly as those who pull them bear.
        """
        ...

    async def call(
        self,
        peer: PeerId,
        name: str,
        body: bytes,
        *,
        timeout: float,
        max_reply: int = MAX_CALL_BYTES,
    ) -> bytes:
        """Send ``body`` and return the reply; ``timeout`` in seconds bounds the whole call."""
        ...

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Outgoing | Feed, *, timeout: float
    ) -> bytes:
        """Send a long body; ``timeout`` bounds every stretch without progress.

        Raises :class:`~protocols.errors.LocalProtocolError` for a body of another length than
        announced, and whatever its source raises. A peer that answers well before all of the body
        has been sent has not taken it: that is :class:`~protocols.errors.Unreachable`. Once it has
        ended, however it did, the body is not touched any more.
        """
        ...

    def pull(
        self, peer: PeerId, name: str, header: bytes, *, max_length: int, timeout: float
    ) -> AbstractAsyncContextManager[Incoming]:
        """Receive a long body of at most ``max_length`` bytes."""
        ...

    async def dial(self, address: str, expected: PeerId | None = None) -> PeerId:
        """Connect to ``HOST:PORT``, learn who answers, and remember the address for it."""
        ...

    def post(self, callback: Callable[[], None]) -> None:
        """Run ``callback`` soon, from any thread, where feeds and drains are called.

        It never runs at the same time as one of them. What it raises is logged.
        """
        ...

    async def aclose(self) -> None:
        """Stop listening, close all links, wait for handlers to end."""
        ...
