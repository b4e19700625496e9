"""When to call the operator: the swarm has split, an island drifts, nothing moves.

:func:`raised` is pure: what this node knows of its peers and of its last rounds goes in, alarms
come out. They are computed anew at every look and so end by themselves. Who looks now and then, and
says which begin and end, is :class:`node.monitor.alarm_watch.Watch`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median, median_high
from typing import Literal

from node.monitor.events import CheckpointSaved, CheckpointSkipped, RoundDone
from node.monitor.views import PeerView
from node.monitor.wording import duration, names_apart

KEPT = 64  # of the newest rounds, of all fragments, are looked at
DRIFT_FACTOR = 3.0  # times the usual distance to the nearest other island
DRIFT_ROUNDS = 3  # in a row: newcomers begin with small steps, and others trained on meanwhile
DRIFT_ISLANDS = 3  # of two nobody can say which one drifts
STALL_FACTOR = 5.0  # times the usual round
STALL_FLOOR_S = 60.0
FIRST_FLOOR_S = 600.0  # until the second round: who has just come may have to wait for a roster
HEARD_S = 30.0  # after its first inner step a node has heard of all who are there
LAG_ROUNDS = 2  # that a live island may be behind
RISEN_BY, RISEN_TO = 0.1, 1.05  # a loss has risen above both of these and the lowest one
RISEN_TIMES = 3  # in a row: a single one may be chance
LOST_STEPS = 5  # inner steps in a row whose loss is no number
DROPPED_TIMES = 2  # in a row: after the first one training begins again at a merge that was well
ROOM = 2  # checkpoints there should be room for
NAMED = 4  # peers in one line; of more it says how many
GONE = ("suspect", "dead")  # for this node, as opposed to having said farewell

Level = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Alarm:
    """One thing to look at: what kind, what is seen, what to do."""

    kind: Literal[
        "split", "silence", "office", "drift", "stall", "lag", "narrow", "loss", "checkpoint"
    ]
    level: Level
    what: str
    fix: str
    peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Here:
    """What alarms need to know of this node itself."""

    lost: int = 0  # inner steps in a row whose loss or gradient is no number
    dropped: int = 0  # times that its work was not finite, since some was merged
    lowest: tuple[int, float] | None = None  # validation loss so far, and in which round
    validated: Sequence[float] = ()  # the newest validation losses, of rounds however far apart
    saved: CheckpointSaved | None = None  # the newest
    skipped: CheckpointSkipped | None = None  # since then
    disk_free: int | None = None  # bytes
    began: float | None = None  # when it took its first inner step, Unix seconds
    steps_s: float = 0.0  # what the inner steps of a round take, seconds
    me: str = ""
    offices: Sequence[Sequence[str]] = ()  # who decides on the next round, by fragment
    stepped: float | None = None  # when it took its newest inner step, Unix seconds
    step_s: float = 0.0  # what that took
    narrow: tuple[float, float] | None = None  # seconds of a round, here and with the others
    copy_still: float | None = None  # seconds that the copy of a checkpoint has hung
    leaves: bool = False


def raised(
    peers: Sequence[PeerView],
    rounds: Sequence[tuple[float, RoundDone]],
    now: float,
    *,
    training: bool = True,
    here: Here | None = None,
) -> list[Alarm]:
    """The alarms of now, critical ones first; ``rounds`` with their times, oldest first."""
    names = names_apart({peer.peer: peer.name for peer in peers})
    peers = [replace(peer, name=names.get(peer.peer, "")) for peer in peers]
    found = [*_split(peers), *_silence(peers), *_drift(peers, rounds), *_lag(peers)]
    if here is not None:
        found += [*_office(peers, here, now), *_narrow(here), *_loss(here), *_checkpoint(here)]
        found += _copy(here)
    if training:
        found += _stall(rounds, now, here)
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


def _office(peers: Sequence[PeerView], here: Here, now: float) -> Iterator[Alarm]:
    """No member in office is there, and this node is not in office: no round can come.

    Survivors in office go on alone; a node that was never taken in, or was put out, cannot.
    """
    if here.began is None or now < here.began + HEARD_S:
        return
    there = {peer.peer for peer in peers if peer.status in ("joining", "active")}
    for fragment, office in enumerate(here.offices):
        if not office or here.me in office or there.intersection(office):
            continue
        known = {peer.peer: peer for peer in peers}
        missing = [known.get(peer, PeerView(peer=peer)) for peer in office]
        rounds = f"rounds of fragment {fragment}" if len(here.offices) > 1 else "rounds"
        yield Alarm(
            "office",
            "critical",
            f"Nobody is there who decides on {rounds}: {_names(missing)}.",
            "Start one of them again, on its state directory: it takes the others in. If none can "
            "be had, make a new run with --init-from and a model that is exported here.",
            tuple(office),
        )


def _drift(peers: Sequence[PeerView], rounds: Sequence[tuple[float, RoundDone]]) -> Iterator[Alarm]:
    """An island was much further from all others than is usual, several rounds in a row.

    By the distance to the nearest other: one that drifts also pulls the mean, which among three
    islands is then no more than twice as far from it as from the others.
    """
    newest = rounds[-1][1].fragment if rounds else 0  # where fragments take turns: the same one's
    same = [done for _, done in rounds if done.fragment == newest]
    recent = [_far(done) for done in same[-DRIFT_ROUNDS:]]
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
    if all(peer.agrees is None for peer in live):
        return  # in gossip each counts rounds of its own, and whoever is quick is ahead of all
    active = [peer for peer in live if peer.status == "active"]
    usual = median_high(peer.round for peer in active or live)  # one alone may claim anything
    behind = [peer for peer in active if usual - peer.round > LAG_ROUNDS]
    if behind:
        yield Alarm(
            "lag",
            "warning",
            f"{_names(behind)} {'is' if len(behind) == 1 else 'are'} "
            f"more than {LAG_ROUNDS} rounds behind.",
            "Its work is lost once nobody keeps the rounds it lacks. "
            "Look at its network and its load.",
            tuple(peer.peer for peer in behind),
        )


def _narrow(here: Here) -> Iterator[Alarm]:
    """This node downloads the state time and again, and is as far behind each time."""
    if here.narrow is not None:
        mine, others = here.narrow
        yield Alarm(
            "narrow",
            "warning",
            f"This node does not catch up: a round takes {_seconds(mine)} to fetch, and the others "
            f"make one in {_seconds(others)}.",
            "They wait for it once they have saved up the time. Give it a wider link, or them more "
            "--max-upload; a run with longer rounds (rounds.inner_steps) or a coarser codec asks "
            "for less.",
        )


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 10.0 else f"{seconds:.0f} s"


def _stall(
    rounds: Sequence[tuple[float, RoundDone]], now: float, here: Here | None
) -> Iterator[Alarm]:
    """No round for much longer than usual; before one is known, than a round's inner steps take.

    Rounds that are only repeated come as fast as they can be had, so none of them is usual.
    """
    gaps = [
        later - earlier
        for (earlier, before), (later, done) in pairwise(rounds)
        if not (before.repeated or done.repeated)
    ]
    if gaps:
        last, usual, floor = rounds[-1][0], median(gaps), STALL_FLOOR_S
        measure = f"one usually takes {usual:.0f} s"
    elif here is not None and here.began is not None:
        last = max([here.began, *(when for when, _ in rounds)])
        usual, floor = here.steps_s, FIRST_FLOOR_S
        measure = f"the inner steps of one take {usual:.0f} s"
    else:
        return
    still = now - last
    if still > max(floor, STALL_FACTOR * usual):
        yield Alarm(
            "stall",
            "warning",
            f"No round for {still:.0f} s; {measure}.",
            f"{_training(now, here)} See who is silent, and whether a quorum is there.",
        )


def _training(now: float, here: Here | None) -> str:
    """Whether it goes on where no round comes; a script that hangs keeps its node from merging."""
    if here is not None and here.stepped is not None:
        still = now - here.stepped
        if still > max(STALL_FLOOR_S, STALL_FACTOR * here.step_s):
            return (
                f"This island has taken no inner step for {still:.0f} s: see whether its trainer, "
                "or the script that has joined, is stuck."
            )
    return "Islands train on meanwhile."


def _loss(here: Here) -> Iterator[Alarm]:
    """The loss is no number, or was clearly lower before."""
    if here.lost >= LOST_STEPS:
        yield Alarm(
            "loss",
            "critical",
            f"The training loss of this island is no number in its last {LOST_STEPS} steps.",
            "Nothing of it is sent. Look at its data; if other islands have it too, the run's "
            "learning rate is too high.",
        )
    elif here.dropped >= DROPPED_TIMES:
        yield Alarm(
            "loss",
            "critical",
            f"What this island has learnt was not finite {here.dropped} times in a row.",
            "Nothing of it is sent: it went back to the last merge each time. A parameter grows "
            "without bound, though the loss may not show it: lower the learning rate that it has.",
        )
    last = here.validated[-RISEN_TIMES:]
    if here.lowest is None or len(last) < RISEN_TIMES:
        return
    when, low = here.lowest
    if min(last) > max(low + RISEN_BY, low * RISEN_TO):
        yield Alarm(
            "loss",
            "warning",
            f"The validation loss rises: {last[-1]:.3f} now, {low:.3f} after round {when}.",
            "Look for islands that drift, and at the learning rate. To go back, take the best "
            f"checkpoint that is kept{_best(here)} with node export --best, and make a new run "
            "of it with --init-from.",
        )


def _best(here: Here) -> str:
    return f", {here.saved.best}," if here.saved is not None and here.saved.best else ""


def _checkpoint(here: Here) -> Iterator[Alarm]:
    """The last checkpoint could not be written, or the next ones will have no room."""
    goes_on, again = "It trains on.", "It trains on, and tries again. Mend what is named."
    room = "Free disk space, lower --keep-checkpoints, or give another --dir."
    if here.leaves:
        goes_on, again = "It leaves, and tries again for a while.", "It leaves. Mend what is named."
        room = "Free disk space now."
    fix = f"{goes_on} {room}"
    if here.skipped is not None:
        full = "E402" in here.skipped.reason
        newest = f" The newest is of round {here.saved.round}." if here.saved is not None else ""
        yield Alarm(
            "checkpoint",
            "critical",
            f"The checkpoint of round {here.skipped.round} was skipped: {here.skipped.reason}."
            + newest,  # a skip is said once, and the run goes on
            fix if full else again,
        )
    elif here.saved is not None and here.disk_free is not None:
        size = here.saved.bytes
        if here.disk_free < ROOM * size:
            yield Alarm(
                "checkpoint",
                "warning",
                f"{here.disk_free / 1e6:,.0f} MB are free on disk, and a checkpoint takes "
                f"{size / 1e6:,.0f} MB: soon none can be written.",
                fix,
            )


def _copy(here: Here) -> Iterator[Alarm]:
    """A checkpoint on its way to the second place does not move."""
    if here.copy_still is not None:
        what = f"Nothing of a checkpoint's copy has moved for {duration(here.copy_still)}."
        yield Alarm("checkpoint", "warning", what, "Look at the place of --checkpoint-copy.")


def _live(peers: Sequence[PeerView]) -> list[PeerView]:
    return [p for p in peers if p.role == "island" and p.status in ("joining", "active")]


def _name(peer: PeerView) -> str:
    return peer.name or "…" + peer.peer[-8:]


def _names(peers: Sequence[PeerView]) -> str:
    names = ", ".join(_name(peer) for peer in peers[:NAMED])
    return names + (f" and {len(peers) - NAMED} more" if len(peers) > NAMED else "")


def _have(peers: Sequence[PeerView]) -> str:
    return "has" if len(peers) == 1 else "have"
