"""Where others can reach this machine, as far as it can tell by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

from node.config import NodeConfig
from node.hosts.interface import ipv4_interfaces
from protocols.addresses import address_towards, host_of, hostport, ip_of, is_loopback

if TYPE_CHECKING:
    from node.entry.outbound import Outbound
    from protocols.http.transport import HttpTransport
    from protocols.whereabouts import Whereabouts

MAX_SEEN = 3  # addresses of its own by which this machine gets to peers
INTERNET = "192.0.2.1"  # TEST-NET-1 (RFC 5737): nobody's, and routed as all that is far away
INTERNET_6 = "2001:db8::1"  # likewise (RFC 3849)


def outward_address(towards: str = INTERNET) -> str:
    """The address of the interface that leads to ``towards``, by default to the internet.

    Where none does, or it is a name, that which leads to the internet; in a closed network any
    that is not loopback; loopback where there is no other. Nothing is sent and no name asked for.
    """
    for place in dict.fromkeys((towards, INTERNET)):
        with contextlib.suppress(OSError):
            return address_towards(place)
    outward = (str(own) for _, own in ipv4_interfaces() if not own.is_loopback)
    return next(outward, "127.0.0.1")


class OwnPlace:
    """Where others find one node: at its own address, or at its relay where it has none.

    ``told``: whoever else has to hear when that changes.
    """

    def __init__(
        self,
        config: NodeConfig,
        transport: HttpTransport,
        outbound: Outbound,
        whereabouts: Whereabouts,
    ) -> None:
        self._config = config
        self._transport = transport
        self._outbound = outbound
        self._whereabouts = whereabouts
        self._seen: tuple[str, ...] = ()  # ``HOST:PORT`` by which it gets to peers
        self.outside = ""  # ``HOST:PORT`` where a translator lets peers in, as they have shown
        self._said: list[str] = []  # where it is called, as its record says
        self._told: list[str] = []  # and as all others were told last
        self.mapped: Callable[[], str] = str  # where a router forwards to this node
        self.map_again: Callable[[], Awaitable[object]] = _nothing  # has it forward to here
        self.told: Callable[[], None] = lambda: None
        outbound.moved = self.publish
        transport.relays.mine = self.dialled_at

    @property
    def port(self) -> int:
        """Really bound; 0 without one."""
        bound = self._transport.listening
        return 0 if bound is None else bound[1]

    def listening(self) -> str:
        """``HOST:PORT`` really bound."""
        bound = self._transport.listening
        return "" if bound is None else hostport(*bound)

    def addresses(self) -> list[str]:
        """Where others may call this node, best first."""
        if self._outbound.needed:
            return [address] if (address := self._outbound.address) else []
        return self.dialled_at()

    def dialled_at(self) -> list[str]:
        """Where this node itself can be dialled, without a relay."""
        if self._outbound.needed:
            return []
        own = addresses(self._config, self._transport.listening, self._seen)
        return list(dict.fromkeys(one for one in (self.mapped(), self.outside, *own) if one))

    def join_address(self) -> str:
        """What others join by: this node, or its relay where nobody can dial it."""
        if self._outbound.needed:
            return str(self._outbound.relay or "")
        found = self.addresses()
        return f"{found[0]}/{self._transport.peer_id}" if found else ""

    @property
    def moved(self) -> bool:
        """Whether this node itself is dialled elsewhere than others know.

        Not where only loopback is left: then this machine has no network at the moment.
        """
        if self._outbound.needed:
            return False
        found = self.addresses()
        return found != self._said and not all(is_loopback(host_of(one)) for one in found)

    def seen(self, ends: Iterable[str]) -> bool:
        """Hear from which ``HOST:PORT`` of its own this node gets to peers.

        Returns whether it is called elsewhere, for that or by now, which they are to be told.
        """
        known: dict[str, str] = {}
        for one in (*self._seen, *ends):  # which peers are asked does not change the order
            if host := _own(one):
                known.setdefault(host, one)
        self._seen = tuple(known.values())
        if moved := self.moved:
            self.publish()
        return moved

    def pass_by(self, outside: str) -> None:
        """Hear where a translator lets peers in; empty where none does, or there is none."""
        self.outside = "" if _own(outside) else outside
        if self.moved:
            self.publish()

    def publish(self) -> None:
        """Say where this node is called from now on."""
        relay = self._outbound.relay if self._outbound.needed else None
        self._said = self.addresses()
        self._whereabouts.publish(self._said, relay.peer or "" if relay else "")
        if self._said != self._told:
            self._told = self._said
            self.told()


async def _nothing() -> None:
    """Where no router forwards."""


def addresses(
    config: NodeConfig, bound: tuple[str, int] | None, seen: Iterable[str] = ()
) -> list[str]:
    """Where others may dial a node that listens at ``bound``, best first.

    ``seen``: the ``HOST:PORT`` of its own by which it gets to peers. Over a VPN that is not the
    address that leads to the internet. What peers say that they see is not asked: a translator may
    have made something else of it, and it could be anything.
    """
    if config.public_addr:
        return [config.public_addr]
    if bound is None:
        return []
    host, port = bound
    if host not in ("0.0.0.0", "::"):
        return [hostport(host, port)]
    own = [one for one in map(_own, seen) if one and (":" not in one or host == "::")]
    hosts = [*own[:MAX_SEEN], *_far_ends(host == "::")]
    return list(dict.fromkeys(hostport(one, port) for one in hosts))


def _far_ends(ipv6: bool) -> list[str]:
    """The addresses that lead to the internet; loopback only where there is no other."""
    found = [outward_address()]
    if ipv6:
        with contextlib.suppress(OSError):
            found.append(address_towards(INTERNET_6))
    return [one for one in found if not is_loopback(one)] or found[:1]


def _own(end: str) -> str:
    """The IP address of ``HOST:PORT`` if it is one of this machine's (still); else empty."""
    try:
        host = str(ip_of(host_of(end)))
    except ValueError:  # there is none: the connection has ended
        return ""
    return host if outward_address(host) == host else ""  # the way to itself is by itself
