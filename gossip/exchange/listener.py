"""What an exchange tells whoever drives its round, and what it asks of it.

In a node that is a chain (:class:`gossip.chain.reports.Reports`), which makes events of the round
of what it is told. All of it is called on the event loop.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

from gossip.plans.validity import PartKey
from protocols.errors import RemoteProtocolError
from protocols.identity import PeerId
from protocols.messages import Gram, PartResult


class ExchangeListener(Protocol):
    """Told of what happens in an exchange; knows what only the round around it can know."""

    # --- merged parts ----------------------------------------------------------------------------

    def held(self, result: PartResult) -> None:
        """This merged part is here, or these bytes of it in place of others."""
        ...

    def lost(self, result: PartResult) -> None:
        """A part that is merged, by what a plan says, is to be had from nobody."""
        ...

    def dropped(self, key: PartKey) -> None:
        """A merged part that was here is kept no more."""
        ...

    def weighed(self, gram: Gram) -> None:
        """All slices of a draft's part are here: these are their inner products."""
        ...

    # --- peers -----------------------------------------------------------------------------------

    def fault(self, peer: PeerId, why: str) -> None:
        """An owner does not do its work, so somebody else should."""
        ...

    def declined(self, peer: PeerId, why: str) -> None:
        """An owner refuses the slice that it is to get from me."""
        ...

    def refused(self, peer: PeerId, error: RemoteProtocolError) -> None:
        """What a peer sends me is late or useless, and so may be what I have to send."""
        ...

    def unpassed(self, relay: PeerId) -> None:
        """A relay has not passed on a merged part, which had to come to me by another way."""
        ...

    def unserved(self, relay: PeerId) -> None:
        """A relay does nothing for its group: the part's owner sees that, or most members do."""
        ...

    # --- what it asks ----------------------------------------------------------------------------

    def behind(self, peer: PeerId) -> bool:
        """Whether a member has yet to come to this round."""
        ...

    def doubtful(self) -> Set[PeerId]:
        """Contributors to give up on sooner: of late nothing came of them."""
        ...

    def mute(self) -> Set[PeerId]:
        """Relays not to wait for: of late they have not passed on merged parts."""
        ...

    def needed(self) -> set[PartKey]:
        """Merged parts that have to stay, whatever the newest plan asks for."""
        ...

    def voted_for(self, result: PartResult) -> bool:
        """Whether this member has voted for these very bytes."""
        ...
