"""Where others can reach this machine, as far as it can tell by itself."""

from __future__ import annotations

import socket


def hostport(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def outward_address() -> str:
    """The address of the interface that leads to the internet; loopback where none does."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1 (RFC 5737): nothing is sent
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
