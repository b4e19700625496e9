"""One part whose slices come to this member, with all that is kept about it meanwhile.

:mod:`gossip.exchange.owning` keeps those that the member merges for everybody,
:mod:`gossip.exchange.relaying` those that it adds up for its group.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gossip.exchange.merging import PartMerge
from gossip.exchange.routing import STRAIGHT, Paths
from gossip.plans.validity import PartKey
from protocols.identity import PeerId
from protocols.messages import Gram, Plan, TransferHeader


@dataclass
class CollectedPart:
    """One part as an owner or a relay collects it; the fields from ``drafted`` on are an owner's.

    ``key`` names the part as if it were this member's own, also where it only relays it.
    """

    key: PartKey
    header: TransferHeader
    plan: Plan
    merge: PartMerge
    paths: Paths = STRAIGHT
    overseers: list[asyncio.Task[None]] = field(default_factory=list)
    sending: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)
    drafted: bool = False  # for a draft: nothing of it is merged before its plan is there
    asked: set[PeerId] = field(default_factory=set)  # who wants it from me and from no relay
    gram: Gram | None = None  # of a draft's part, once all slices are in
