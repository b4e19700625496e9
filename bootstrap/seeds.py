"""The first contact: dial the peers that ``--peers`` names, and say why one does not answer.

All seeds are dialled at once and each failure keeps its own reason. If none answers, the peers met
before are tried (:class:`PeerCache`) where the caller allows it; if none of those does either, the
operator is told about every seed. :func:`backoff` spaces the retries.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocols.addresses import PeerAddress, parse_address
from protocols.errors import (
    IdentityMismatch,
    OperatorError,
    TransferStalled,
    TransportError,
    Unreachable,
    Why,
)
from protocols.files import replacing
from protocols.identity import PeerId
from protocols.transport import Transport

logger = logging.getLogger(__name__)

DIAL_TIMEOUT = 10.0  # seconds
PARALLEL = 16  # dials at a time
MAX_CACHED = 64
MAX_CACHE_BYTES = 64 * 1024
BACKOFF_FIRST, BACKOFF_LAST = 1.0, 60.0  # seconds

_FIX = {
    Why.DNS: "check the spelling of the host name, or use its IP address",
    Why.REFUSED: "check that the node runs there, and the port",
    Why.TIMEOUT: "check that a firewall or NAT on either side lets the port through",
    Why.NOT_ATOLL: "another program has that port; copy the join line the node printed",
    Why.TLS: "check that nothing between the two machines opens TLS connections",
    Why.RESET: "try again; if it repeats, look for a proxy or firewall in between",
    Why.NO_ADDRESS: "give its address with --peers HOST:PORT/ID",
    Why.RELAY: "wait a moment: a node behind a NAT looks for another relay by itself",
    Why.NO_FILES: "raise the limit of open files (ulimit -n), or stop what holds so many open",
    Why.SELF: "leave this node's own address out of --peers",
}


@dataclass(frozen=True, slots=True)
class Reached:
    """A seed that answered and proved who it is."""

    address: PeerAddress
    peer: PeerId
    seconds: float


@dataclass(frozen=True, slots=True)
class Unreached:
    """A seed that did not, and why."""

    address: PeerAddress
    error: TransportError


@dataclass(frozen=True, slots=True)
class Dialled:
    """What came of dialling several seeds, each list in the order they were given."""

    reached: list[Reached]
    missed: list[Unreached]


async def dial_all(
    transport: Transport,
    seeds: Sequence[PeerAddress],
    *,
    timeout: float = DIAL_TIMEOUT,
    parallel: int = PARALLEL,
) -> Dialled:
    """Dial every seed, at most ``parallel`` at a time, each within ``timeout`` seconds."""
    gate = asyncio.Semaphore(parallel)

    async def one(seed: PeerAddress) -> Reached | Unreached:
        async with gate:
            started = time.monotonic()
            try:
                async with asyncio.timeout(timeout):
                    peer = await transport.dial(seed.hostport, seed.peer)
            except TransportError as error:
                return Unreached(seed, error)
            except TimeoutError:
                return Unreached(seed, Unreachable(seed.hostport, Why.TIMEOUT, f"{timeout:g} s"))
            return Reached(seed, peer, time.monotonic() - started)

    outcomes = await asyncio.gather(*[one(seed) for seed in seeds])
    return Dialled(
        [o for o in outcomes if isinstance(o, Reached)],
        [o for o in outcomes if isinstance(o, Unreached)],
    )


async def find_peers(
    transport: Transport,
    seeds: Sequence[PeerAddress],
    cache: PeerCache | None = None,
    *,
    timeout: float = DIAL_TIMEOUT,
) -> Dialled:
    """Dial the seeds and, if none answers, the cached peers; at least one is reached.

    Otherwise raises :class:`OperatorError`: the reason of the only seed there is (E101, E103), or
    E501 with the reason of each.
    """
    started = time.monotonic()
    dialled = await dial_all(transport, seeds, timeout=timeout)
    if dialled.reached:
        return dialled
    remembered = [peer for peer in cache.load() if peer not in seeds] if cache else []
    if remembered:
        logger.info("no seed answers; trying %d peers met before", len(remembered))
        again = await dial_all(transport, remembered, timeout=timeout)
        dialled = Dialled(again.reached, dialled.missed + again.missed)
        if dialled.reached:
            return dialled
    if len(dialled.missed) == 1:
        only = dialled.missed[0]
        raise explain(only.address.hostport, only.error)
    raise nobody(dialled.missed, time.monotonic() - started)


def explain(where: str, error: TransportError) -> OperatorError:
    """E103 if another identity answered at ``where``, otherwise E101 with what to do about it."""
    if isinstance(error, IdentityMismatch):
        return OperatorError(
            "E103",
            f"another identity answers at {where}",
            _reason(error),
            "ask its operator for the current join line: a new key, another node on that port, or "
            "somebody in between",
        )
    fix = _FIX.get(error.why, "") if isinstance(error, Unreachable) else ""
    return OperatorError(
        "E101",
        f"cannot reach {where}",
        _reason(error),
        fix or "check the address, or give another peer with --peers",
    )


def nobody(missed: Sequence[Unreached], seconds: float) -> OperatorError:
    """E501: every seed on a line of its own, with its own reason."""
    reasons = "\n       ".join(f"{m.address.hostport}: {_reason(m.error)}" for m in missed)
    return OperatorError(
        "E501",
        f"no peer answered in {seconds:.0f} s",
        reasons or "no address is known",
        "check that one of them runs, or give another with --peers",
    )


def _reason(error: TransportError) -> str:
    if isinstance(error, IdentityMismatch):
        return f"expected {error.expected}, got {error.got or 'no valid identity'}"
    if isinstance(error, Unreachable):
        return error.why.value + (f" ({error.detail})" if error.detail else "")
    if isinstance(error, TransferStalled):
        return "the connection stalled"
    return str(error)


def backoff(
    rng: random.Random, first: float = BACKOFF_FIRST, last: float = BACKOFF_LAST
) -> Iterator[float]:
    """Seconds to wait before each retry: doubling, with jitter, never outside [first, last].

    The jitter keeps a swarm that lost its seed from coming back all at once.
    """
    ceiling = first
    while True:
        yield max(first, rng.uniform(ceiling / 2, ceiling))
        ceiling = min(2 * ceiling, last)


class PeerCache:
    """Peers met before, newest first, in a small JSON file that a crash cannot tear."""

    def __init__(self, path: Path, limit: int = MAX_CACHED) -> None:
        self._path = path
        self._limit = limit

    def load(self) -> list[PeerAddress]:
        """The remembered peers; an unreadable file counts as empty, a bad entry is left out."""
        try:
            with self._path.open("rb") as file:
                data = file.read(MAX_CACHE_BYTES + 1)
            entries = json.loads(data)["peers"] if len(data) <= MAX_CACHE_BYTES else []
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            logger.warning("ignoring the peer cache %s: %s", self._path, error)
            return []
        peers = []
        for entry in entries[: self._limit] if isinstance(entries, list) else []:
            try:
                peers.append(parse_address(entry))
            except (OperatorError, AttributeError):
                logger.debug("ignoring a bad entry of the peer cache")
        return peers

    def remember(self, peers: Iterable[PeerAddress]) -> None:
        """Put ``peers`` first and write the file; what no longer fits is forgotten.

        Where it cannot be written (a full disk) it stays as it was: nobody is to stop for that.
        """
        newest = list(dict.fromkeys([*peers, *self.load()]))[: self._limit]
        data = json.dumps({"peers": [str(peer) for peer in newest]}, indent=1).encode()
        try:
            self._write(data)
        except OSError as error:
            logger.warning("the peer cache %s is not written: %s", self._path, error)

    def _write(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(self._path) as file:
            file.write(data)
