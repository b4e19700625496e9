"""Calls whose body and reply are messages, and what each request is checked for."""

from __future__ import annotations

from typing import TypeVar

from protocols.errors import Stale
from protocols.identity import PeerId
from protocols.transport import Transport
from protocols.wire import Message

M = TypeVar("M", bound=Message)


async def ask(
    transport: Transport,
    peer: PeerId,
    name: str,
    request: Message,
    reply: type[M],
    *,
    timeout: float,
) -> M:
    """Send ``request`` and return the reply, no longer than its class allows.

    Raises what :meth:`Transport.call` raises, and :class:`~protocols.errors.Malformed` for a reply
    that is something else.
    """
    data = await transport.call(
        peer, name, request.encode(), timeout=timeout, max_reply=reply.MAX_BYTES
    )
    decoded: M = reply.decode(data)
    return decoded


def check_run(theirs: bytes, ours: bytes) -> None:
    """Raise :class:`Stale` for a request of another run than the one that is served here."""
    if theirs != ours:
        raise Stale("another run")
