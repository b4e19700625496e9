"""What happens on a node, as typed events. Its log is :mod:`node.monitor.event_log`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from node.monitor.plain import table
from protocols.errors import OperatorError, Reason

if TYPE_CHECKING:
    from protocols.messages import Announce


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events; ``kind`` is its name in the log."""

    kind: ClassVar[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The daemon is up: what the start-up block shows."""

    kind: ClassVar[str] = "started"
    peer: str
    run: str  # label, tiny-docs-8c41; empty: not known yet
    version: str
    role: str = "island"
    device: str = ""
    identity_new: bool = False
    listen: str = ""
    public_addr: str = ""  # what the operator has said others reach it at
    api: str = ""  # HOST:PORT
    dashboard: str = ""  # HOST:PORT of the dashboard's own listener, where there is one
    join_address: str = ""  # HOST:PORT/ID for others; empty: not known
    invitation_needed: bool = False
    scripts: bool = False  # islands of the run train with scripts of their own
    own_text: bool = False  # each island of the run has to bring text
    total_rounds: int = 0  # of the run; 0: not known


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinProgress(Event):
    """One of the six steps of joining: dial, checks, reach, discover, sync, train."""

    kind: ClassVar[str] = "join"
    step: int  # 1 to 6
    name: str
    text: str
    ok: bool = True
    sources: Mapping[str, int] = field(default_factory=dict)  # of "sync": peer -> bytes it gave


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Event):
    """An inner step. Loss in nats a token; None where it was not finite or not measured."""

    kind: ClassVar[str] = "step"
    step: int
    round: int
    loss: float | None
    grad_norm: float | None = None
    lr: float = 0.0
    tokens: int = 0  # of this step
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    mfu: float | None = None  # model FLOPs utilisation, 0 to 1
    peers: int = 0  # live islands, this one included
    data_s: float | None = None  # of the seconds: until the batch was there
    micro_batch: int | None = None  # sequences that a rank took at once
    finite: bool = True  # loss and gradient were, as far as they are known


@dataclass(frozen=True, slots=True, kw_only=True)
class DataAwaited(Event):
    """The trainer waits for the data of its next inner step, until :class:`DataCame`."""

    kind: ClassVar[str] = "data_awaited"
    step: int
    since: float  # Unix seconds
    ranks: Sequence[int]  # that do not have theirs yet


@dataclass(frozen=True, slots=True, kw_only=True)
class DataCame(Event):
    """The data that the trainer has waited for are here."""

    kind: ClassVar[str] = "data_came"
    step: int
    seconds: float  # that it has waited


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation(Event):
    """The loss on the shared evaluation shard outside of a round, as before the first one."""

    kind: ClassVar[str] = "validation"
    round: int
    step: int
    validation_loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundDone(Event):
    """A round ended in a certificate. ``degraded``: with parts empty or members dropped."""

    kind: ClassVar[str] = "round"
    round: int
    outcome: Literal["committed", "degraded"] = "committed"
    total_rounds: int = 0
    fragment: int = 0
    fragments: int = 1  # that the model is merged in
    members: int = 0  # whose work was merged
    live: int = 0  # islands alive
    loss: float | None = None
    validation_loss: float | None = None
    tokens: int = 0  # merged from all members
    sync_s: float = 0.0  # from the snapshot to the application of the merge
    wait_s: float = 0.0  # the trainer stood still
    utilisation: float | None = None  # share of the round's time spent in inner steps, 0 to 1
    sent_bytes: int = 0
    received_bytes: int = 0
    raw_bytes: int = 0  # the elements that were sent, as often as they were, in fp32
    codec: str = ""  # in which it was sent
    codec_before: str = ""  # that of the round before, where it was another
    consensus: float | None = None  # relative distance to the mean before the merge
    consensus_after: float | None = None
    # islands whose state is equal bit for bit, as far as they had said so; None: each has its own
    agreeing: int | None = 0
    state: str = ""  # digest of the outer state after this round, hex
    eta_s: float | None = None  # until total_rounds
    dropped: Mapping[str, str] = field(default_factory=dict)  # peer -> why
    # seconds by phase: compute, ready (until the last contributor was), match (until the plan
    # came), exchange (until every part was here), certify, apply
    phases: Mapping[str, float] = field(default_factory=dict)
    # by peer, where known: its training "loss"; "ready_s", seconds from the first one that was
    # ready until it was; "tokens" of its that were merged; "scale", what the merge rule made of its
    # share (1: all of it); and before the merge its "distance" to the mean and to the nearest
    # other island ("apart"), relative to the norm of the mean
    islands: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    repeated: bool = False  # the others had made it before: says nothing of how long one takes


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundFailed(Event):
    """An attempt at a round that this node worked in came to nothing; nobody stepped.

    Mostly another plan takes its place, and the round is committed after all.
    """

    kind: ClassVar[str] = "round_failed"
    round: int
    reason: str
    fragment: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged(Event):
    """An exchange of parameters with a partner, in a run of gossip."""

    kind: ClassVar[str] = "exchanged"
    round: int  # this island's own count
    exchange: int  # of the round, from 0
    partner: str  # with whom it was opened; empty: there was nobody, or others had opened one
    # "mixed" with the partner's answer, "open": it has yet to come, "answered" others' openings,
    # "lost": the partner is not to be reached, "alone", "sent" one way (push-sum)
    outcome: str
    seconds: float
    sent_bytes: int = 0
    received_bytes: int = 0
    others: Sequence[str] = ()  # whose letters were mixed in, beside the partner's
    difference: float | None = None  # RMS of the two islands' parameters
    fragment: int = 0
    codec: str = ""  # of this island's letter; empty: it has sent none


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangesChosen(Event):
    """Consensus control has chosen another number of exchanges, and from what."""

    kind: ClassVar[str] = "exchanges"
    round: int  # from which on
    exchanges: int
    before: int
    distance: float  # mean square distance of islands to their mean, an element
    progress: float  # mean square of what the inner steps of a round moved, an element
    bound: float  # none is added up to bound · progress + max(0, bound − 1) · lost
    lost: float  # mean square of what the codec of this island's letters loses, an element
    fragment: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Behind(Event):
    """This node missed rounds, and has to download the state."""

    kind: ClassVar[str] = "behind"
    round: int  # its own
    head: int  # the swarm's
    action: Literal["download"]
    reason: str = ""  # why the rounds that it missed are not replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerJoined(Event):
    """A peer was heard of for the first time, or again."""

    kind: ClassVar[str] = "peer_joined"
    peer: str
    name: str = ""
    role: str = "island"
    region: str = ""
    version: str = ""

    @classmethod
    def of(cls, said: Announce) -> PeerJoined:
        """As it announces itself."""
        return cls(
            peer=said.peer,
            name=said.name,
            role=said.role,
            region=said.region,
            version=said.version,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLeft(Event):
    """A peer said goodbye, or was silent for too long."""

    kind: ClassVar[str] = "peer_left"
    peer: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSuspected(Event):
    """A peer does not deliver."""

    kind: ClassVar[str] = "peer_suspected"
    peer: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused(Event):
    """A peer was not let in; ``code`` is one of the table of errors."""

    kind: ClassVar[str] = "peer_refused"
    peer: str
    code: str
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected(Event):
    """A record, message or tensor of a peer was thrown away."""

    kind: ClassVar[str] = "rejected"
    peer: str
    reason: Reason
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete on disk."""

    kind: ClassVar[str] = "checkpoint"
    round: int
    path: str
    bytes: int = 0
    seconds: float = 0.0
    best: str = ""  # name of the one with the lowest validation loss that is there by now


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointSkipped(Event):
    """A checkpoint could not be written; training goes on."""

    kind: ClassVar[str] = "checkpoint_skipped"
    round: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Event):
    """An operator's error; ``fatal`` ends the node."""

    kind: ClassVar[str] = "problem"
    code: str
    what: str
    why: str
    fix: str
    fatal: bool = False

    @classmethod
    def of(cls, error: OperatorError, *, fix: str = "", fatal: bool = False) -> Problem:
        """An error as an event; ``fix`` if it is another than the error's own."""
        return cls(
            code=error.code, what=error.what, why=error.why, fix=fix or error.fix, fatal=fatal
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmRaised(Event):
    """An alarm has begun (:mod:`node.monitor.alarms`), or is of more peers now."""

    kind: ClassVar[str] = "alarm"
    alarm: str  # its kind: split, silence, …, see node.monitor.alarms
    level: str  # critical or warning
    what: str
    fix: str
    peers: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmEnded(Event):
    """No alarm of this kind stands any more."""

    kind: ClassVar[str] = "alarm_ended"
    alarm: str
    peers: Sequence[str] = ()  # of the last such alarm
    forgotten: Sequence[str] = ()  # of these: silent for so long that they are known no more


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobSet(Event):
    """A setting that follows from measurements has been chosen anew."""

    kind: ClassVar[str] = "knob"
    # "inner_steps" of the swarm (of this island where islands meet in pairs), "own_inner_steps" of
    # this island beside them, "tau", or "codec" (a name)
    name: str
    value: int | str
    before: int | str | None  # None: for the first time
    inputs: Mapping[str, float]
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockPut(Event):
    """This node's clock was wrong, and was put right: earlier events have the time of before."""

    kind: ClassVar[str] = "clock"
    seconds: float  # forward; below 0: back
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Event):
    """Anything else worth a line."""

    kind: ClassVar[str] = "notice"
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Event):
    """The node leaves."""

    kind: ClassVar[str] = "stopping"
    reason: str


@dataclass(frozen=True, slots=True)
class Record:
    """An event with its number and time (seconds since the Unix epoch)."""

    seq: int  # from 1
    time: float
    event: Event

    def plain(self) -> dict[str, Any]:
        """As JSON values: ``{"seq", "time", "kind", …fields}``; bounded, NaN as null."""
        head = {"seq": self.seq, "time": round(self.time, 3), "kind": self.event.kind}
        return head | table(self.event)

    def line(self) -> str:
        """One JSON line, without its end."""
        return json.dumps(self.plain(), ensure_ascii=True, allow_nan=False)
