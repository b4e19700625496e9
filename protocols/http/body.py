"""What both ends of the HTTP transport agree on: header names, and how a short body is read.

The announced length is known before anything is read, so every bound is checked before anything
is allocated. A reader gives up when nothing arrives for ``stall`` seconds, and when, over
``stall`` seconds of waiting, less than ``min_rate`` bytes a second came; a quick beginning buys no
time for what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from aiohttp import ClientError, StreamReader
from aiohttp.web import RequestPayloadError

from protocols.errors import TransferStalled, Unreachable, Why
from protocols.identity import PeerId

VERSION_HEADER = "Server"  # on every answer: an answer without it is not from one of us
PEER_HEADER = "Atoll-Peer"  # the claimed identity; only read where there is no TLS
ERROR_HEADER = "Atoll-Error"  # the code of a refusal
TOOK_HEADER = "Atoll-Took"  # microseconds the handler took
PROTOCOL = "atoll/1"

MAX_ERROR_BYTES = 512


async def read_body(
    stream: StreamReader,
    length: int,
    peer: PeerId,
    *,
    stall: float,
    min_rate: float,
    on_bytes: Callable[[int], None],
) -> bytes:
    """The whole of a short body.

    Raises :class:`TransferStalled`, or :class:`Unreachable` if it breaks off.
    """
    clock = asyncio.get_running_loop().time
    began, before = clock(), 0  # of a stretch of waiting: its start, and the bytes by then
    parts: list[bytes] = []
    got = 0
    while got < length:
        try:
            async with asyncio.timeout(stall):
                chunk = await stream.readany()
        except TimeoutError as error:
            raise TransferStalled(f"{peer}: nothing for {stall:g} s") from error
        except (OSError, ClientError, RequestPayloadError) as error:
            raise Unreachable(peer, Why.RESET, "in the middle of a body") from error
        got += len(chunk)
        if not chunk or got > length:
            raise Unreachable(peer, Why.RESET, "the body is not of the announced length")
        waited = clock() - began
        if waited >= stall:
            if got - before < min_rate * waited:
                raise TransferStalled(f"{peer}: {(got - before) / waited:.0f} bytes a second")
            began, before = clock(), got
        on_bytes(len(chunk))
        parts.append(chunk)
    return b"".join(parts)
