"""Through whom the bytes of a plan go, where it has groups (:mod:`gossip.grouping`). Pure."""

from __future__ import annotations

from gossip.slicing import shares
from protocols.identity import PeerId
from protocols.messages import Group, Plan


class Routes:
    """Through whom a plan's bytes go. Parts are named by their number in the plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._group = {peer: group for group in plan.groups for peer in group.members}
        self._counted = shares(plan.contributors) if plan.groups else {}

    def collected(self, number: int) -> dict[PeerId, tuple[PeerId, ...]]:
        """Whose slices each relay of a part merges, its own among them, in the plan's order.

        Only where there are two at least: a slice alone goes straight to the owner.
        """
        found = {}
        for relay, group in self._relays(number):
            members = set(group.members)
            brought = tuple(peer for peer in self._counted if peer in members)
            if len(brought) > 1:
                found[relay] = brought
        return found

    def passed_on(self, number: int) -> dict[PeerId, tuple[PeerId, ...]]:
        """To whom each relay of a part passes on what is merged."""
        here = set(self._plan.roster)
        return {
            relay: tuple(peer for peer in group.members if peer != relay and peer in here)
            for relay, group in self._relays(number)
        }

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
