"""Which states others announce, and which of them is worth having."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from gossip.catchup.following import is_further
from gossip.membership.standing import seen_from
from gossip.place import Place
from protocols.identity import PeerId
from protocols.messages import Announce


@dataclass(frozen=True)
class Target:
    """A state that several peers stand at."""

    round: int
    head: bytes | None  # None: the sources moved on and told only their state's digest
    state: bytes
    work: int
    sources: tuple[PeerId, ...]


def targets(announces: Iterable[Announce]) -> list[Target]:
    """The states announced, the heaviest first; of one place in the chain the one most peers hold.

    Of two sides of a fork with equal work the first is the one that the other side will come over
    to (:func:`gossip.plans.certificate.heavier`), however many peers are on either.
    Peers that are joining count where no active one holds the same state: they may have been
    restarted at the round that most had reached, while the active ones are behind. At round 0 they
    count only if there is nobody else, as after a restart of the whole swarm.
    """
    holders: dict[tuple[int, int, bytes, bytes], list[Announce]] = defaultdict(list)
    known = [a for a in announces if a.state]
    for a in [a for a in known if a.status == "active" or a.round > 0] or known:
        if a.status != "leaving":
            holders[a.work, a.round, a.head, a.state].append(a)
    active = {key: [a for a in those if a.status == "active"] for key, those in holders.items()}
    order = sorted(holders, key=lambda key: (*key[:3], len(active[key]), len(holders[key])))
    return [
        Target(*key[1:], key[0], tuple(sorted(a.peer for a in active[key] or holders[key])))
        for key in reversed(order)
    ]


def beyond(here: Callable[[], Place], fragment: int) -> Callable[[Announce], bool]:
    """Which states a member that cannot replay wants, of those that others announce.

    Joining peers count: they may have just started again, and be the only ones that are further.
    """

    def wanted(announce: Announce) -> bool:
        said = seen_from(announce, fragment)
        place = here()
        there = replace(
            place, round=said.round, previous=said.head, state=said.state, work=said.work
        )
        return is_beyond(place, there)

    return wanted


def after(round_: int, fragment: int) -> Callable[[Announce], bool]:
    """Which states an island in pairs wants that has one of ``round_`` already."""
    return lambda announce: seen_from(announce, fragment).round > round_


def is_beyond(here: Place, there: Place) -> bool:
    """Whether a member at ``here`` wants the state at ``there``: neither its own nor an older."""
    if there.previous == here.previous:
        return there.state != here.state
    return is_further(here, there.round, there.previous, there.work)
