"""Finding a peer at one of its addresses, and saying why it was not to be had.

The same for both kinds of connections, HTTP's and lanes. Every failure says why, in the words of
:class:`~protocols.errors.Why`.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from protocols.address_book import AddressBook
from protocols.connections import tls
from protocols.errors import IdentityMismatch, TransportError, Unreachable, Why
from protocols.identity import PeerId

_NOT_TLS = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "UNKNOWN_PROTOCOL"})
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
SHORT = 1.0  # seconds after which what is interrupted counts as failed: a dial, or a request

_T = TypeVar("_T")


async def reach(book: AddressBook, peer: PeerId, open_: Callable[[str], Awaitable[_T]]) -> _T:
    """The connection that ``open_`` makes to the first address of ``peer`` that works.

    Tries the known addresses, then those the book's resolver finds; the book learns what worked.
    """
    tried: dict[str, TransportError] = {}
    for resolved in (False, True):
        if resolved and not await book.resolve(peer):
            break
        for address in book.addresses(peer):
            if address in tried:
                continue
            started = time.monotonic()
            try:
                link = await open_(address)
            except TransportError as error:
                if isinstance(error, Unreachable) and error.why is Why.NO_FILES:
                    raise  # that says nothing of the address, nor would another one do
                book.failed(peer, address)
                tried[address] = error
            except asyncio.CancelledError:
                if time.monotonic() - started > SHORT:
                    book.failed(peer, address)
                raise
            else:
                book.succeeded(peer, address)
                return link
    errors = list(tried.values())
    if not errors:
        raise Unreachable(peer, Why.NO_ADDRESS)
    first = next((e for e in errors if isinstance(e, Unreachable)), None)
    if len(errors) == 1 or first is None:
        raise errors[0]
    raise Unreachable(peer, first.why, "; ".join(map(str, errors)))


def unreached(address: str, expected: PeerId | None, error: OSError) -> TransportError:
    """Why a connection to ``address`` could not be opened."""
    if isinstance(error, tls.WrongPeer):
        return IdentityMismatch(address, expected or "", error.got)
    why, detail = _reason(error)
    return Unreachable(address, why, detail)


def _reason(error: OSError) -> tuple[Why, str]:
    if error.errno in _OURS and not isinstance(error, socket.gaierror):
        return Why.NO_FILES, error.strerror or ""
    if isinstance(error, TimeoutError):
        return Why.TIMEOUT, ""
    if isinstance(error, socket.gaierror):
        return Why.DNS, error.strerror or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return Why.NOT_ATOLL, "its certificate is of another kind"
    if isinstance(error, ConnectionError | ssl.SSLEOFError):
        if isinstance(error, ConnectionRefusedError):
            return Why.REFUSED, ""
        return Why.RESET, "in the handshake"
    if isinstance(error, ssl.SSLError):
        if error.reason in _NOT_TLS:
            return Why.NOT_ATOLL, "it does not speak TLS"
        return Why.TLS, tls.tls_reason(error)
    text = str(error)
    if "Connect call failed" in text:
        return Why.REFUSED, ""
    return Why.TIMEOUT, error.strerror or text
