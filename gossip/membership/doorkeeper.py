"""Who may come in: no place brings in more identities than a place may. Sans-IO.

Where a peer comes from (:mod:`gossip.membership.origin`) is looked at whoever hands its
announcement on, and again whenever it does something here, as long as only its own word for it is
known. Else a flood would come in by what one of them hands on.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Protocol

from gossip.membership.answering import MAX_KNOWN
from gossip.membership.members import MEMBERS, KnownPeer, Membership
from gossip.membership.origin import NOWHERE, is_public, on_loopback, origin, origin_of
from protocols.addresses import host_of, is_loopback, is_relayed
from protocols.errors import Crowded, RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Announce

AGAIN_S = 60.0  # before it is reported once more that a place has too many identities


class House(Protocol):
    """What a :class:`Doorkeeper` needs of the node's presence."""

    membership: Membership
    status: Announce

    def office(self) -> Collection[PeerId]: ...

    def observed(self, peer: PeerId, /) -> str: ...

    def reached(self, peer: PeerId, /) -> str: ...

    def notice(self, peer: PeerId, /) -> None: ...

    def on_rejected(self, peer: PeerId, error: RemoteProtocolError, /) -> None: ...


@dataclass
class Doorkeeper:
    """Lets peers into one node's membership."""

    house: House
    _near: bool = False  # somebody has come over this machine's own loopback
    _reported: dict[str, float] = field(default_factory=dict)  # places with too many, and when

    def admit(self, announce: Announce, now: float, *, directly: bool) -> tuple[str, bool]:
        """Where a peer comes from, and whether that was seen. Raises Crowded.

        ``directly``: the announcement has come from the peer itself.
        """
        peer = announce.peer
        known = self.house.membership.islands.get(peer)
        if known is not None and not known.surplus and (known.observed or self._decides(peer)):
            return known.origin, known.observed
        at = self._seen_at(peer, directly=directly)
        place, seen = self._place(announce, at, known, directly=directly)
        if not self._crowded(peer, place, seen, now):
            return place, seen
        if known is not None and seen:
            known.origin, known.observed, known.surplus = place, True, True
        raise self._refused(peer, place, now)

    def look_again(self, peer: PeerId, now: float) -> bool:
        """A peer does something here: whether it is one too many where it is seen now."""
        known = self.house.membership.islands.get(peer)
        if known is None or known.observed or self._decides(peer):
            return False
        at = self._seen_at(peer, directly=False)
        if not is_public(at):
            return False
        place = origin_of(at)
        crowded = self._crowded(peer, place, True, now)
        known.origin, known.observed, known.surplus = place, True, crowded
        if crowded:
            self._refused(peer, place, now)
        return crowded

    def back(self, peer: PeerId, now: float) -> bool:
        """A peer that was dead or had left is there again: whether others have its place by now."""
        known = self.house.membership.islands[peer]
        if self._decides(peer):
            return False
        known.surplus = True  # or it would be found to have its place
        known.surplus = self.house.membership.crowded(peer, known.origin, known.observed, now)
        if known.surplus:
            self._refused(peer, known.origin, now)
        return known.surplus

    def _crowded(self, peer: PeerId, place: str, seen: bool, now: float) -> bool:
        """Whether a peer is one too many from there.

        Whoever makes room for it is noticed to be gone: it is not back as if nothing had been.
        """
        membership = self.house.membership
        known = membership.islands.get(peer)
        if place and (known is None or not known.counts_at(place, seen)):
            for other in [p for p, island in membership.islands.items() if island.origin == place]:
                if not membership.there(other, now):
                    self.house.notice(other)
        return membership.crowded(peer, place, seen, now)

    def _decides(self, peer: PeerId) -> bool:
        """Whether a peer is in office: as long as it is, what it was let in by stands.

        Each node sees others from there first, so each would take others of them for dead, and no
        majority would be left.
        """
        return peer in self.house.office()

    def _place(
        self, announce: Announce, at: str, known: KnownPeer | None, *, directly: bool
    ) -> tuple[str, bool]:
        """Where it comes from, seen ``at`` some address or at none, and whether that was seen.

        Members of one machine are not limited. To all others loopback says nothing, and whoever
        names no other place is counted together with all who do not: but for those who have no
        vote, as observers need no address, for who has named a place before (its relay is gone),
        and for who calls a node that sees of nobody where it comes from, being behind a relay.
        """
        addresses, before = announce.addresses, known.origin if known is not None else ""
        here = on_loopback(addresses) and (self._near or self._shares(addresses))
        place, seen = origin(at, () if here else addresses)
        if known is not None and known.surplus and not seen:
            return known.origin, True  # until it is seen elsewhere
        hidden = directly and all(map(is_relayed, self.house.status.addresses))
        if not (place or at or here or hidden) and announce.role in MEMBERS:
            place = before or NOWHERE
        return place, seen

    def _shares(self, addresses: tuple[str, ...]) -> bool:
        """Whether these may be this machine's: this node's own are on loopback or the same place.

        That can be claimed. Who claims it and can be called is found elsewhere.
        """
        mine = self.house.status.addresses
        same = {origin_of(one) for one in mine} & {origin_of(one) for one in addresses}
        return bool(same) or any(is_loopback(host_of(one)) for one in mine)

    def _seen_at(self, peer: PeerId, *, directly: bool) -> str:
        """From which address a peer is connected, or at which it was reached; empty: not known.

        One on the internet says more than another, which may be a gateway's. The latter counts
        only where the peer has come to announce itself.
        """
        at = self.house.observed(peer)
        if is_public(at):
            return at
        if is_public(there := self.house.reached(peer)):
            return there
        for near in (at, there):
            if is_loopback(host_of(near)):
                self._near = True
                return near
        return at if directly else ""

    def _refused(self, peer: PeerId, place: str, now: float) -> Crowded:
        """Tell that a peer is one too many, but not once for each of them."""
        why = Crowded(f"{peer} is one of too many identities from {place}")
        if now - self._reported.get(place, -math.inf) > AGAIN_S:
            self._reported.pop(place, None)
            self._reported[place] = now
            if len(self._reported) > MAX_KNOWN:
                del self._reported[next(iter(self._reported))]
            self.house.on_rejected(peer, why)
        return why
