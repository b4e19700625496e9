"""Groups: members deal with a part's owner through one of them, not each by itself. Pure.

A butterfly of N members has N(N − 1) links, and every slice and every merged part crosses from
site to site once for each member. With groups a part has a *relay* in each group but its owner's:
the group's slices of the part end there and are added up, one sum goes on to the owner, and the one
merged part that comes back is passed on to the group. A round is still decided once, and what
comes out is the same weighted mean.

- **Sites** (``region``): those who declare one region are a group, so one sum and one merged part
  cross between two sites instead of one for each member.
- **Grids** (``grid``): a swarm of more than ``most`` members stands in rows and columns of about
  √N; rows are groups, and a part is relayed by whoever stands in its owner's column. A member has
  links to its row and its column alone: 30 instead of 255 in a swarm of 256, for hardly more
  bytes (each sends a sum and a merged part more, of 1/√N of the vector each).

Islands stand in groups also where servers merge, and relay for each other.

Relays add up what others sent, so rules of :mod:`gossip.plans.mix` that judge slices one by one at
the owner (``weigh``, ``column``) cannot have groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from blake3 import blake3

from gossip.plans.dividing import divided
from gossip.plans.mix import Mix
from gossip.plans.partition import MemberLink, cut, link_shares
from protocols.errors import Malformed
from protocols.identity import PeerId
from protocols.messages import Group, Part, Plan

_JOINT = b"atoll joint\x00"

Pieces = list[tuple[int, int, PeerId]]


@dataclass(frozen=True)
class Grouping:
    """How a run's swarm is grouped."""

    how: Literal["none", "region", "grid"] = "none"
    most: int = 64  # members that may all deal with each other

    @property
    def on(self) -> bool:
        """Whether there are groups at all."""
        return self.how != "none"


UNGROUPED = Grouping()


@dataclass(frozen=True)
class PartLayout:
    """Who merges what, and what goes through whom."""

    pieces: Pieces  # start, stop, owner
    groups: tuple[Group, ...] = ()


def joint_basis(basis: bytes, brought: Sequence[PeerId]) -> bytes:
    """32 bytes that name what a relay adds up: the slices of ``brought``, in order, and their sum.

    Two plans of one basis may have other groups. A mark tells members of one group apart, and a sum
    is divided by their shares, so what is made for one group is useless to the other.
    """
    return blake3(_JOINT + basis + "\n".join(brought).encode()).digest()


def may_group(mix: Mix) -> bool:
    """Whether relays can add up slices under this merge rule."""
    return mix.weigh is None and mix.column is None


def lay_out(
    size: int,
    links: Sequence[MemberLink],
    regions: Mapping[PeerId, str],
    grouping: Grouping,
    counts: Mapping[PeerId, int] | None = None,
    mute: Set[PeerId] = frozenset(),
) -> PartLayout:
    """Parts of ``[0, size)`` and groups of the members ``links``, by their declared ``regions``.

    ``counts``: into how many parts a member's share is cut (:mod:`gossip.plans.dividing`), 1
    without; more where so few merge that some of a group would have nothing to relay. The ``mute``
    relay nothing where their group has others.
    """
    counts = counts or {}
    owning = [link for link in links if link.merges]
    sets = _sets(links, regions, grouping) if grouping.on else []
    rows = [row for rows in sets for row in rows]
    if not rows or (len(rows) == 1 and len(rows[0]) == len(links)):  # all at one site
        return PartLayout(divided(cut(size, owning), counts))
    least = -(-max(map(len, rows)) // len(owning))
    counts = {link.peer: max(least, counts.get(link.peer, 1)) for link in owning}
    by_peer = {link.peer: link for link in links}
    weights = _weights(by_peer, sets, rows)
    pieces = divided(cut(size, owning, [weights[link.peer] for link in owning]), counts)
    return PartLayout(pieces, _relayed(pieces, by_peer, sets, mute))


def renewed_groups(
    groups: Sequence[Group], before: Sequence[Part], parts: Sequence[Part], able: set[PeerId]
) -> tuple[Group, ...]:
    """The groups of a plan whose parts ``before`` have become ``parts``.

    A part that has another owner now is sent and received without relays, and so is one whose
    relay is not ``able`` to. Members stay, since what they have sent so far is told by them.
    """
    return tuple(
        Group(
            group.members,
            tuple(
                relay
                if relay and old.owner == new.owner and group.members[relay - 1] in able
                else 0
                for relay, old, new in zip(group.relays, before, parts, strict=True)
            ),
        )
        for group in groups
    )


def check_groups(plan: Plan, roster: Sequence[PeerId], grouped: bool, mix: Mix) -> None:
    """Raise :class:`Malformed` unless a plan's groups can be worked by. ``roster`` is in office."""
    if not plan.groups:
        return
    if not grouped or plan.draft or not may_group(mix):
        raise Malformed("groups where the run has none")
    members = [peer for group in plan.groups for peer in group.members]
    if len(set(members)) != len(members) or not set(members) <= set(roster):
        raise Malformed("groups that overlap, or of strangers")
    for group in plan.groups:
        if len(group.relays) != len(plan.parts):
            raise Malformed("relays for other parts than there are")
        if max(group.relays, default=0) > len(group.members):
            raise Malformed("a relay outside its group")
        relays = {group.members[relay - 1] for relay in group.relays if relay}
        if not relays <= set(plan.roster):
            raise Malformed("a relay outside the roster")


def traffic(
    parts: Sequence[Part], groups: Sequence[Group], contributing: Mapping[PeerId, bool]
) -> dict[PeerId, tuple[int, int]]:
    """Elements that each member sends and receives; ``contributing`` names all members."""
    up = dict.fromkeys(contributing, 0)
    down = dict.fromkeys(contributing, 0)
    group_of = {peer: group for group in groups for peer in group.members}
    givers = {id(g): sum(contributing.get(p, False) for p in g.members) for g in groups}
    # what every member of a group sends to relays and gets from them, unless it is the relay
    relayed = {id(group): 0 for group in groups}
    own = dict.fromkeys(contributing, 0)  # of this, what a member relays itself
    straight = 0  # what everybody exchanges with owners, unless a relay does it for it
    for number, part in enumerate(parts):
        size, owner = part.stop - part.start, part.owner
        straight += size
        sends, receives = len(contributing) - 1, sum(contributing.values()) - contributing[owner]
        up[owner] -= contributing[owner] * size
        down[owner] -= size
        for group in groups:
            if not group.relays[number] or group_of.get(owner) is group:
                continue
            relay, given = group.members[group.relays[number] - 1], givers[id(group)]
            others = given - contributing[relay]
            relayed[id(group)] += size
            own[relay] += size
            up[relay] += size * (len(group.members) - 1 + bool(given))
            down[relay] += size * (others + 1)
            sends -= len(group.members) - 1
            receives -= given - bool(given)
        up[owner] += sends * size
        down[owner] += receives * size
    for peer, gives in contributing.items():
        mine = straight - own[peer]
        up[peer] += gives * mine
        down[peer] += mine
    return {peer: (up[peer], down[peer]) for peer in contributing}


def _sets(
    links: Sequence[MemberLink], regions: Mapping[PeerId, str], grouping: Grouping
) -> list[list[list[PeerId]]]:
    """Groups, in sets: those of one set are rows of one grid."""
    by_name: dict[str, list[MemberLink]] = {}
    for link in links:
        name = regions.get(link.peer, "") if grouping.how == "region" else ""
        by_name.setdefault(name, []).append(link)
    sets = []
    for name, members in sorted(by_name.items()):
        if len(members) > grouping.most:
            sets.append(_rows(members))
        elif name and len(members) > 1:
            sets.append([[link.peer for link in members]])
    return sets


def _rows(members: Sequence[MemberLink]) -> list[list[PeerId]]:
    """A grid's rows; those in one column have links of about one speed."""
    width = math.isqrt(len(members) - 1) + 1
    height = -(-len(members) // width)
    ordered = sorted(members, key=lambda link: (-link.speed, link.peer))
    return [[link.peer for link in ordered[row::height]] for row in range(height)]


def _columns(
    rows: Sequence[Sequence[PeerId]], by_peer: Mapping[PeerId, MemberLink]
) -> list[list[PeerId]]:
    """Who merges in each column of a grid; nothing where one has nobody: its relays would idle."""
    units = [
        [row[at] for row in rows if at < len(row) and by_peer[row[at]].merges]
        for at in range(len(rows[0]))
    ]
    return units if all(units) else []


def _weights(
    by_peer: Mapping[PeerId, MemberLink],
    sets: Sequence[Sequence[Sequence[PeerId]]],
    rows: Sequence[Sequence[PeerId]],
) -> dict[PeerId, float]:
    """The share of the vector that each member merges, of those who merge.

    In one grid the columns share the vector as the members of one row would, since that is what
    its relays carry, or each by itself where columns do not relay. Otherwise the sites do, as if
    each were one member with the link of its fastest: a site's members have one line to the others,
    and fast ones among themselves.
    """
    merging = [peer for peer, link in by_peer.items() if link.merges]
    if len(sets) == 1 and len(rows) > 1 and sum(map(len, rows)) == len(by_peer):
        units = _columns(rows, by_peer) or [[peer] for peer in merging]
        joined = [_as_one([by_peer[peer] for peer in unit], min) for unit in units]
    else:
        grouped = {peer for row in rows for peer in row}
        units = [[peer for peer in row if by_peer[peer].merges] for row in rows]
        units = [unit for unit in units if unit]
        units += [[peer] for peer in merging if peer not in grouped]
        joined = [_as_one([by_peer[peer] for peer in unit], max) for unit in units]
    weights = {}
    for unit, share in zip(units, link_shares(joined), strict=True):
        speeds = [by_peer[peer].speed for peer in unit]
        for peer, speed in zip(unit, speeds, strict=True):
            weights[peer] = share * speed / sum(speeds)
    return weights


def _as_one(links: Sequence[MemberLink], of: Callable[[Iterable[float]], float]) -> MemberLink:
    """One member with the slowest of these links each way, or the fastest: ``min`` or ``max``."""
    upload, download = of(k.upload for k in links), of(k.download for k in links)
    return MemberLink(links[0].peer, upload, download, any(k.contributes for k in links))


def _relayed(
    pieces: Pieces,
    by_peer: Mapping[PeerId, MemberLink],
    sets: Sequence[Sequence[Sequence[PeerId]]],
    mute: Set[PeerId],
) -> tuple[Group, ...]:
    """The groups with their relays: by columns within a grid, else by how much each carries.

    A grid in which few merge has no relays by columns, since few would relay for all.
    """
    place = {
        peer: (number, column)
        for number, rows in enumerate(sets)
        if _columns(rows, by_peer)
        for row in rows
        for column, peer in enumerate(row)
    }
    groups = []
    for number, rows in enumerate(sets):
        for row in rows:
            load, able = dict.fromkeys(row, 0), [p for p in row if p not in mute] or row
            relays = []
            for start, stop, owner in pieces:
                if owner in load:
                    relays.append(0)
                    continue
                at = place.get(owner)
                if at is not None and at[0] == number:
                    relay = row[at[1] % len(row)]
                    relay = relay if relay in able else able[at[1] % len(able)]
                else:
                    relay = min(
                        able, key=lambda p: ((load[p] + stop - start) / by_peer[p].speed, p)
                    )
                load[relay] += stop - start
                relays.append(1 + row.index(relay))
            groups.append(Group(tuple(row), tuple(relays)))
    return tuple(groups)
