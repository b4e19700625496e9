"""How far a node has come in each fragment of the model, as its announcements say it. Pure.

Every fragment has a chain of rounds of its own. An announcement speaks of fragment 0 in its own
fields and of the others in ``others``. :func:`seen_from` turns it into one that speaks only of the
fragment asked about, so whatever looks at announcements need not know about fragments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from gossip.place import Place
from protocols.identity import PeerId
from protocols.messages import Announce, Standing

_SAID = tuple(field.name for field in fields(Standing) if field.name != "active")


def fragments(announce: Announce) -> int:
    """How many fragments an announcement speaks of."""
    return 1 + len(announce.others)


def progress(announce: Announce) -> int:
    """Rounds committed, of all fragments together: which of two announcements is the newer one."""
    return announce.round + sum(standing.round for standing in announce.others)


def first_announcement(
    peer: PeerId,
    place: Place,
    *,
    version: str,
    role: str = "island",
    status: str = "active",
    incarnation: int = 1,
    addresses: tuple[str, ...] = (),
    region: str = "",
    **said: Any,
) -> Announce:
    """What a node says of itself that stands at ``place``; ``said``: further fields."""
    return Announce(
        peer, role, status, incarnation, addresses, version, region, **_where(place), **said
    )


def with_places(announce: Announce, places: Sequence[Place]) -> Announce:
    """The announcement of a node that stands at these places, one for each fragment.

    What it said of its contributions stays; fragments that it has not spoken of have none.
    """
    known = announce.others
    new = Standing(announce.status == "active", 0, b"", b"", 0)
    others = tuple(
        replace(known[index] if index < len(known) else new, **_where(place))
        for index, place in enumerate(places[1:])
    )
    return replace(announce, others=others, **_where(places[0]))


def seen_from(announce: Announce, fragment: int) -> Announce:
    """The announcement as if ``fragment`` were the only one."""
    if fragment == 0:
        return announce
    standing = announce.others[fragment - 1]
    status = announce.status
    if status != "leaving":
        status = "active" if standing.active else "joining"
    said = {name: getattr(standing, name) for name in _SAID}
    return replace(announce, status=status, others=(), **said)


def changed(announce: Announce, fragment: int, **changes: Any) -> Announce:
    """The announcement with ``changes``: to ``fragment``, or to the node if they do not concern
    one fragment alone. The status "active" or "joining" is that of one fragment.
    """
    if fragment == 0:
        return replace(announce, **changes)
    if "status" in changes:
        changes["active"] = changes.pop("status") == "active"
    mine = {name: changes.pop(name) for name in [*_SAID, "active"] if name in changes}
    others = list(announce.others)
    others[fragment - 1] = replace(others[fragment - 1], **mine)
    return replace(announce, others=tuple(others), **changes)


def _where(place: Place) -> dict[str, Any]:
    return {
        "round": place.round,
        "head": place.previous,
        "state": place.state,
        "work": place.work,
    }
