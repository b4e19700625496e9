"""The book of addresses known per peer, best first.

Identity comes first and addresses are hints: the book may hold wrong or hostile ones, since the
transport proves who answers before it says a word. It is bounded per peer and in total, and
orders the addresses of a peer by what happened when they were tried. What a third peer claims comes
last, and takes no other's place.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from protocols.addresses import PeerAddress, is_relayed, normal, parse_address
from protocols.errors import OperatorError
from protocols.identity import PeerId
from protocols.messages import PeerRecord
from protocols.tasks import Together

MAX_PER_PEER = 8
MAX_KNOWN_PEERS = 4096

Resolver = Callable[[PeerId], Awaitable[None]]


@dataclass(slots=True)
class _Entry:
    address: str
    listed: bool = False  # in the peer's newest record
    good: float | None = None  # when it last worked
    bad: float | None = None  # when it last failed, since it last worked
    claimed_by: PeerId | None = None  # a third peer, and nobody else has said so
    hearsay: bool = False  # only third peers ever have, whether or not it has worked since

    def order(self) -> tuple[int, float, bool]:
        """Smaller is dialled first: newest success, untried, longest ago failed; claims last."""
        if self.claimed_by is not None:
            return (3, self.bad or 0.0, True)
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
        max_peers: int = MAX_KNOWN_PEERS,
        max_per_peer: int = MAX_PER_PEER,
    ) -> None:
        self.resolver = resolver
        self._now = now
        self._max_peers = max_peers
        self._max_per_peer = max_per_peer
        self._known: dict[PeerId, _Known] = {}  # least recently used first
        self._resolving: Together[PeerId, None] = Together()

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

    def has_worked(self, peer: PeerId, address: str) -> bool:
        """Whether ``peer`` proved itself at ``address`` and has not failed there since."""
        known = self._known.get(peer)
        entry = known.entry(address) if known else None
        return entry is not None and entry.good is not None and entry.bad is None

    def is_hearsay(self, peer: PeerId, address: str) -> bool:
        """Whether neither ``peer`` nor this node's user has named this address, as far as is known.

        It may be a third peer's that leads on to ``peer``, which proves itself there all the same.
        """
        known = self._known.get(peer)
        entry = known.entry(address) if known else None
        return entry is None or entry.hearsay

    def add(self, peer: PeerId, address: str, *, claimed_by: PeerId | None = None) -> None:
        """Remember an address of ``peer``; raises :class:`OperatorError` E102.

        ``claimed_by``: a third peer that says so, on whose word nothing else is to depend. Its last
        claim is kept.
        """
        place, known = normal(address), self._touch(peer)
        if claimed_by is not None and known.entry(place) is None:
            known.entries = [e for e in known.entries if e.claimed_by != claimed_by]
        self._insert(known, place, claimed_by=claimed_by)

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
            entry = _Entry(address, hearsay=True)  # who named it is forgotten
            known.entries.append(entry)
        entry.good, entry.bad, entry.claimed_by = self._now(), None, None
        self._trim(known)

    def failed(self, peer: PeerId, address: str) -> None:
        """``peer`` could not be reached at ``address``, or somebody else answered."""
        known = self._known.get(peer)
        entry = known.entry(address) if known else None
        if entry is not None:
            entry.bad = self._now()

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

    def _insert(
        self,
        known: _Known,
        address: str,
        *,
        listed: bool = False,
        claimed_by: PeerId | None = None,
    ) -> None:
        entry = known.entry(address)
        if entry is None:
            hearsay = claimed_by is not None
            known.entries.append(_Entry(address, listed, claimed_by=claimed_by, hearsay=hearsay))
            self._trim(known)
            return
        entry.listed = entry.listed or listed
        if claimed_by is None:
            entry.claimed_by, entry.hearsay = None, False

    def _trim(self, known: _Known) -> None:
        if len(known.entries) > self._max_per_peer:
            known.entries = sorted(known.entries, key=_Entry.order)[: self._max_per_peer]


def _lenient(address: str) -> str | None:
    with contextlib.suppress(OperatorError):
        return normal(address)
    return None
