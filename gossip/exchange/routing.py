"""The way that the bytes of a plan take where it has groups (:mod:`gossip.plans.grouping`). Pure.

Who relays which part for whom. Without groups everything goes straight to the owner.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from gossip.exchange.slicing import shares
from gossip.plans.certificate import basis_of
from gossip.plans.grouping import joint_basis
from protocols.identity import PeerId
from protocols.messages import Plan


@dataclass(frozen=True)
class Paths:
    """What goes through relays of one part, as its owner sees it."""

    # whose slices each relay merges, its own among them, in the plan's order
    collected: Mapping[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)
    # to whom each passes on what is merged
    passed_on: Mapping[PeerId, tuple[PeerId, ...]] = field(default_factory=dict)
    joint: frozenset[bytes] = frozenset()  # what the sums are named by

    @cached_property
    def relayed(self) -> set[PeerId]:
        """Who gets the part from a relay."""
        return {peer for peers in self.passed_on.values() for peer in peers}


STRAIGHT = Paths()


class Errand(NamedTuple):
    """What a relay does for its group, the same for all the parts that it relays."""

    brought: tuple[PeerId, ...]  # whose slices it merges; none: it collects none
    passed_on: tuple[PeerId, ...]  # who gets the merged part
    joint: bytes  # what slices and sum are named by (:func:`~gossip.plans.grouping.joint_basis`)


class Routes:
    """Through whom a plan's bytes go. Parts are named by their number in the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._group = {peer: group for group in plan.groups for peer in group.members}
        counted = shares(plan.contributors) if plan.groups else {}
        here = set(plan.roster)
        # of each group, which is the same for all its parts: who brings slices, who gets parts
        self._bring = [
            tuple(peer for peer in counted if peer in members)
            for members in (set(group.members) for group in plan.groups)
        ]
        self._get = [tuple(p for p in group.members if p in here) for group in plan.groups]
        basis = basis_of(plan.codec, plan.contributors) if plan.groups else b""
        self._joint = [joint_basis(basis, brought) for brought in self._bring]

    @property
    def joint(self) -> frozenset[bytes]:
        """What all that goes to relays and comes of them is named by, in place of the basis."""
        return frozenset(self._joint)

    def paths(self, number: int) -> Paths:
        """The relays of a part.

        Slices are collected where there are two at least: one alone goes straight to the owner.
        """
        collected, passed_on, joint = {}, {}, set()
        for relay, at in self._relays(number):
            if len(self._bring[at]) > 1:
                collected[relay] = self._bring[at]
                joint.add(self._joint[at])
            passed_on[relay] = tuple(peer for peer in self._get[at] if peer != relay)
        return Paths(collected, passed_on, frozenset(joint))

    def relay_of(self, peer: PeerId, number: int) -> PeerId | None:
        """Who relays a part for a member, which may be itself; None: it deals with the owner."""
        group = self._group.get(peer)
        owner = self._plan.parts[number].owner
        if group is None or not group.relays[number] or owner in group.members:
            return None
        return group.members[group.relays[number] - 1]

    def through(self, relay: PeerId) -> Errand:
        """What a relay does: the same as in :meth:`paths`, without looking at all groups."""
        at = self._plan.groups.index(self._group[relay])
        bring = self._bring[at] if len(self._bring[at]) > 1 else ()
        passed_on = tuple(peer for peer in self._get[at] if peer != relay)
        return Errand(bring, passed_on, self._joint[at])

    def _relays(self, number: int) -> list[tuple[PeerId, int]]:
        """The relays of a part and the numbers of their groups."""
        owner = self._plan.parts[number].owner
        return [
            (group.members[group.relays[number] - 1], at)
            for at, group in enumerate(self._plan.groups)
            if group.relays[number] and self._group.get(owner) is not group
        ]
