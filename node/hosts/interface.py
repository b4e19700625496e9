"""The network interfaces of this machine: gloo and NCCL are told one by the name it has."""

from __future__ import annotations

import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

SIOCGIFADDR = 0x8915  # netdevice(7)
_REQUEST = struct.Struct("16sH2x4s8x")  # struct ifreq with a sockaddr_in
INET6 = Path("/proc/net/if_inet6")
GLOO = "GLOO_SOCKET_IFNAME"
# each with what goes before a name: to NCCL a bare one is a prefix, eth1 means eth10 as well
VARIABLES = {GLOO: "", "NCCL_SOCKET_IFNAME": "="}


def interface_of(address: str) -> str:
    """The interface with this IPv4 or IPv6 address; empty where none has it (or not on Linux)."""
    if sys.platform != "linux":
        return ""
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address):
        if wanted.ipv4_mapped is not None:
            return interface_of(str(wanted.ipv4_mapped))
        return _ipv6(wanted)
    if wanted.is_loopback:
        return "lo"
    return next((name for name, own in ipv4_interfaces() if own == wanted), "")


def is_own_name(host: str) -> bool:
    """Whether a name leads to loopback here and stands for this machine elsewhere.

    So does a machine's own name (127.0.1.1 on Debian), unlike ``localhost``. Asks the
    resolver; False where it knows no such name.
    """
    if "localhost" in host or _number(host) is not None:
        return False
    try:
        found = [_number(str(place[0])) for *_, place in socket.getaddrinfo(host, None)]
    except OSError:
        return False
    return all(one is not None and one.is_loopback for one in found)


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine reaches, without asking the resolver."""
    number = _number(host)
    return host == "localhost" if number is None else number.is_loopback


def _number(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host.partition("%")[0])
    except ValueError:  # a name
        return None


def ipv4_interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """Names of interfaces with the IPv4 address that each has; none where this is not Linux."""
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = _REQUEST.pack(name.encode()[:15], socket.AF_INET, bytes(4))
            try:
                answer = fcntl.ioctl(probe, SIOCGIFADDR, request + bytes(8))
            except OSError:  # it has no IPv4 address
                continue
            yield name, ipaddress.IPv4Address(answer[20:24])


def _ipv6(wanted: ipaddress.IPv6Address) -> str:
    lines = INET6.read_text(encoding="ascii").splitlines() if INET6.is_file() else []
    return next((line.split()[-1] for line in lines if line.startswith(wanted.packed.hex())), "")


def told(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which ranks find each other over this address; those already set stay."""
    name = interface_of(address)
    return {key: environ.get(key) or mark + name for key, mark in VARIABLES.items() if name}
