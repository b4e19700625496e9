"""Where host 0 listens for its island's other hosts, and their ranks."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable

from node.errors import operator_error
from protocols.addresses import hostport, is_loopback
from protocols.connections.listening import is_own_name
from protocols.errors import OperatorError, reason

Connected = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def listen(
    connected: Connected, host: str, port: int, say: Callable[[str], None]
) -> asyncio.Server:
    """Listen at the rendezvous endpoint; on all addresses, and say so, where that is not ours.

    As behind a load balancer, or where the name is loopback here, which no other host reaches.
    Raises OperatorError E303 where the port is taken.
    """
    why = ""
    if await asyncio.to_thread(is_own_name, host):
        why = "that name is loopback here"
    else:
        try:
            return await asyncio.start_server(connected, host, port)
        except OSError as error:
            taken = not isinstance(error, socket.gaierror) and error.errno == errno.EADDRINUSE
            if taken or is_loopback(host):
                raise _refused(host, port, error) from error
            why = reason(error)
    try:
        server = await asyncio.start_server(connected, None, port)
    except OSError as error:
        raise _refused(host, port, error) from error
    say(f"listens for this island's hosts on all addresses, not on {host} alone: {why}")
    return server


def listening_for_ranks(address: str) -> socket.socket:
    """A socket that listens at any free port of an address of this host."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family)


def _refused(host: str, port: int, error: OSError) -> OperatorError:
    return operator_error(
        "E303",
        f"cannot listen for this island's hosts at {hostport(host, port)}",
        why=reason(error),
        fix="stop what listens there, or give another port with --rdzv-endpoint",
    )
