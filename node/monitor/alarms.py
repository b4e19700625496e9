"""When to call the operator: the swarm has split, an island drifts, nothing moves.

Pure: what this node knows of its peers and of its last rounds goes in, alarms come out. They are
computed anew at every look and so end by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from node.monitor.events import RoundDone
from node.monitor.views import PeerView

KEPT = 16  # of the newest rounds are looked at
DRIFT_FACTOR = 3.0  # times the usual distance to the nearest other island
DRIFT_ROUNDS = 2  # in a row
DRIFT_ISLANDS = 3  # of two nobody can say which one drifts
STALL_FACTOR = 5.0  # times the usual round
STALL_FLOOR_S = 60.0
LAG_ROUNDS = 2  # that a live island may be behind
GONE = ("suspect", "dead")  # for this node, as opposed to having said farewell

Level = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing to look at: what kind, what is seen, what to do."""

    kind: Literal["split", "silence", "drift", "stall", "lag"]
    level: Level
    what: str
    fix: str
    peers: tuple[str, ...] = ()


def raised(
    peers: Sequence[PeerView],
    rounds: Sequence[tuple[float, RoundDone]],
    now: float,
    *,
    training: bool = True,
) -> list[Alarm]:
    """The alarms of now, critical ones first; ``rounds`` with their times, oldest first."""
    found = [*_split(peers), *_silence(peers), *_drift(peers, rounds), *_lag(peers)]
    if training:
        found += _stall(rounds, now)
    return sorted(found, key=lambda alarm: alarm.level)


def _split(peers: Sequence[PeerView]) -> Iterator[Alarm]:
    """Somebody stands at our round with another state."""
    others = [peer for peer in _live(peers) if peer.agrees is False]
    if others:
        names = _names(others)
        yield Alarm(
            "split",
            "critical",
            f"The swarm has split: {names} {_have(others)} another state at the same round.",
            "Check the network between the two sides. When they meet again, the side with less "
            "merged work downloads the state of the other.",
            tuple(peer.peer for peer in others),
        )


def _silence(peers: Sequence[PeerView]) -> Iterator[Alarm]:
    """Half of the islands or more have fallen silent: from here that looks like a split."""
    gone = [peer for peer in peers if peer.role == "island" and peer.status in GONE]
    known = len(gone) + len(_live(peers))
    if gone and len(gone) * 2 >= known:
        yield Alarm(
            "silence",
            "critical",
            f"{len(gone)} of {known} islands are silent: {_names(gone)}.",
            "They are down, or the network between them and this node is cut. If they still "
            "reach each other, the swarm is split.",
            tuple(peer.peer for peer in gone),
        )


def _drift(peers: Sequence[PeerView], rounds: Sequence[tuple[float, RoundDone]]) -> Iterator[Alarm]:
    """An island was much further from all others than is usual, several rounds in a row.

    By the distance to the nearest other: one that drifts also pulls the mean, which among three
    islands is then no more than twice as far from it as from the others.
    """
    recent = [_far(done) for _, done in rounds[-DRIFT_ROUNDS:]]
    drifting = set.intersection(*recent) if len(recent) == DRIFT_ROUNDS else set()
    names = {peer.peer: peer for peer in peers}
    for peer in sorted(drifting & names.keys()):
        yield Alarm(
            "drift",
            "warning",
            f"{_name(names[peer])} drifts: before the last merges it was more than "
            f"{DRIFT_FACTOR:.0f} times as far from any other island as is usual.",
            "Look at its loss, its learning rate and its data: something differs there.",
            (peer,),
        )


def _far(done: RoundDone) -> set[str]:
    distances = {p: item["apart"] for p, item in done.islands.items() if "apart" in item}
    if len(distances) < DRIFT_ISLANDS:
        return set()
    ordered = sorted(distances.values())
    middle = (len(ordered) - 2) // 2  # of the others, whoever is left out
    far = set()
    for peer, distance in distances.items():
        usual = ordered[middle] if distance > ordered[middle] else ordered[middle + 1]
        if distance > DRIFT_FACTOR * usual:
            far.add(peer)
    return far


def _lag(peers: Sequence[PeerView]) -> Iterator[Alarm]:
    live = _live(peers)
    head = max((peer.round for peer in live), default=0)
    behind = [peer for peer in live if peer.status == "active" and head - peer.round > LAG_ROUNDS]
    if behind:
        yield Alarm(
            "lag",
            "warning",
            f"{_names(behind)} {'is' if len(behind) == 1 else 'are'} "
            f"more than {LAG_ROUNDS} rounds behind.",
            "Its work is thrown away once it is too old. Look at its network and its load.",
            tuple(peer.peer for peer in behind),
        )


def _stall(rounds: Sequence[tuple[float, RoundDone]], now: float) -> Iterator[Alarm]:
    times = [when for when, _ in rounds]
    if len(times) < 2:
        return
    usual = median(later - earlier for earlier, later in pairwise(times))
    still = now - times[-1]
    if still > max(STALL_FLOOR_S, STALL_FACTOR * usual):
        yield Alarm(
            "stall",
            "warning",
            f"No round for {still:.0f} s; one usually takes {usual:.0f} s.",
            "Islands train on meanwhile. See who is silent, and whether a quorum is there.",
        )


def _live(peers: Sequence[PeerView]) -> list[PeerView]:
    return [p for p in peers if p.role == "island" and p.status in ("joining", "active")]


def _name(peer: PeerView) -> str:
    return peer.name or "…" + peer.peer[-8:]


def _names(peers: Sequence[PeerView], shown: int = 4) -> str:
    names = ", ".join(_name(peer) for peer in peers[:shown])
    return names + (f" and {len(peers) - shown} more" if len(peers) > shown else "")


def _have(peers: Sequence[PeerView]) -> str:
    return "has" if len(peers) == 1 else "have"
