"""Opening the one port a node listens on, with an error that helps if it is taken."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path
from weakref import WeakKeyDictionary

from protocols.addresses import hostport, ip_of, is_loopback, parse_address
from protocols.errors import OperatorError, reason

EVERY_IPV4 = "0.0.0.0"
_BACKLOG = 256
_LISTENING = "0A"  # state column of /proc/net/tcp
_opened: WeakKeyDictionary[socket.socket, str] = WeakKeyDictionary()  # with the option of each


def is_own_name(host: str) -> bool:
    """Whether a name leads to loopback here and stands for this machine elsewhere.

    So does a machine's own name (127.0.1.1 on Debian), unlike ``localhost`` and ``ip6-loopback``.
    Asks the resolver; False where it knows no such name.
    """
    if "localhost" in host or "loopback" in host or not _is_name(host):
        return False
    try:
        found = [str(place[0]) for *_, place in socket.getaddrinfo(host, None)]
    except OSError:
        return False
    return all(map(is_loopback, found))


def _is_name(host: str) -> bool:
    try:
        ip_of(host)
    except ValueError:
        return True
    return False


def listen_on(listen: str, option: str = "--listen", *, for_others: bool = False) -> socket.socket:
    """A listening, non-blocking TCP socket on ``HOST:PORT``; port 0 picks a free one.

    A host's name is looked up, which may block: an event loop calls
    :func:`protocols.connections.sockets.open_listener`.
    ``option`` is the flag that the operator is pointed to. ``0.0.0.0`` means every IPv4 address
    of the machine, ``[::]`` every address of both families. ``for_others``: so does a name that
    is loopback here alone, where no other machine would get to it.
    Raises :class:`OperatorError` E303 if the port is taken, E102 if the address is not one of
    this machine.
    """
    host, port = _parse(listen)
    if for_others and is_own_name(host):
        host = EVERY_IPV4
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(listen, option, error) from error
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(host != "::"))
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            raise _taken(family, host, port, option, error) from error
        raise _unusable(listen, option, error) from error
    _opened[listener] = option
    return listener


def _parse(listen: str) -> tuple[str, int]:
    host, _, port = listen.strip().rpartition(":")
    bare = host.removeprefix("[").removesuffix("]")
    if bare in ("0.0.0.0", "::") or port == "0":
        # what cannot be dialled can still be listened on: check the rest of the address
        dialled = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(bare, host)
        place = parse_address(f"{dialled}:{port if port != '0' else '1'}")
        return (bare if bare in ("0.0.0.0", "::") else place.host), int(port)
    place = parse_address(listen)
    return place.host, place.port


def _unusable(listen: str, option: str, error: OSError) -> OperatorError:
    return OperatorError(
        "E102",
        f"cannot listen on '{listen}'",
        reason(error),
        f"use {option} 0.0.0.0:PORT for every address of this machine",
        exit_code=2,
    )


def _taken(family: int, host: str, port: int, option: str, error: OSError) -> OperatorError:
    free = f"{option} {hostport(host, _free_port(family, host, port))}"
    fix = f"stop that process, or use {free}"
    if error.errno == errno.EACCES:
        why = "ports below 1024 need privileges"
    elif (holder := port_holder(port)) in (None, os.getpid()) and (
        own := _other_option(port, option)
    ):
        why, fix = f"this node itself listens there, with {own}", f"give each its own: {free}"
    else:
        why = f"process {holder} listens there" if holder else "another process listens there"
    return OperatorError("E303", f"port {port} cannot be used", why, fix)


def _other_option(port: int, option: str) -> str:
    """Another option with which this process listens on ``port`` already; empty without one."""
    held = [of for one, of in _opened.items() if one.fileno() >= 0 and one.getsockname()[1] == port]
    return next((one for one in held if one != option), "")


def _free_port(family: int, host: str, port: int) -> int:
    """A port that is free now, near the wanted one if possible."""
    for candidate in [*range(max(port, 1024) + 1, min(max(port, 1024) + 20, 65536)), 0]:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, candidate))
            except OSError:
                continue
            free: int = probe.getsockname()[1]
            return free
    return 0


def port_holder(port: int) -> int | None:
    """The process that listens on ``port``, where the system lets us see it (Linux)."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    if not inodes:
        return None
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(entry) in inodes for entry in folder.iterdir()):
                return int(folder.parent.name)
        except OSError:  # gone, or another user's
            continue
    return None
