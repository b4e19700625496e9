"""Where a peer lives, as text: reading ``HOST:PORT[/PEERID]``, lists of them and ``@file``.

A peer that nobody can dial is called at ``relay/HOST:PORT/PEERID``, the address of its relay
(:mod:`protocols.relay.client`); announcements and :mod:`protocols.address_book` hold such
addresses as well. Commands read addresses before they know whether they need a key at all, so
:mod:`protocols.identity` is imported where a peer id is there to be read.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protocols.errors import Malformed, OperatorError, reason

if TYPE_CHECKING:
    from protocols.identity import PeerId

NAT64 = ipaddress.IPv6Network("64:ff9b::/96")  # holds the IPv4 addresses (RFC 6052)
IPV6_PREFIX = 56  # bits: what one household or office is usually given
MAX_HOST = 120  # so that HOST:PORT fits an Address on the wire
MAX_NAME = 253  # characters that a name may have at all
MAX_FILE_BYTES = 1024 * 1024  # of an @file
RELAY = "relay/"
MAX_ANNOUNCED = 128  # characters of an Address on the wire

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_MULTIADDR = re.compile(
    r"/(?P<kind>ip4|ip6|dns|dns4|dns6|dnsaddr)/(?P<host>[^/]+)"
    r"(/(?P<transport>tcp|udp)/(?P<port>\d+))?(/.*?p2p/(?P<peer>[^/]+))?.*"
)


@dataclass(frozen=True, slots=True)
class PeerAddress:
    """One place to dial, and who should answer there if that is known."""

    host: str
    port: int
    peer: PeerId | None = None

    @property
    def hostport(self) -> str:
        """``HOST:PORT``, IPv6 in brackets: the form that travels and that the book holds."""
        return hostport(self.host, self.port)

    def __str__(self) -> str:
        return f"{self.hostport}/{self.peer}" if self.peer else self.hostport


def parse_address(text: str) -> PeerAddress:
    """Read ``HOST:PORT[/PEERID]``; raises :class:`OperatorError` E102 naming the faulty part."""
    text = text.strip()
    if not text:
        raise _bad(text, "it is empty", "write HOST:PORT, for example 203.0.113.7:4390")
    if len(text) > 512:
        raise _bad(text[:40] + "…", "it is far too long", "write HOST:PORT or HOST:PORT/PEERID")
    if any(character.isspace() for character in text):
        raise _bad(text, "there is a space in it", "remove the space; separate peers by commas")
    if text.startswith("/"):
        raise _multiaddress(text)
    scheme, separator, rest = text.partition("://")
    if separator:
        raise _bad(text, f"{scheme}:// does not belong there", f"write {rest.rstrip('/')}")
    where, slash, peer = text.partition("/")
    if not slash and ":" not in where and _peer(where):
        raise _bad(text, "this is a peer id without an address", f"write HOST:PORT/{text}")
    host, port = _split(text, where)
    address = PeerAddress(_host(text, host), _port(text, host, port))
    if not slash:
        return address
    if not (known := _peer(peer)):
        raise _bad(
            text,
            f"'{peer}' after the / is not a peer id" if peer else "nothing follows the /",
            f"copy the whole line the peer printed, or leave it out: {address}",
        )
    return PeerAddress(address.host, address.port, known)


def is_relayed(address: str) -> bool:
    """Whether an address is that of a peer's relay and not its own."""
    return address.startswith(RELAY)


def relay_address(where: str, relay: PeerId) -> str:
    """The address of a peer that waits at ``relay``; raises :class:`OperatorError` E102."""
    return normal(f"{RELAY}{parse_address(where).hostport}/{relay}")


def relay_of(address: str) -> PeerAddress:
    """The relay of an address that :func:`is_relayed`; raises :class:`OperatorError` E102."""
    return parse_address(address.removeprefix(RELAY))


def hostport(host: str, port: int) -> str:
    """``HOST:PORT``, with brackets around an IPv6 address."""
    return f"{bracketed(host)}:{port}"


def bracketed(host: str) -> str:
    """A host as it stands in front of a port."""
    return f"[{host}]" if ":" in host else host


def host_of(address: str) -> str:
    """What stands in front of the port, without an IPv6 address's brackets."""
    return address.rpartition(":")[0].strip("[]")


def ip_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """An IP address in one form: no zone, IPv4 as such. Raises ValueError for anything else."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    return getattr(ip, "ipv4_mapped", None) or ip


def zoned(sockname: Sequence[Any]) -> str:
    """The host of a socket's own address; where it is link-local, as it can be dialled: with its
    interface."""
    host = str(sockname[0])
    if len(sockname) < 4 or not sockname[3] or "%" in host:
        return host
    return f"{host}%{socket.if_indextoname(sockname[3])}"


def is_loopback(host: str) -> bool:
    """Whether an address is one that only this machine reaches, without asking the resolver."""
    try:
        return ip_of(host).is_loopback
    except ValueError:
        return host == "localhost"


def source_of(host: str) -> str:
    """What an IP address is counted under: itself, or with IPv6 a household's network.

    From behind NAT64 each IPv4 address is seen as one of IPv6, all in one network: there it counts
    as what it is. Raises ValueError for anything else.
    """
    ip = ip_of(host)
    if ip in NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if ip.version == 4:
        return str(ip)
    return str(ipaddress.ip_network((ip, IPV6_PREFIX), strict=False))


def address_towards(host: str) -> str:
    """From which address of its own this machine reaches an IP address; raises OSError.

    Nothing is sent, and no name is asked for.
    """
    family, kind, _, _, place = socket.getaddrinfo(
        host, 9, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST
    )[0]
    with socket.socket(family, kind) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


@lru_cache(maxsize=1024)  # peers say theirs with every announcement
def normal(address: str) -> str:
    """An address as the book holds it; raises :class:`OperatorError` E102."""
    place = parse_address(address.removeprefix(RELAY))
    if not is_relayed(address):
        return place.hostport
    if place.peer is None or len(address) > MAX_ANNOUNCED:
        raise _bad(address[:MAX_ANNOUNCED], "it does not name a relay", "leave it out")
    return f"{RELAY}{place}"


def parse_peers(values: Iterable[str]) -> list[PeerAddress]:
    """Read ``--peers``: repeated, separated by commas or white space, or ``@file``.

    A file holds the same, ``#`` starts a comment. Doubles are left out. Raises E102.
    """
    words: list[str] = []
    for value in values:
        for word in _words(value):
            words += _read(word[1:]) if word.startswith("@") else [word]
    return list(dict.fromkeys(parse_address(word) for word in words))


def _words(text: str) -> list[str]:
    return text.replace(",", " ").split()


def _read(name: str) -> list[str]:
    path = Path(os.path.expanduser(name))
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        lines = data.decode().splitlines()
    except (OSError, ValueError) as error:
        why = f"cannot read the file: {reason(error)}"
        raise _bad(f"@{name}", why, "give a text file") from error
    return [word for line in lines for word in _words(line.partition("#")[0])]


def _split(text: str, where: str) -> tuple[str, str]:
    if where.startswith("["):
        host, closed, rest = where[1:].partition("]")
        if not closed:
            raise _bad(text, "the ] of the IPv6 address is missing", f"write [{host}]:4390")
        if not rest.startswith(":"):
            raise _bad(text, "the port is missing", f"write [{host}]:4390")
        return host, rest[1:]
    if where.count(":") > 1:
        host, _, port = where.rpartition(":")
        if not (port.isdigit() and _is_ip(host)) or "::" not in host:
            host, port = where, "4390"
        raise _bad(text, "an IPv6 address needs brackets", f"write [{host}]:{port}")
    host, colon, port = where.partition(":")
    if not colon:
        raise _bad(text, "the port is missing", f"write {host}:4390")
    return host, port


def _host(text: str, host: str) -> str:
    if not host:
        raise _bad(text, "the host before the : is missing", "write HOST:PORT")
    if len(host) > MAX_HOST:
        raise _bad(text, f"the host is longer than {MAX_HOST} characters", "use its IP address")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            raise _bad(
                text,
                f"{host} means every address of a machine; nobody can be reached there",
                "write the address under which others see that machine",
            )
        return address.compressed
    if text.startswith("[") or re.fullmatch(r"[0-9.]+", host):
        family = "IPv6" if text.startswith("[") else "IPv4"
        raise _bad(text, f"'{host}' is not an {family} address", "check the numbers")
    name = host.removesuffix(".").lower()
    if not is_host_name(host):
        raise _bad(text, f"'{host}' is not a host name", "use letters, digits, - and dots")
    return name


def is_host_name(text: str) -> bool:
    """Whether a text can be looked up as a name, or is an IPv4 address."""
    name = text.removesuffix(".")
    return len(name) <= MAX_NAME and all(_LABEL.fullmatch(label) for label in name.split("."))


def _port(text: str, host: str, port: str) -> int:
    shown = bracketed(host)
    if not port:
        raise _bad(text, "the port after the : is missing", f"write {shown}:4390")
    if not (port.isascii() and port.isdigit()):
        raise _bad(text, f"the port '{port}' is not a number", f"write {shown}:4390")
    if len(port) > 5 or not 0 < int(port) < 65536:
        why = "port 0 cannot be dialled" if not port.strip("0") else f"there is no port {port}"
        raise _bad(text, why, "use the port the peer printed, from 1 to 65535")
    return int(port)


def _multiaddress(text: str) -> OperatorError:
    why = "this is a libp2p multiaddress; Atoll writes HOST:PORT/PEERID"
    match = _MULTIADDR.fullmatch(text)
    if match is None or not match["port"]:
        return _bad(text, why, "write HOST:PORT or HOST:PORT/PEERID")
    host = f"[{match['host']}]" if match["kind"] == "ip6" else match["host"]
    peer = f"/{match['peer']}" if match["peer"] else ""
    if match["transport"] == "udp":
        why += ", and speaks TCP only"
    return _bad(text, why, f"write {host}:{match['port']}{peer}")


def _is_ip(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _peer(text: str) -> PeerId | None:
    """The peer id that ``text`` is, if it is one."""
    from protocols.identity import PeerId, public_key

    peer = PeerId(text)
    try:
        public_key(peer)
    except Malformed:
        return None
    return peer


def _bad(text: str, why: str, fix: str) -> OperatorError:
    return OperatorError("E102", f"bad address '{text}'", why, fix, exit_code=2)
