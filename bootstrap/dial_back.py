"""Whether others can dial a node: it asks a peer that it has greeted to try, the *dial-back*.

Without limits callers could have a node dial any address, and learn what is there. So a node dials
only the address that the caller is seen to come from, at the ports of the caller's record or one
that the caller names, or a relay that the node has reached itself, a few times a minute. It tells
only whether the caller has proven itself there: a *no* takes the same time whatever was found.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum

from protocols.addresses import (
    PeerAddress,
    host_of,
    hostport,
    ip_of,
    is_relayed,
    parse_address,
    relay_of,
    source_of,
)
from protocols.connections.names import Names
from protocols.errors import Malformed, OperatorError, RemoteRefused, TransportError
from protocols.identity import PeerId
from protocols.messages import DialBackAt
from protocols.transport import Transport
from protocols.whereabouts import Whereabouts

TIMEOUT_S = 5.0  # for all addresses that are tried, and until a "no"
MAX_TRIED = 3  # addresses
OF_ONE, ONE_EVERY_S = 16, 4.0  # dial-backs for one place: at once, then seconds for each more
OF_ALL, EVERY_S = 64, 0.25  # likewise for all
MAX_PLACES = 1024
MAX_QUESTION = 64  # bytes


class Reach(StrEnum):
    """What a dial-back has shown, as the caller sees it."""

    YES = "yes"
    NO = "nobody gets through to it there"
    ELSEWHERE = "peers see it come from another address, and dial no other"
    UNKNOWN = "no peer says"


class DialBack:
    """Answers ``reach`` for callers that are ``admitted``.

    ``observed`` tells the ``HOST:PORT`` that a caller comes from; empty where that is not seen.
    Refuses as ``stranger``, ``elsewhere`` (no address that may be dialled) and ``busy``.
    """

    def __init__(
        self,
        transport: Transport,
        whereabouts: Whereabouts,
        *,
        admitted: Callable[[PeerId], bool],
        observed: Callable[[PeerId], str],
    ) -> None:
        self._transport = transport
        self._whereabouts = whereabouts
        self._admitted = admitted
        self._observed = observed
        self._allowance = Allowance()
        self._names = Names()
        transport.on_call("reach", self._answer, max_body=MAX_QUESTION)

    async def _answer(self, peer: PeerId, body: bytes) -> bytes:
        if not self._admitted(peer):
            raise RemoteRefused("stranger", "greet this node first")
        seen = _host(self._observed(peer))
        if body:
            given = [hostport(seen, _port(body))] if seen else []
        else:
            known = self._whereabouts.get(peer)
            given = self._worth_trying(known.record.addresses if known else (), seen)
        if given:
            if not self._allowance.take(source_of(seen) if seen else "", time.monotonic()):
                raise RemoteRefused("busy", "asked too often")
            until = asyncio.get_running_loop().time() + TIMEOUT_S
            tried = await asyncio.gather(*[self._reaches(peer, one, seen) for one in given])
            if any(tried):
                return b"yes"
            if False in tried:
                await asyncio.sleep(until - asyncio.get_running_loop().time())
                return b"no"
        raise RemoteRefused("elsewhere", f"no address of yours at {seen or 'where you come from'}")

    def _worth_trying(self, addresses: Iterable[str], seen: str) -> list[str]:
        """Which of a caller's addresses are where it comes from, or may be (names)."""
        found = []
        for address in addresses:
            try:
                if is_relayed(address):
                    worth = self._meets(relay_of(address))
                else:
                    host = parse_address(address).host
                    worth = bool(seen) and _host(f"{host}:0") in (seen, "")
            except OperatorError:
                continue  # an address may be anything
            if worth:
                found.append(address)
        return found[:MAX_TRIED]

    def _meets(self, relay: PeerAddress) -> bool:
        """Whether a relay is this node, or one that it reaches there by itself."""
        if relay.peer is None or relay.peer == self._transport.peer_id:
            return relay.peer is not None
        return self._whereabouts.has_met(relay.peer, relay.hostport)

    async def _reaches(self, peer: PeerId, address: str, seen: str) -> bool | None:
        """Whether the caller answers at an address; None where that is not where it comes from."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if not is_relayed(address):
                    place = parse_address(address)
                    found = await self._names.places(place.host, place.port, peer)
                    if seen not in {str(ip_of(str(info[4][0]))) for info in found}:
                        return None
                    address = PeerAddress(seen, place.port).hostport
                return await self._transport.dial(address, peer) == peer
        except (TransportError, OSError):  # TimeoutError among them
            return False


class Allowance:
    """A limit that allows bursts, for each place and for all together (token buckets). Sans-IO."""

    def __init__(self) -> None:
        self._all = (float(OF_ALL), 0.0)  # what is left, and when that was
        self._places: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, place: str, now: float) -> bool:
        """Returns whether one was left for ``place``, and takes it."""
        everybody = _refilled(self._all, OF_ALL, EVERY_S, now)
        mine = _refilled(self._places.get(place, (OF_ONE, now)), OF_ONE, ONE_EVERY_S, now)
        if min(everybody, mine) < 1:
            return False
        self._all = (everybody - 1, now)
        self._places[place] = (mine - 1, now)
        self._places.move_to_end(place)
        if len(self._places) > MAX_PLACES:
            self._places.popitem(last=False)
        return True


def _refilled(left: tuple[float, float], most: int, every_s: float, now: float) -> float:
    count, at = left
    return min(count + (now - at) / every_s, float(most))


def _host(where: str) -> str:
    """The IP address of ``HOST:PORT``; empty where there is none."""
    try:
        return str(ip_of(host_of(where)))
    except ValueError:
        return ""


def _port(question: bytes) -> int:
    port: int = DialBackAt.decode(question).port
    if not 0 < port < 65536:
        raise Malformed(f"there is no port {port}")
    return port


async def dialled_back(transport: Transport, peer: PeerId, port: int = 0) -> Reach:
    """Ask a peer that was greeted to dial back; returns what that has shown.

    At the addresses of this node's record; with ``port``, there where the peer sees it come from.
    """
    try:
        return await asked_back(transport, peer, port)
    except TransportError:
        return Reach.UNKNOWN


async def asked_back(transport: Transport, peer: PeerId, port: int = 0) -> Reach:
    """As :func:`dialled_back`; raises TransportError where the question is not answered."""
    question = DialBackAt(port).encode() if port else b""
    try:
        reply = await transport.call(peer, "reach", question, timeout=2 * TIMEOUT_S)
    except RemoteRefused as error:
        if error.code == "elsewhere":
            return Reach.ELSEWHERE
        raise
    return Reach.YES if reply == b"yes" else Reach.NO


async def reach(transport: Transport, peers: Iterable[PeerId]) -> Reach:
    """Ask several; returns the first member of :class:`Reach` that one of them found."""
    found = set(await asyncio.gather(*[dialled_back(transport, peer) for peer in peers]))
    return next(one for one in Reach if one in found or one is Reach.UNKNOWN)


async def outside(transport: Transport, seen: Mapping[PeerId, str], port: int) -> str:
    """``HOST:PORT`` where peers get through to ``port`` of this machine, as they see it.

    So a node behind a translator learns that its port is forwarded, or all of its address is.
    ``seen``: the ``HOST:PORT`` that peers say they see it come from. Any of them may lie: it is the
    host that most of them name, and one that names it has dialled. Empty where there is none.
    """
    hosts = {peer: host for peer, where in seen.items() if (host := _host(where))}
    for host, count in Counter(hosts.values()).most_common(1):
        if 2 * count > len(hosts):
            asked = [peer for peer, one in hosts.items() if one == host]
            found = await asyncio.gather(*[dialled_back(transport, one, port) for one in asked])
            if Reach.YES in found:
                return hostport(host, port)
    return ""
