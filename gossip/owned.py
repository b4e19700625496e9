"""One part that a member merges, with all that :mod:`gossip.owning` keeps about it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from gossip.merging import PartMerge
from gossip.routing import STRAIGHT, Paths
from gossip.validity import PartKey
from protocols.identity import PeerId
from protocols.messages import Gram, Plan, Transfer


@dataclass
class OwnedPart:
    """One part that this member merges."""

    key: PartKey
    header: Transfer
    plan: Plan
    merge: PartMerge
    paths: Paths = STRAIGHT
    judging: bool = False  # for a draft: nothing of it is merged before its plan is there
    asked: set[PeerId] = field(default_factory=set)  # who wants it from me and from no relay
    overseers: list[asyncio.Task[None]] = field(default_factory=list)
    gram: Gram | None = None  # of a draft's part, once all slices are in
    sending: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)
