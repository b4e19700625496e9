"""Where an identity comes from, so that a flood of identities from one place can be limited. Pure.

Keys cost nothing, addresses do. An identity's *origin* is the address from which it connects or at
which it was reached, if there has been such a connection, else the first address that it announces
and that stands for a place. The latter is a claim: others call there, so whoever claims a foreign
address is found dead, or elsewhere. An IPv6 customer has a whole network of addresses, so there the
/56 counts. Machines are not limited on their own loopback. :mod:`gossip.membership.doorkeeper` goes
by all this.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

from protocols.addresses import RELAY, host_of, ip_of, is_loopback, source_of

NOWHERE = "no place that is known"  # no host's name: all who name none are counted under it


@lru_cache(maxsize=4096)
def origin_of(address: str) -> str:
    """What stands for the place of ``HOST:PORT``, or of a relay's address; empty: no place."""
    host = host_of(address.removeprefix(RELAY).split("/")[0]).lower()
    try:
        ip = ip_of(host)
    except ValueError:
        return "" if host == "localhost" else host
    return "" if ip.is_loopback or ip.is_unspecified else source_of(host)


def origin(observed: str, addresses: Sequence[str]) -> tuple[str, bool]:
    """Where the peer announcing ``addresses`` comes from, and whether that was seen, not claimed.

    ``observed`` is what its connection comes from, empty where it has none. A private address may
    be a gateway's, through which everybody comes: then it is the claim that counts.
    """
    seen, claim = origin_of(observed), next(filter(None, map(origin_of, addresses)), "")
    if seen and (not claim or is_public(observed)):
        return seen, True
    return claim, False


def is_public(observed: str) -> bool:
    """Whether a connection comes from the internet, and not through a gateway, as it may be."""
    place = origin_of(observed)
    return bool(place) and ipaddress.ip_network(place).is_global


def on_loopback(addresses: Sequence[str]) -> bool:
    """Whether the first of these is one that only their own machine can reach."""
    return bool(addresses) and is_loopback(host_of(addresses[0]))
