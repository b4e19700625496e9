"""The log a person reads on the terminal, made from events.

One line a round, one line a step but not more than one a second, and the start-up block. Texts
that came from peers lose their control characters, so that nobody writes into a terminal that
is not theirs. Nobody waits for whoever reads: see :mod:`node.monitor.printing`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import singledispatch
from signal import Signals
from typing import TextIO
from urllib.parse import quote

from node.headway import counted
from node.monitor.alarms import NAMED
from node.monitor.events import (
    AlarmEnded,
    AlarmRaised,
    Behind,
    CheckpointSaved,
    CheckpointSkipped,
    ClockPut,
    DataAwaited,
    DataCame,
    Event,
    ExchangesChosen,
    JoinProgress,
    KnobSet,
    Notice,
    PeerJoined,
    PeerLeft,
    PeerRefused,
    PeerSuspected,
    Problem,
    Record,
    RoundDone,
    RoundFailed,
    Started,
    Step,
    Stopping,
    Validation,
)
from node.monitor.printing import Printer
from node.monitor.wording import (
    JOIN_STEPS,
    clean,
    duration,
    join_hint,
    join_line,
    megabytes,
    number,
    short,
)
from protocols.bounds import ENDLESS_ROUNDS

STEP_INTERVAL_S = 1.0
END_S = 3.0  # that the last lines of a node may take where nobody reads them
AT_ONCE_S = 0.2  # the same of one that ends at once
_INDENT = "   "


class Console:
    """A subscriber of :class:`~node.monitor.event_log.EventLog` that writes lines to ``out``."""

    def __init__(
        self,
        out: TextIO,
        *,
        as_json: bool = False,
        dashboard_key: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``dashboard_key`` stands in the dashboard's address on the terminal, never in a log.

        What ``out`` holds is written first; from then on it is written to by its descriptor. One
        without a descriptor, in memory, takes each line at once.
        """
        self._out = out
        self._key = dashboard_key
        self._json = as_json
        self._clock = clock
        self._last_step = float("-inf")
        self._closed = False
        self._printer: Printer | None = None
        with suppress(OSError, ValueError):
            out.flush()
        with suppress(OSError, ValueError):  # it is in memory
            self._printer = Printer(out.fileno(), self._missing)

    def __call__(self, record: Record) -> None:
        """Write the record's lines, if it has any."""
        if isinstance(record.event, Step) and not self._json:
            now = self._clock()
            if now - self._last_step < STEP_INTERVAL_S:
                return
            self._last_step = now
        text = self._text(record)
        if not text or self._closed:
            return
        if self._printer is not None:
            self._printer.put(record, self._encoded(text))
            return
        try:
            self._out.write(self._encoded(text).decode(self._out.encoding or "utf-8"))
            self._out.flush()
        except (OSError, ValueError):  # it is gone; training is not its business
            self._closed = True

    def finish(self, seconds: float = END_S) -> None:
        """Write what has not been read yet, for at most ``seconds``, and nothing from then on."""
        if self._printer is not None:
            self._printer.finish(seconds)

    def _text(self, record: Record) -> str:
        text = record.line() if self._json else render(record.event, self._key)
        return text and text + "\n"

    def _encoded(self, text: str) -> bytes:
        """In Latin-1, say, what it has no sign for becomes a "?"."""
        return text.encode(self._out.encoding or "utf-8", "replace")

    def _missing(self, count: int, last: Record) -> bytes:
        """What stands where lines were left out."""
        text = f"{count:,} lines are missing here: they were not read in time, or not written"
        return self._encoded(self._text(replace(last, event=Notice(text=text))))


def render(event: Event, key: str = "") -> str:
    """The line or lines of one event; empty for one that a terminal does not show.

    ``key``: the dashboard's, which stands in its address for others.
    """
    return _started(event, key) if isinstance(event, Started) else _line(event)


@singledispatch
def _line(event: Event) -> str:
    """That of an event's own kind, below; most kinds are not shown."""
    return ""


# --- training -------------------------------------------------------------------------------------


@_line.register
def step_line(event: Step) -> str:
    """``step: 12 loss: 2.10 grad_norm: 0.9 tps: 14,021 mfu: - peers: 4``."""
    mfu = "-" if event.mfu is None else f"{event.mfu:.1%}"
    norm = "-" if event.grad_norm is None else f"{event.grad_norm:.2g}"
    return (
        f"step: {event.step} loss: {number(event.loss)} grad_norm: {norm} "
        f"tps: {event.tokens_per_second:,.0f} mfu: {mfu} peers: {event.peers}"
    )


@_line.register
def round_line(event: RoundDone) -> str:
    """``round 129 loss 2.31 5/6 peers sync 0.9 s util 93% sent 0.29 MB … ETA 38m``."""
    parts = [f"round {event.round}"]
    if event.fragments > 1:
        parts.append(f"fragment {event.fragment + 1}/{event.fragments}")
    if event.live and not (event.members or event.dropped):
        parts.append(f"merges nothing: it lets in who is there, {event.live} islands")
        return " ".join(parts)
    if event.outcome != "committed":
        parts.append(event.outcome)
    parts.append(f"loss {number(event.loss)}")
    if event.validation_loss is not None:
        parts.append(f"val {number(event.validation_loss)}")
    parts.append(f"{event.members}/{event.live} peers sync {event.sync_s:.1f} s")
    if event.utilisation is not None:
        parts.append(f"util {event.utilisation:.0%}")
    parts.append(f"sent {megabytes(event.sent_bytes)}")
    if event.codec_before:
        parts.append(f"codec {clean(event.codec_before)} -> {clean(event.codec)}")
    if event.consensus is not None:
        parts.append(f"consensus {event.consensus:.3f}")
    if event.eta_s is not None:
        parts.append(f"ETA {duration(event.eta_s)}")
    line = " ".join(parts)
    for peer, why in list(event.dropped.items())[:8]:
        line += f"\n{_INDENT}without {_who(peer)}{_because(why)}"
    return line


@_line.register
def _validation(event: Validation) -> str:
    if event.validation_loss is None:  # a script that has none
        return ""
    return f"round {event.round} not begun, validation loss {number(event.validation_loss)}"


@_line.register
def _round_failed(event: RoundFailed) -> str:
    return f"an attempt at round {event.round} failed: {clean(event.reason)}"


@_line.register
def _behind(event: Behind) -> str:
    missed = event.head - event.round
    why = f" ({clean(event.reason)})" if event.reason else ""
    return f"behind by {missed} round{'s' * (missed != 1)}: downloads the state{why}"


@_line.register
def _data_awaited(event: DataAwaited) -> str:
    who = f"rank {', '.join(map(str, event.ranks[:NAMED]))}"
    who += ", …" if len(event.ranks) > NAMED else ""
    return f"step {event.step} waits for its data: {who} has none yet"


@_line.register
def _data_came(event: DataCame) -> str:
    return f"step {event.step} has its data, after {event.seconds:.0f} s"


@_line.register
def _knob_set(event: KnobSet) -> str:
    was = "" if event.before is None else f", was {event.before}"
    inputs = ", ".join(f"{name} {value:.3g}" for name, value in event.inputs.items())
    given = f" ({inputs})" if inputs else ""
    return f"{event.name} is {event.value}{was}: {clean(event.why)}{given}"


@_line.register
def _exchanges_chosen(event: ExchangesChosen) -> str:
    beyond = max(0.0, event.distance - max(0.0, event.bound - 1) * event.lost)
    far = "-" if not event.progress else f"{beyond / event.progress:.2f}"
    return (
        f"{event.exchanges} exchanges a round from round {event.round} on, was "
        f"{event.before}: beyond what the codec loses islands disagree by {far} of what a "
        f"round moves them (bound {event.bound:g})"
    )


@_line.register
def _checkpoint_saved(event: CheckpointSaved) -> str:
    took = f"{megabytes(event.bytes)} in {event.seconds:.1f} s"
    return f"checkpoint of round {event.round}: {took}, {clean(event.path)}"


@_line.register
def _checkpoint_skipped(event: CheckpointSkipped) -> str:
    return f"checkpoint of round {event.round} skipped{_because(event.reason)}"


# --- peers ----------------------------------------------------------------------------------------


@_line.register
def _peer_joined(event: PeerJoined) -> str:
    where = f" in {clean(event.region)}" if event.region else ""
    who = _who(event.peer, event.name)
    what = f"{clean(event.role)}, atoll {clean(event.version) or '?'}"
    return f"peer {who} joined{where} ({what})"


@_line.register
def _peer_left(event: PeerLeft) -> str:
    return f"peer {_who(event.peer)} left{_because(event.reason)}"


@_line.register
def _peer_suspected(event: PeerSuspected) -> str:
    return f"peer {_who(event.peer)} does not deliver{_because(event.reason)}"


@_line.register
def _peer_refused(event: PeerRefused) -> str:
    return f"peer {_who(event.peer)} refused, {clean(event.code)}{_because(event.reason)}"


def _who(peer: str, name: str = "") -> str:
    return f"{clean(name, 48)} ({short(peer)})" if name else short(peer)


def _because(reason: str) -> str:
    return f": {clean(reason)}" if reason else ""


# --- this node ------------------------------------------------------------------------------------


@_line.register
def _join_progress(event: JoinProgress) -> str:
    mark = "" if event.ok else "! "
    name = clean(event.name)
    return f"{_INDENT}[{event.step}/{JOIN_STEPS}] {name:<8} {mark}{clean(event.text)}"


@_line.register
def _problem(event: Problem) -> str:
    word = "error" if event.fatal else "warning"
    return (
        f"{word} {event.code}: {clean(event.what, lines=True)}\n"
        f"  why: {clean(event.why, lines=True)}\n  fix: {clean(event.fix, lines=True)}"
    )


@_line.register
def _alarm_raised(event: AlarmRaised) -> str:
    word = "ALARM" if event.level == "critical" else "alarm"
    return f"{word} {event.alarm}: {clean(event.what)}\n  fix: {clean(event.fix)}"


@_line.register
def _alarm_ended(event: AlarmEnded) -> str:
    gone = event.forgotten
    who = ", ".join(map(short, gone[:NAMED])) + (", …" if len(gone) > NAMED else "")
    more = f"; not back, but forgotten after long silence: {who}" if gone else ""
    return f"alarm {event.alarm} has ended{more}"


@_line.register
def _clock_put(event: ClockPut) -> str:
    return clean(event.text)


@_line.register
def _notice(event: Notice) -> str:
    return clean(event.text)


@_line.register
def _stopping(event: Stopping) -> str:
    more = "again" if event.reason in Signals.__members__ else "twice"
    return f"leaving: {clean(event.reason)} (Ctrl-C {more} stops now)"


def _started(event: Started, key: str) -> str:
    identity = f"identity {event.peer} ({'new, saved' if event.identity_new else 'saved'})"
    about = [identity, f"run {event.run}" if event.run else "", event.role]
    if event.role == "island":
        about[-1] = event.device
    lines = [_INDENT + " · ".join(part for part in about if part)]
    if event.api:
        lines.append(f"{_INDENT}dashboard http://{event.api}/")
    if event.dashboard:
        secret = f"#key={quote(key, safe='')}" if key else ""
        lines.append(f"{_INDENT}for others http://{event.dashboard}/{secret}")
    if event.join_address:
        line = join_line(
            event.join_address,
            invited=event.invitation_needed,
            scripts=event.scripts,
            own_text=event.own_text,
        )
        hint = join_hint(
            event.join_address,
            me=event.peer,
            listen=event.listen,
            public_addr=event.public_addr,
            scripts=event.scripts,
        )
        if event.run:
            lines.append(f"{_INDENT}Others can join with:")
        else:  # a seed's, as long as it has none
            lines.append(f"{_INDENT}Who creates a run brings it here, with its settings:")
            line += " --preset tiny"
        lines += [f"{_INDENT}  {told}" for told in (line, *hint)]
        if 0 < event.total_rounds < ENDLESS_ROUNDS:
            more = 'run={"rounds": {"total_rounds": N}}'
            given = more if event.scripts else "its --run file, or --set rounds.total_rounds=N"
            lines.append(
                f"{_INDENT}The run is over after {counted(event.total_rounds, 'round')}, whoever "
                f"takes part by then; who creates one gives it more with {given}"
            )
    return "\n".join(lines)
