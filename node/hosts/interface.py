"""The network interfaces of this machine: gloo and NCCL are told one by the name it has."""

from __future__ import annotations

import array
import ipaddress
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from protocols.addresses import host_of, ip_of, is_loopback

SIOCGIFCONF = 0x8912  # netdevice(7)
_LIST = struct.Struct("iP")  # struct ifconf: bytes, and where they are
# struct ifreq with a sockaddr_in, in a union that is as long as its struct ifmap
_ENTRY = struct.Struct("16sH2x4s" + ("16x" if struct.calcsize("P") == 8 else "8x"))
INET6 = Path("/proc/net/if_inet6")
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
GLOO = "GLOO_SOCKET_IFNAME"
# each with what goes before a name: to NCCL a bare one is a prefix, eth1 means eth10 as well
VARIABLES = {GLOO: "", "NCCL_SOCKET_IFNAME": "="}


def interface_of(address: str) -> str:
    """The interface with this IPv4 or IPv6 address; empty where none has it, or is known to.

    So it is where loopback has an address of the network's, as a balancer's: others do not
    reach a rank that gloo has listen there.
    """
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(wanted, ipaddress.IPv6Address) and wanted.ipv4_mapped is not None:
        wanted = wanted.ipv4_mapped
    if wanted.is_loopback:
        return LOOPBACK
    if isinstance(wanted, ipaddress.IPv6Address):
        return _ipv6(wanted)
    named = (name for name, own in ipv4_interfaces() if own == wanted)
    return next((name for name in named if name.partition(":")[0] != LOOPBACK), "")


def ipv4_interfaces() -> Iterator[tuple[str, ipaddress.IPv4Address]]:
    """Interfaces and IPv4 addresses, an interface once for each; none where this is not Linux.

    An address with a label of its own (``eth0:1``) has that for a name, as gloo and NCCL see it.
    """
    if sys.platform != "linux":
        return
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        length, _ = _LIST.unpack(fcntl.ioctl(probe, SIOCGIFCONF, _LIST.pack(0, 0)))
        found = array.array("B", bytes(length))
        listed = fcntl.ioctl(probe, SIOCGIFCONF, _LIST.pack(length, found.buffer_info()[0]))
    length, _ = _LIST.unpack(listed)
    for name, _, own in _ENTRY.iter_unpack(found.tobytes()[:length]):
        yield name.rstrip(b"\0").decode(), ipaddress.IPv4Address(own)


def _ipv6(wanted: ipaddress.IPv6Address) -> str:
    lines = INET6.read_text(encoding="ascii").splitlines() if INET6.is_file() else []
    names = (line.split()[-1] for line in lines if line.startswith(wanted.packed.hex()))
    return next((name for name in names if name != LOOPBACK), "")


def met_at(own: str, store: str) -> str:
    """The address of a host at which its ranks are met; ``own`` is that on its way to host 0.

    ``store``: where all ranks meet. Who comes to host 0 by loopback is on its machine, and others
    may not be.
    """
    if is_loopback(own):
        with suppress(ValueError):
            return str(ip_of(host_of(store)))
    return own


def told(address: str, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables with which ranks find each other over this address; those already set stay."""
    name = interface_of(address)
    return {key: environ.get(key) or mark + name for key, mark in VARIABLES.items() if name}


def untold(address: str, environ: Mapping[str, str]) -> str:
    """For the operator, where ranks get no interface from :func:`told`; empty where they do."""
    if environ.get(GLOO) or interface_of(address):
        return ""
    return (
        f"no interface of this host is known to have the address {address}: gloo takes that of "
        f"the host's own name; where the ranks do not meet, set {GLOO}"
    )
