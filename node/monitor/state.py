"""The node as it stands now: what ``/api/v1/state``, ``/metrics`` and ``/healthz`` tell.

A :class:`NodeState` subscribes to the event log and keeps the newest of everything; what is a
quantity rather than an event (peers, traffic, links) it asks for when somebody looks, from the
functions in :class:`Providers`. Every list in it is bounded.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from node.monitor.alarms import KEPT as ALARM_ROUNDS
from node.monitor.alarms import Alarm, Here, raised
from node.monitor.event_log import EventLog
from node.monitor.events import (
    CheckpointSaved,
    CheckpointSkipped,
    ClockPut,
    JoinProgress,
    KnobSet,
    PeerRefused,
    Problem,
    Record,
    Rejected,
    RoundDone,
    Step,
    Stopping,
)
from node.monitor.plain import plain, table
from node.monitor.so_far import Rounds, Training
from node.monitor.views import (
    MAX_LINKS,
    KnownLinks,
    LinkView,
    MachineView,
    NodeView,
    PeerView,
    RunView,
    Traffic,
)
from node.monitor.wording import join_hint, of_scripts
from protocols.bounds import MAX_PEERS
from protocols.errors import Reason

SCHEMA = 1
KEPT_PROBLEMS = 20
STALL_S = 120.0  # without an inner step, an island that takes part is not healthy
STALL_STEPS = 20  # nor after that many times its usual step

Status = Literal["starting", "joining", "active", "leaving"]


@dataclass(slots=True)
class Providers:
    """Where quantities come from when somebody looks; called in the event loop, so be quick."""

    peers: Callable[[], Sequence[PeerView]] = tuple
    offices: Callable[[], Sequence[Sequence[str]]] = tuple  # who decides, by fragment
    # seconds of a round, here and with the others, where this node does not catch up
    narrow: Callable[[], tuple[float, float] | None] = lambda: None
    # islands that have this node's state by now, of a fragment; None: as the round itself says
    agreeing: Callable[[int], int | None] = lambda fragment: None
    traffic: Callable[[], Mapping[str, Traffic]] = dict
    links: Callable[[], Sequence[LinkView]] = tuple  # this node's own
    all_links: Callable[[], KnownLinks] = KnownLinks  # the swarm's; asks for them
    strangers: Callable[[], Mapping[str, int]] = dict  # what came to nothing, by reason
    met: Callable[[], int] = int  # connections past a relay
    accepted: Callable[[], int] = int  # connections of peers
    stalled: Callable[[], int] = int  # messages that came or went too slowly
    machine: Callable[[], MachineView] = MachineView
    reachability: Callable[[], str] = str  # "direct", "relay", "outbound only" or empty
    # seconds in which a checkpoint on its way to the second place has not moved, where it hangs
    copy_still: Callable[[], float | None] = lambda: None
    unhealthy: list[Callable[[], str]] = field(default_factory=list)  # a reason, or empty


class NodeState:
    """A subscriber of the event log that can be asked for a snapshot."""

    def __init__(
        self,
        node: NodeView,
        *,
        log: EventLog,
        run: RunView | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.node = node
        self.run = run
        self.status: Status = "starting"
        self.round = 0  # rounds that all fragments have come through; who knows sets it
        self.parameters = 0  # of the model, once it is known
        self.providers = Providers()
        self.log = log
        self.join: dict[int, JoinProgress] = {}
        self.training = Training()
        self.rounds = Rounds()
        self.rejected: Counter[str] = Counter()  # by reason
        self.refused: Counter[str] = Counter()  # by error code
        self.problems: deque[tuple[float, Problem]] = deque(maxlen=KEPT_PROBLEMS)
        self.knobs: dict[str, KnobSet] = {}  # what was chosen from measurements, the newest
        self.checkpoint: tuple[float, CheckpointSaved] | None = None
        self.skipped: CheckpointSkipped | None = None  # since the newest one
        self._clock = clock
        self._moved = clock()  # when training last moved
        self._dropped = 0  # times that its work was not finite, since some was merged
        log.subscribe(self)

    def __call__(self, record: Record) -> None:
        """Take one event in."""
        self.training.take(record)
        self.rounds.take(record)
        if isinstance(record.event, ClockPut):
            self._put(record.event.seconds)
        else:
            self._take(record)

    def _take(self, record: Record) -> None:
        match record.event:
            case Step():
                self._moved = record.time
            case RoundDone() as done:
                if "tokens" in done.islands.get(self.node.peer, {}):
                    self._dropped = 0
            case JoinProgress() as progress:
                self.join[progress.step] = progress
                self._moved = record.time
            case Rejected(reason=reason, peer=peer):
                self.rejected[reason] += 1
                self._dropped += reason == Reason.NON_FINITE and peer == self.node.peer
            case PeerRefused(code=code):
                self.refused[code] += 1
            case Problem() as problem:
                self.problems.append((record.time, problem))
            case CheckpointSaved() as saved:
                self.checkpoint, self.skipped = (record.time, saved), None
            case CheckpointSkipped() as skipped:
                self.skipped = skipped
            case KnobSet() as knob:
                self.knobs[knob.name] = knob
            case Stopping():
                self.status = "leaving"
            case _:
                pass

    def _put(self, seconds: float) -> None:
        """The clock was put right: for how long something has lasted does not change by that."""
        self._moved += seconds
        self.node = replace(self.node, started=self.node.started + seconds)
        if self.checkpoint is not None:
            when, saved = self.checkpoint
            self.checkpoint = (when + seconds, saved)

    def unhealthy(self) -> list[str]:
        """Why this node is not healthy; empty when it is."""
        reasons = [reason for probe in self.providers.unhealthy if (reason := probe())]
        reasons += [f"{p.code}: {p.what}" for _, p in self.problems if p.fatal]
        if self.status in ("starting", "joining", "leaving"):
            lacks_run = self.node.role == "seed" and self.run is None and self.status == "starting"
            waits = ": it waits for an island to bring the run" if lacks_run else ""
            reasons.append(f"it is {self.status}{waits}")
        elif self.node.role == "island":
            still = self._clock() - self._moved
            if still > max(STALL_S, STALL_STEPS * self.training.step_s):
                waits = ", it waits for its data" if self.training.awaited is not None else ""
                reasons.append(f"no inner step for {still:.0f} s{waits}")
        return reasons

    def _join_hint(self) -> list[str]:
        """What to say below the line by which others join, where few can use it."""
        return join_hint(
            self.node.join_address,
            me=self.node.peer,
            listen=self.node.listen,
            public_addr=self.node.public_addr,
            scripts=self.run is not None and of_scripts({"manifest": self.run.manifest}),
        )

    def snapshot(self) -> dict[str, Any]:
        """Everything, as JSON values; ``schema`` grows when a key changes its meaning."""
        state = self.brief()
        if self.run is not None:
            state["run"]["manifest"] = plain(self.run.manifest)
        steps = self.training.steps
        state["training"]["steps"] = [[number, plain(loss)] for number, loss in steps]
        state["rounds"]["last"] = self.rounds.plain()
        state["network"]["links"] = [table(link) for link in self.providers.links()[:MAX_LINKS]]
        return state

    def links(self) -> dict[str, Any]:
        """All links that are known between islands, and short, as there may be thousands.

        ``links``: places of source and target in ``peers``, bytes a second, seconds for a round
        trip (both may be null), and seconds since it was told, rounded up (0: measured here).
        ``left_out``: how many more are known, where there are too many.
        """
        known = self.providers.all_links()
        places: dict[str, int] = {}
        rows = [
            [
                places.setdefault(view.source, len(places)),
                places.setdefault(view.target, len(places)),
                None if view.bytes_per_second is None else round(view.bytes_per_second),
                None if view.round_trip_s is None else round(view.round_trip_s, 6),
                max(1, round(view.age_s)) if view.age_s else 0,  # 0: measured here
            ]
            for view in known.links
        ]
        found = {"peers": list(places), "links": rows}
        return found | ({"left_out": known.left_out} if known.left_out else {})

    def brief(self) -> dict[str, Any]:
        """As :meth:`snapshot` without what is long and changes little: for a live view."""
        now = self._clock()
        views = self.peers()
        reasons = self.unhealthy()
        newest = self.rounds.last_whole()
        last = newest[1] if newest is not None else None
        fragments = self.rounds.fragments
        return {
            "schema": SCHEMA,
            "time": now,
            "instance": self.log.instance,
            "status": self.status,
            "health": {"healthy": not reasons, "reasons": reasons},
            "node": table(self.node)
            | {
                "uptime_s": now - self.node.started,
                "reachability": self.providers.reachability(),
                "join_hint": self._join_hint(),
            },
            "run": None if self.run is None else _run(self.run) | {"parameters": self.parameters},
            "join": [table(self.join[step]) for step in sorted(self.join)],
            "training": self._training() | {"eta_s": _left(newest, now)},
            "rounds": {
                "committed": self.round,
                "outcomes": dict(self.rounds.outcomes),
            },
            "knobs": {name: table(knob) for name, knob in self.knobs.items()},
            "consensus": None if last is None else _consensus(last, self.agreeing(last)),
            "fragments": [
                _fragment(when, done, self.agreeing(done))
                for when, done in (fragments[n] for n in sorted(fragments))
            ],
            "alarms": [table(alarm) for alarm in self.alarms(views)],
            "peers": [table(view) for view in views],
            "network": self._network(last),
            "trust": {
                "rejected": dict(self.rejected),
                "refused": dict(self.refused),
                "strangers": dict(self.providers.strangers()),
            },
            "checkpoint": _stamped(self.checkpoint),
            "machine": table(self.providers.machine()),
            "problems": [_stamped(item) for item in self.problems],
            "events": {"newest": self._newest(), "dropped": self.log.dropped},
        }

    def peers(self) -> Sequence[PeerView]:
        """The peers now, at most :data:`MAX_PEERS`."""
        return self.providers.peers()[:MAX_PEERS]

    def agreeing(self, done: RoundDone) -> int | None:
        """Islands whose state of a fragment is equal bit for bit by now; None: each has its own.

        ``done`` is the newest round of the fragment: who was through with it first, as a seed is,
        had not heard of the others then. What it says of them stands in a replay alone.
        """
        now = None if done.agreeing is None else self.providers.agreeing(done.fragment)
        return done.agreeing if now is None else now

    def alarms(self, views: Sequence[PeerView]) -> list[Alarm]:
        """What an operator should look at, worst first."""
        training, rounds = self.training, self.rounds
        here = Here(
            training.lost_steps,
            self._dropped,
            rounds.lowest,
            tuple(rounds.validated),
            self.checkpoint[1] if self.checkpoint else None,
            self.skipped,
            self.providers.machine().disk_free,
            training.began,
            self.steps_s(),
            self.node.peer,
            self.providers.offices(),
            None if training.began is None else self._moved,
            training.step_s,
            self.providers.narrow(),
            self.providers.copy_still(),
            self.status == "leaving",
        )
        recent = list(rounds.newest)[-ALARM_ROUNDS:]
        # who trains and is never let in has no round to be late
        trains = self.status == "active" or (self.status == "joining" and not recent)
        return raised(views, recent, self._clock(), training=trains, here=here)

    def steps_s(self) -> float:
        """What the inner steps of a round take this island, seconds; 0 before it is known."""
        if self.run is None:
            return 0.0
        steps = self.run.manifest.get("rounds", {}).get("inner_steps", 0)
        return float(self.training.step_s * steps)

    def alarms_now(self) -> list[Alarm]:
        """As :meth:`alarms`, of the peers now."""
        return self.alarms(self.peers())

    def _training(self) -> dict[str, Any]:
        seen = self.training
        return {
            "step": None if seen.step is None else table(seen.step),
            "awaits": None if seen.awaited is None else table(seen.awaited),
            "tokens": seen.tokens,
            "out_of_memory": seen.out_of_memory,
            "validation_loss": self.rounds.validation_loss,
        }

    def _network(self, last: RoundDone | None) -> dict[str, Any]:
        rounds = self.rounds
        return {
            "rounds": {
                "sent_bytes": rounds.sent_bytes,
                "received_bytes": rounds.received_bytes,
                "raw_bytes": rounds.raw_bytes,
                "codec": last.codec if last is not None else "",
                "compression": rounds.raw_bytes / rounds.sent_bytes if rounds.sent_bytes else None,
            },
            "by_kind": {kind: table(item) for kind, item in self.providers.traffic().items()},
        }

    def _newest(self) -> int:
        return self.log.recent[-1].seq if self.log.recent else 0


def _run(run: RunView) -> dict[str, Any]:
    return {"id": run.id, "label": run.label, "total_rounds": run.total_rounds}


def _left(newest: tuple[float, RoundDone] | None, now: float) -> float | None:
    """Seconds until the run is over, by its newest round; a late next one delays it."""
    if newest is None:
        return None
    when, last = newest
    if last.eta_s is None:
        return None
    rounds = max(1, last.total_rounds - last.round - 1)
    return max(0.0, last.eta_s - min(max(0.0, now - when), last.eta_s / rounds))


def _consensus(last: RoundDone, agreeing: int | None) -> dict[str, Any]:
    before, after = last.consensus, last.consensus_after
    return {
        "round": last.round,
        "before": plain(before),
        "after": plain(after),
        "contraction": plain(after / before) if before and after is not None else None,
        "agreeing": agreeing,
        "members": last.members,
        "live": last.live,
    }


def _fragment(when: float, done: RoundDone, agreeing: int | None) -> dict[str, Any]:
    """Where one fragment stands: its newest round, when that was through, and whose state it has.

    ``agreeing`` of ``live`` islands have its state bit for bit; whoever came later is in neither.
    """
    return {
        "fragment": done.fragment,
        "fragments": done.fragments,
        "round": done.round,
        "time": when,
        "outcome": done.outcome,
        "members": done.members,
        "live": done.live,
        "agreeing": None if agreeing is None else min(agreeing, done.live),
        "state": done.state,
        "sync_s": plain(done.sync_s),
    }


def _stamped(item: tuple[float, Any] | None) -> dict[str, Any] | None:
    return None if item is None else table(item[1]) | {"time": item[0]}
