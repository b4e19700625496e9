"""Names with several addresses, and an address that answers nothing."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from node.hosts.interface import INET6

DEAD = "127.0.0.3"
_CALLS = 8  # more than a queue of none takes


def named(monkeypatch: pytest.MonkeyPatch, name: str, *addresses: str) -> None:
    """Let a name have these addresses, in this order."""
    real = socket.getaddrinfo

    def lookup(host: str, port: Any, *rest: Any, **more: Any) -> list[Any]:
        wanted = addresses if host == name else (host,)
        return [info for one in wanted for info in real(one, port, *rest, **more)]

    monkeypatch.setattr("socket.getaddrinfo", lookup)


@contextmanager
def dead(port: int) -> Iterator[None]:
    """Whoever dials :data:`DEAD` there hears nothing: its queue is full, so packets are dropped."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((DEAD, port))
        listener.listen(0)
        for _ in range(_CALLS):
            caller = stack.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex((DEAD, port))
        yield


def link_local() -> str:
    """A link-local IPv6 address of this machine, with its interface; empty where it has none."""
    lines = INET6.read_text().splitlines() if INET6.is_file() else []  # Linux
    for text, _, _, scope, _, name in map(str.split, lines):
        if scope == "20":
            return f"{ipaddress.IPv6Address(bytes.fromhex(text))}%{name}"
    return ""
