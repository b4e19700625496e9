"""Exchanges in groups on a simulated network, and what is true of them."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import exchange_kit
import torch
from exchange_kit import Peer, World
from gossip_kit import leader, plan_of, roster_of

from gossip.plans.grouping import Grouping, lay_out, traffic
from gossip.plans.partition import MemberLink
from gossip.plans.validity import Shape
from protocols.identity import Identity, PeerId
from protocols.messages import Part, Plan

SIZE = 300_000
MANY = [Identity.from_seed(bytes([number, 7]) * 16) for number in range(24)]


def shape_of(codec: str = "int8", size: int = SIZE) -> Shape:
    return Shape(size, (codec,), grouped=True)


def plan_for(
    peers: list[Peer],
    shape: Shape,
    grouping: Grouping,
    sites: int,
    upload: float,
    servers: int = 0,
) -> Plan:
    """What a leader would plan for members of equal links, ``sites`` regions of equal size.

    The last ``servers`` of the roster, in no region, merge everything, where there are any.
    """
    members = [peer.identity for peer in peers]
    roster = roster_of(members)
    islands = roster[: len(roster) - servers]
    per = -(-len(islands) // sites)
    regions = {peer: f"site-{index // per}" for index, peer in enumerate(islands)}
    contributing = {peer: peer in islands for peer in roster}
    links = [
        MemberLink(peer, 1e6, 1e6, gives, merges=not servers or not gives)
        for peer, gives in contributing.items()
    ]
    layout = lay_out(shape.size, links, regions, grouping)
    parts = tuple(Part(*piece, None) for piece in layout.pieces)
    groups = layout.groups
    plan = plan_of(leader(members), members, shape=shape, parts=parts, groups=groups)
    contributors = tuple(c for c in plan.contributors if contributing[c.peer])
    plan = dataclasses.replace(plan, contributors=contributors)
    sent = max(up for up, _ in traffic(parts, groups, contributing).values())
    scale = peers[0].wiring.codec.encoded_size(0, shape.size) / shape.size
    return dataclasses.replace(plan, expected_s=sent * scale / upload)


@asynccontextmanager
async def grouped(
    count: int = 4,
    *,
    codec: str = "int8",
    how: Grouping | None = None,
    sites: int = 2,
    size: int = SIZE,
    upload: float = 1e6,
    servers: int = 0,
    **options: Any,
) -> AsyncIterator[World]:
    shape = shape_of(codec, size)
    async with exchange_kit.world(
        shape, count=count, members=MANY, upload=upload, **options
    ) as here:
        grouping = how or Grouping("region")
        here.plan = plan_for(here.peers, shape, grouping, sites, upload, servers)
        yield here


def counted(here: World, peer: Peer) -> dict[PeerId, set[int]]:
    """Elements that each contributor lacks, in every part that ``peer`` holds."""
    contributors = here.plan.contributors
    found: dict[PeerId, set[int]] = {contributor.peer: set() for contributor in contributors}
    for result, _ in peer.exchange.parts.values():
        elements = {included.contributor: included.elements for included in result.included}
        for number, contributor in enumerate(contributors):
            lacks = result.stop - result.start - elements.get(number, 0)
            found[contributor.peer].add(lacks)
    return found


def truthful(here: World, by: Peer) -> bool:
    """Whether every part that ``by`` holds is the mean of exactly what its result says."""
    plan, codec = here.plan, by.wiring.codec
    for result, data in by.exchange.parts.values():
        size = result.stop - result.start
        total, weight = torch.zeros(size), torch.zeros(size)
        for included in result.included:
            contributor = plan.contributors[included.contributor]
            values = here.of(contributor.peer).values[result.start : result.stop]
            total[: included.elements] += contributor.weight * values[: included.elements]
            weight[: included.elements] += contributor.weight
        found = torch.empty(size)
        codec.decode(result.start, data, found)
        wanted = total / weight.clamp_(min=1e-9)
        if not torch.allclose(found, wanted, rtol=1e-4, atol=1e-5):
            return False
    return True


BIG = 1_500_000  # elements: several chunks in each part
