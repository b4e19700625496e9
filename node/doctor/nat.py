"""What stands between this machine and its peers: an address translator (NAT), and of which kind.

What can be told from here: under which address peers see this machine; whether connections from
one local port look alike to two of them (RFC 5382, REQ-1: endpoint-independent mapping); whether
a third gets in there (REQ-3: endpoint-independent filtering); and whether this network's public
address works from inside (hairpinning, REQ-8).
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from node.doctor.finding import Finding, ok, warn
from protocols.addresses import host_of
from protocols.connections.names import Names
from protocols.errors import OperatorError
from protocols.seen import seen_from

HAIRPIN_S = 3.0
_CARRIER_NAT = ipaddress.ip_network("100.64.0.0/10")  # RFC 6598


@dataclass(frozen=True, slots=True)
class Translation:
    """What peers see of this machine. ``outer``: a host as they see it; empty: not told."""

    text: str
    translated: bool
    outer: str = ""


def describe(seen: Sequence[tuple[str, str]]) -> Translation:
    """What stands between; ``seen``: the address that a peer sees, and the machine's own."""
    if not seen:
        return Translation("cannot be told: no peer says which address it sees", False)
    outer = sorted({_host(observed) for observed, _ in seen})
    inner = sorted({own for _, own in seen})
    if set(outer) <= set(inner):
        text = f"none: peers see this machine's own address {', '.join(outer)}"
        return Translation(text, False, outer[0])
    kind = f"peers see {', '.join(outer)}, this machine is {', '.join(inner)}"
    if any(_is_carrier(own) for own in [*inner, *outer]):
        text = f"carrier-grade NAT: {kind}; a port cannot be forwarded there"
    elif len(outer) > 1:
        text = f"NAT with several outer addresses: {kind}"
    else:
        text = f"NAT with one outer address: {kind}"
    return Translation(text, True, outer[0])


@dataclass(frozen=True, slots=True)
class Mapping:
    """As what several peers saw connections from one port of this machine."""

    local_port: int
    seen: tuple[str, ...]


async def mapping(peers: Sequence[str]) -> Mapping:
    """Ask peers one after the other, from one local port.

    Those that do not answer are left out, and those that are reached by the other kind of IP
    address than the first: no translator has both.
    """
    port, seen = 0, list[str]()
    for peer in peers:
        try:
            outside, port = await seen_from(peer, port)
        except (OSError, ValueError):  # an older node, or a port just taken: it says nothing
            continue
        if not seen or (":" in host_of(outside)) == (":" in host_of(seen[0])):
            seen.append(outside)
    return Mapping(port, tuple(seen))


def mapping_finding(found: Mapping) -> Finding:
    """What the kind of mapping means for this node."""
    ports = {address.rpartition(":")[2] for address in found.seen}
    if len(found.seen) < 2:
        return ok("mapping", f"cannot be told: {len(found.seen)} of the two peers needed answer")
    if len(set(found.seen)) > 1:
        return warn(
            "mapping",
            f"endpoint-dependent: port {found.local_port} is seen as {', '.join(found.seen)}",
            "every peer sees another port, so none can be told where to dial or to meet this node",
            "nothing has to be done: a relay is used; or forward the port on the router",
        )
    kept = ports == {str(found.local_port)}
    how = "and keeps ports" if kept else f"port {found.local_port} becomes {ports.pop()}"
    return ok("mapping", f"endpoint-independent: all peers see the same address, {how}")


def filtering_finding(where: str, got_in: bool) -> Finding:
    """Whether somebody this machine has never called ``got_in`` at ``where``.

    RFC 5382, REQ-3. A port opened by a call of this machine to others was tried.
    """
    if got_in:
        return ok("filtering", f"endpoint-independent (full cone): a stranger got in at {where}")
    return ok("filtering", f"endpoint-dependent (restricted): a stranger did not get in at {where}")


async def hairpin(outside: str) -> Finding:
    """Whether nodes in this network reach this one at its public address."""
    try:
        async with asyncio.timeout(HAIRPIN_S):
            (await Names().connected(outside, "")).close()
    except OperatorError as error:  # what peers have told is no address
        return warn("hairpin", f"{outside} cannot be dialled", error.why, error.fix)
    except OSError as error:  # TimeoutError among them
        return warn(
            "hairpin",
            f"{outside} cannot be reached from inside this network",
            error.strerror or "no answer in time",
            "give nodes in this network this machine's own address with --peers",
        )
    return ok("hairpin", f"{outside} works from inside this network as well")


def _host(hostport: str) -> str:
    return host_of(hostport).removeprefix("::ffff:")


def _is_carrier(host: str) -> bool:
    try:
        return ipaddress.ip_address(host) in _CARRIER_NAT
    except ValueError:
        return False
