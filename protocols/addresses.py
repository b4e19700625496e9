"""Where peers live: parsing ``HOST:PORT[/PEERID]``, and the book of addresses known per peer.

A peer that nobody can dial is called at ``relay/HOST:PORT/PEERID``, the address of its relay
(:mod:`protocols.relay_client`); announcements and the book hold such addresses as well.

Identity comes first and addresses are hints: the book may hold wrong or hostile ones, since the
transport proves who answers before it says a word. It is bounded per peer and in total, and
orders the addresses of a peer by what happened when they were tried.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from protocols.errors import Malformed, OperatorError
from protocols.identity import PeerId, public_key
from protocols.messages import PeerRecord
from protocols.tasks import Together

MAX_HOST = 120  # so that HOST:PORT fits an Address on the wire
MAX_FILE_BYTES = 1024 * 1024  # of an @file
MAX_PER_PEER = 8
RELAY = "relay/"
MAX_ANNOUNCED = 128  # characters of an Address on the wire
MAX_PEERS = 4096

Resolver = Callable[[PeerId], Awaitable[None]]

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
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

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
    hostport, slash, peer = text.partition("/")
    if not slash and _is_peer(hostport):
        raise _bad(text, "this is a peer id without an address", f"write HOST:PORT/{text}")
    host, port = _split(text, hostport)
    address = PeerAddress(_host(text, host), _port(text, host, port))
    if not slash:
        return address
    if not _is_peer(peer):
        raise _bad(
            text,
            f"'{peer}' after the / is not a peer id" if peer else "nothing follows the /",
            f"copy the whole line the peer printed, or leave it out: {address}",
        )
    return PeerAddress(address.host, address.port, PeerId(peer))


def is_relayed(address: str) -> bool:
    """Whether an address is that of a peer's relay and not its own."""
    return address.startswith(RELAY)


def relay_address(where: str, relay: PeerId) -> str:
    """How those are called who wait at ``relay``; raises :class:`OperatorError` E102."""
    return _normal(f"{RELAY}{parse_address(where).hostport}/{relay}")


def relay_of(address: str) -> PeerAddress:
    """The relay of an address that :func:`is_relayed`; raises :class:`OperatorError` E102."""
    return parse_address(address.removeprefix(RELAY))


@lru_cache(maxsize=1024)  # peers say theirs with every announcement
def _normal(address: str) -> str:
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
    path = Path(name).expanduser()
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
        if len(data) > MAX_FILE_BYTES:
            raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
        lines = data.decode().splitlines()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _bad(f"@{name}", f"cannot read the file: {reason}", "give a text file") from error
    return [word for line in lines for word in _words(line.partition("#")[0])]


def _split(text: str, hostport: str) -> tuple[str, str]:
    if hostport.startswith("["):
        host, closed, rest = hostport[1:].partition("]")
        if not closed:
            raise _bad(text, "the ] of the IPv6 address is missing", f"write [{host}]:4390")
        if not rest.startswith(":"):
            raise _bad(text, "the port is missing", f"write [{host}]:4390")
        return host, rest[1:]
    if hostport.count(":") > 1:
        host, _, port = hostport.rpartition(":")
        if not (port.isdigit() and _is_ip(host)) or "::" not in host:
            host, port = hostport, "4390"
        raise _bad(text, "an IPv6 address needs brackets", f"write [{host}]:{port}")
    host, colon, port = hostport.partition(":")
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
    if not all(_LABEL.fullmatch(label) for label in name.split(".")):
        raise _bad(text, f"'{host}' is not a host name", "use letters, digits, - and dots")
    return name


def _port(text: str, host: str, port: str) -> int:
    shown = f"[{host}]" if ":" in host else host
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


def _is_peer(text: str) -> bool:
    try:
        public_key(PeerId(text))
    except Malformed:
        return False
    return True


def _bad(text: str, why: str, fix: str) -> OperatorError:
    return OperatorError("E102", f"bad address '{text}'", why, fix, exit_code=2)


# --- the book ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Entry:
    address: str
    listed: bool = False  # in the peer's newest record
    good: float | None = None  # when it last worked
    bad: float | None = None  # when it last failed, since it last worked

    def order(self) -> tuple[int, float, bool]:
        """Smaller is dialled first: newest success, untried, longest ago failed."""
        if self.bad is not None:
            return (2, self.bad, not self.listed)
        if self.good is not None:
            return (0, -self.good, not self.listed)
        return (1, 0.0, not self.listed)


@dataclass(slots=True)
class _Known:
    entries: list[_Entry]
    sequence: int = -1

    def entry(self, address: str) -> _Entry | None:
        return next((e for e in self.entries if e.address == address), None)


class AddressBook:
    """Addresses by peer, best first, fed by signed records and by what dialling showed.

    ``resolver`` is called when no address of a peer is known or all failed; it may call
    :meth:`add` or :meth:`add_record`. ``now`` is a clock in seconds.
    """

    def __init__(
        self,
        *,
        resolver: Resolver | None = None,
        now: Callable[[], float] = time.monotonic,
        max_peers: int = MAX_PEERS,
        max_per_peer: int = MAX_PER_PEER,
    ) -> None:
        self.resolver = resolver
        self._now = now
        self._max_peers = max_peers
        self._max_per_peer = max_per_peer
        self._known: dict[PeerId, _Known] = {}  # least recently used first
        self._resolving: Together[PeerId, None] = Together()

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, peer: object) -> bool:
        return peer in self._known

    def peers(self) -> list[PeerId]:
        """All peers with at least one address."""
        return [peer for peer, known in self._known.items() if known.entries]

    def addresses(self, peer: PeerId) -> list[str]:
        """``HOST:PORT`` of a peer, or its relay's, in the order they should be tried."""
        known = self._known.get(peer)
        return [] if known is None else [e.address for e in sorted(known.entries, key=_Entry.order)]

    def dialled_at(self, peer: PeerId) -> PeerAddress | None:
        """The best address of ``peer`` that is not its relay's; None where none is known."""
        places = (parse_address(a) for a in self.addresses(peer) if not is_relayed(a))
        return next((PeerAddress(p.host, p.port, peer) for p in places), None)

    def add(self, peer: PeerId, address: str) -> None:
        """Remember an address somebody claims for ``peer``; raises :class:`OperatorError` E102."""
        self._insert(self._touch(peer), _normal(address))

    def add_record(self, record: PeerRecord, sequence: int) -> bool:
        """Take a peer's own record, already verified, if it is newer than the last one.

        Addresses that left the record are forgotten, unless one has worked: that one moves
        behind the new ones. Addresses that do not parse are left out.
        """
        known = self._touch(record.peer)
        if sequence <= known.sequence:
            return False
        known.sequence = sequence
        listed = [a for a in map(_lenient, record.addresses) if a is not None]
        if set(listed) != {e.address for e in known.entries if e.listed}:
            known.entries = [e for e in known.entries if e.good or e.address in listed]
            for entry in known.entries:
                entry.listed = entry.address in listed
                if not entry.listed:
                    entry.good = None
            for address in listed:
                self._insert(known, address, listed=True)
        return True

    def succeeded(self, peer: PeerId, address: str) -> None:
        """``peer`` proved itself at ``address``."""
        known = self._touch(peer)
        entry = known.entry(address)
        if entry is None:
            entry = _Entry(address)
            known.entries.append(entry)
        entry.good, entry.bad = self._now(), None
        self._trim(known)

    def failed(self, peer: PeerId, address: str) -> None:
        """``peer`` could not be reached at ``address``, or somebody else answered."""
        known = self._known.get(peer)
        entry = known.entry(address) if known else None
        if entry is not None:
            entry.bad = self._now()

    def forget(self, peer: PeerId) -> None:
        """Drop everything known of a peer."""
        self._known.pop(peer, None)

    async def resolve(self, peer: PeerId) -> bool:
        """Ask the resolver for addresses of ``peer``, once for all who ask at the same time.

        False if there is no resolver.
        """
        if self.resolver is None:
            return False
        resolver = self.resolver
        await self._resolving.do(peer, lambda: resolver(peer))
        return True

    def _touch(self, peer: PeerId) -> _Known:
        known = self._known.pop(peer, None) or _Known([])
        self._known[peer] = known
        if len(self._known) > self._max_peers:
            del self._known[self._least_worth(peer)]
        return known

    def _least_worth(self, keep: PeerId) -> PeerId:
        """A peer that never worked if there is one, so that strangers cannot flush friends."""
        others = (peer for peer in self._known if peer != keep)
        first = next(others)
        if not any(e.good for e in self._known[first].entries):
            return first
        return next((p for p in others if not any(e.good for e in self._known[p].entries)), first)

    def _insert(self, known: _Known, address: str, *, listed: bool = False) -> None:
        entry = known.entry(address)
        if entry is None:
            known.entries.append(_Entry(address, listed))
            self._trim(known)
        elif listed:
            entry.listed = True

    def _trim(self, known: _Known) -> None:
        if len(known.entries) > self._max_per_peer:
            known.entries = sorted(known.entries, key=_Entry.order)[: self._max_per_peer]


def _lenient(address: str) -> str | None:
    with contextlib.suppress(OperatorError):
        return _normal(address)
    return None
