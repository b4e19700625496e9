"""Through whom the bytes of a plan go, where it has groups (:mod:`gossip.grouping`). Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gossip.slicing import shares
from protocols.identity import PeerId
from protocols.messages import Group, Plan


@dataclass(frozen=True)
class Paths:
    """What goes through relays of one part, as its owner sees it."""

    # whose slices each relay merges, its own among them, in the plan's order
    collected: Mapping[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)
    # to whom each passes on what is merged
    passed_on: Mapping[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)

    @cached_property
    def relayed(self) -> set[PeerId]:
        """Who gets the part from a relay."""
        return {peer for peers in self.passed_on.values() for peer in peers}


STRAIGHT = Paths()


class Routes:
    """Through whom a plan's bytes go. Parts are named by their number in the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._group = {peer: group for group in plan.groups for peer in group.members}
        self._counted = shares(plan.contributors) if plan.groups else {}

    def paths(self, number: int) -> Paths:
        """The relays of a part.

        Slices are collected where there are two at least: one alone goes straight to the owner.
        """
        here = set(self._plan.roster)
        collected, passed_on = {}, {}
        for relay, group in self._relays(number):
            members = set(group.members)
            brought = tuple(peer for peer in self._counted if peer in members)
            if len(brought) > 1:
                collected[relay] = brought
            passed_on[relay] = tuple(p for p in group.members if p != relay and p in here)
        return Paths(collected, passed_on)

    def relay_of(self, peer: PeerId, number: int) -> PeerId | None:
        """Who relays a part for a member, which may be itself; None: it deals with the owner."""
        group = self._group.get(peer)
        owner = self._plan.parts[number].owner
        if group is None or not group.relays[number] or owner in group.members:
            return None
        return group.members[group.relays[number] - 1]

    def _relays(self, number: int) -> list[tuple[PeerId, Group]]:
        owner = self._plan.parts[number].owner
        return [
            (group.members[group.relays[number] - 1], group)
            for group in self._plan.groups
            if group.relays[number] and self._group.get(owner) is not group
        ]
