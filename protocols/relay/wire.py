"""What a relay, a node that nobody can dial and its callers say to each other.

A node behind a NAT keeps one question open with a relay, ``relay-wait``; the answer is who calls
it. A caller asks the relay for it with ``relay-dial``, in one of two ways:

- *Back*: the caller can be dialled. It makes up a token, the relay passes it on with the caller's
  addresses, and the hidden node dials the caller. The relay carries no further byte.
- *Through*: neither can be dialled. The relay makes two tokens, both dial the relay's port, and
  each says whether a way past the relay is to be tried (:class:`RelayEnd`). Once both are there
  each is told where the other comes from (:class:`RelayMeeting`), and they try to meet
  (:mod:`protocols.relay.punching`). Where they do not, the relay passes on what they send each
  other, which is TLS from end to end.

Whoever dials for such a call sends a preamble first, :data:`PREAMBLE`, told from TLS, HTTP and
lanes by its first byte, and then what :func:`spoken` makes of the token. From then on the
connection is as any other, except that the end that dialled may be the one that serves. A token is
good for one connection and some seconds; an eavesdropper can spoil the call with what is said of
it, but cannot pass for either end.

The token itself is never said: others make it up, and the address as well, which may be that of any
service of the network of whoever dials. It is not to be told what they like.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Annotated, TypeVar

from blake3 import blake3

from protocols.errors import Malformed
from protocols.messages import Address, Peer
from protocols.wire import Max, Message, Struct

MARK = b"\xa8"  # begins no HTTP request (a letter), TLS record or lane
PREAMBLE = MARK + b"atollR1"
TOKEN_BYTES = 16
_SPOKEN = b"atoll call\x00"
MAX_CALLS = 64  # told at once
MAX_CALLS_OF_ONE = 32  # of them, of one caller: twice what it keeps open to a peer for one use
MAX_BACK = 3  # addresses of a caller that are tried
MAX_MEETING = 2  # addresses of the other end of a call that both try past the relay

Token = Annotated[bytes, Max(TOKEN_BYTES)]


class RelayWait(Message, kind=45):
    """Who calls me? ``begin``: only whether the relay takes me, answered at once."""

    begin: bool


class RelayCall(Struct):
    """Somebody wants a connection: dial one of ``addresses``, or the relay if there are none."""

    caller: Peer
    token: Token
    addresses: Annotated[tuple[Address, ...], Max(MAX_BACK)]


class RelayCalls(Message, kind=46):
    """Answer to :class:`RelayWait`. ``rate``: bytes a second it carries; 0: it only tells."""

    rate: float
    calls: Annotated[tuple[RelayCall, ...], Max(MAX_CALLS)]


class RelayDial(Message, kind=47):
    """I want a connection to ``target``; with a token of mine, it is to dial my addresses with it.

    Without one the answer is the relay's token for a connection through it, else nothing.
    ``punch``: a way past the relay is good enough, whether it carries or not.
    """

    target: Peer
    token: Token
    addresses: Annotated[tuple[Address, ...], Max(MAX_BACK)]
    punch: bool


class RelayEnd(Message, kind=52):
    """First word of an end that has dialled the relay: is a way past it to be tried?

    ``inside``: the ``HOST:PORT`` that this end's socket has, for an end in the same network.
    """

    punch: bool
    inside: Address


class RelayMeeting(Message, kind=53):
    """The relay's answer to both ends: where the other comes from; nothing: it is not to be tried.

    ``carries``: whether the relay passes on what follows, or closes the connection.
    """

    carries: bool
    addresses: Annotated[tuple[Address, ...], Max(MAX_MEETING)]


Word = TypeVar("Word", RelayEnd, RelayMeeting)


def spoken(token: bytes) -> bytes:
    """What is said in the clear in place of ``token``; raises Malformed for one of another length.

    Nobody can choose a hash, but a few bytes of it can be sought. So none of them is a character of
    ASCII: whatever takes lines is told no command.
    """
    if len(token) != TOKEN_BYTES:
        raise Malformed(f"a token of another length than {TOKEN_BYTES}")
    return bytes(0x80 | byte for byte in blake3(_SPOKEN + token).digest(TOKEN_BYTES))


async def introduce(sock: socket.socket, token: bytes) -> None:
    """Say on a new connection which call it is for; raises OSError, and as :func:`spoken`."""
    await asyncio.get_running_loop().sock_sendall(sock, PREAMBLE + spoken(token))


async def introduced(sock: socket.socket) -> bytes:
    """What is said of a token; raises OSError, or Malformed where a connection begins otherwise."""
    said = await _exactly(sock, len(PREAMBLE) + TOKEN_BYTES, PREAMBLE)
    return said[len(PREAMBLE) :]


async def say(sock: socket.socket, word: RelayEnd | RelayMeeting) -> None:
    """Send a word with its length in front, one byte; raises OSError."""
    said = word.encode()
    await asyncio.get_running_loop().sock_sendall(sock, bytes([len(said)]) + said)


async def heard(sock: socket.socket, kind: type[Word]) -> Word:
    """A word of the other end; raises OSError, or Malformed for anything else."""
    (size,) = await _exactly(sock, 1)
    word: Word = kind.decode(await _exactly(sock, size))
    return word


async def _exactly(sock: socket.socket, wanted: int, beginning: bytes = b"") -> bytes:
    """So many bytes and not one more: what follows is for others."""
    loop = asyncio.get_running_loop()
    said = b""
    while len(said) < wanted:
        piece = await loop.sock_recv(sock, wanted - len(said))
        if not piece:
            raise ConnectionResetError("left before it had said what it is for")
        said += piece
        if not beginning.startswith(said[: len(beginning)]):
            raise Malformed("not the preamble of a call")
    return said
