"""Figures of rounds and inner steps to where others look at them: ``--sink KIND:WHERE``.

==========================  =====================================================================
``jsonl:PATH``              a JSON object a line, appended
``tensorboard:DIR``         TensorBoard's event files (extra ``tensorboard``)
``wandb:PROJECT``           Weights & Biases (extra ``wandb``); ``WANDB_MODE=offline`` works
==========================  =====================================================================

Each is written on a thread of its own with a bounded queue: one that is slow, hangs or is broken
costs its own figures and no time. Each is reported once; one that fails is left out from then on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TextIO

from bootstrap.validation import bad_config
from node.errors import operator_error, with_extra
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Record, RoundDone, Step
from node.monitor.plain import plain
from node.monitor.whole_rounds import WholeRounds
from protocols.errors import OperatorError, reason

KINDS = ("jsonl", "tensorboard", "wandb")
MAX_WAITING = 4096  # figures; more are dropped
CLOSE_S = 10.0
FLUSH_S = 10.0  # of TensorBoard's files

_STEP = ("loss", "grad_norm", "lr", "tokens_per_second", "mfu")
_ROUND = (
    "loss", "validation_loss", "consensus", "consensus_after", "members", "live", "agreeing",
    "tokens", "sync_s", "wait_s", "utilisation", "sent_bytes", "received_bytes", "raw_bytes",
)  # fmt: skip


class Sink(Protocol):
    """Takes figures; called on one thread."""

    def write(self, axis: str, at: int, when: float, figures: Mapping[str, float]) -> None:
        """Figures of one inner step or round: ``axis`` says which, ``at`` is its number."""
        ...

    def close(self) -> None:
        """Everything is written when this returns."""
        ...


def split(text: str) -> tuple[str, str]:
    """``KIND:WHERE`` as a pair; raises ``ValueError`` that says what is wrong."""
    kind, _, where = text.partition(":")
    if kind not in KINDS:
        raise ValueError(f"{text!r} must be KIND:WHERE, with a KIND of " + ", ".join(KINDS))
    if not where:
        raise ValueError(f"{text!r} does not say where, as in {kind}:NAME")
    return kind, where


def figures(record: Record) -> tuple[str, int, dict[str, float]] | None:
    """What there is to plot in an event: axis, number, values by name; None for most events."""
    match record.event:
        case Step() as step:
            return "step", step.step, _named("train", step, _STEP)
        case RoundDone() as done:
            found = _named("round", done, _ROUND)
            found |= {f"phase/{name}_s": seconds for name, seconds in done.phases.items()}
            return "round", done.round, found
    return None


def _named(group: str, event: Any, names: Sequence[str]) -> dict[str, float]:
    values = {name: getattr(event, name) for name in names}
    return {f"{group}/{name}": value for name, value in values.items() if value is not None}


class JsonlSink:
    """A line of JSON for every step and round.

    A named pipe is opened with the first of them, as that waits until somebody reads it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.is_fifo():
                self._file = self._open()
        except OSError as error:
            raise _not_written(path, error, "give another file with --sink jsonl:PATH") from error

    def write(self, axis: str, at: int, when: float, figures: Mapping[str, float]) -> None:
        """Append one line; what is not finite is null, as JSON has no such numbers."""
        line = {"time": round(when, 3), axis: at, **plain(figures)}
        if self._file is None:
            self._file = self._open()
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        return self._path.open("a", encoding="utf-8")


class TensorboardSink:
    """TensorBoard's event files. Raises OperatorError E605 without the library.

    Not by its SummaryWriter: that has a thread of its own, which dies of a full disk with a
    traceback on the terminal.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event
            from tensorboardX.proto.summary_pb2 import Summary
        except ImportError as error:
            raise _missing("tensorboard", "tensorboardX") from error
        self._event, self._summary = Event, Summary
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder.absolute() / "events"))
        except OSError as error:
            fix = "give another folder with --sink tensorboard:DIR"
            raise _not_written(folder, error, fix) from error
        self._flushed = time.monotonic()

    def write(self, axis: str, at: int, when: float, figures: Mapping[str, float]) -> None:
        """A scalar each, with the step's or round's number."""
        values = [self._summary.Value(tag=n, simple_value=v) for n, v in figures.items()]
        summary = self._summary(value=values)
        self._writer.write_event(self._event(wall_time=when, step=at, summary=summary))
        if time.monotonic() - self._flushed > FLUSH_S:  # to the disk itself, which takes long
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush."""
        self._writer.close()


class WandbSink:
    """A run of Weights & Biases, as its own environment variables say. Raises E605 without it."""

    def __init__(self, project: str) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("wandb", "wandb") from error
        settings = wandb.Settings(console="off", disable_git=True, quiet=True)
        try:
            self._run = wandb.init(project=project, settings=settings)
        except Exception as error:  # of its own kinds: no key, no answer, no such project
            raise bad_config(
                f"--sink wandb:{project} cannot be used",
                f"{type(error).__name__}: {error}",
                "run `wandb login` first, or set WANDB_MODE=offline",
            ) from error
        for axis, groups in (("step", ("train/*",)), ("round", ("round/*", "phase/*"))):
            self._run.define_metric(axis)
            for group in groups:
                self._run.define_metric(group, step_metric=axis)

    def write(self, axis: str, at: int, when: float, figures: Mapping[str, float]) -> None:
        """One entry; the axis is a figure of its own."""
        self._run.log({axis: at, **figures})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def _not_written(path: Path, error: OSError, fix: str) -> OperatorError:
    return bad_config(f"cannot write {path}", reason(error), fix)


def _missing(extra: str, library: str) -> OperatorError:
    return operator_error(
        "E605",
        f"--sink {extra}: needs {library}",
        why="it is not installed",
        fix=with_extra(extra),
    )


def open_sink(text: str) -> Sink:
    """The sink that ``KIND:WHERE`` means. Raises OperatorError where it cannot be."""
    kind, where = split(text)
    if kind == "jsonl":
        return JsonlSink(Path(os.path.expanduser(where)))
    if kind == "tensorboard":
        return TensorboardSink(Path(os.path.expanduser(where)))
    return WandbSink(where)


class Sinks:
    """A subscriber of the event log that hands figures to sinks, each on a thread of its own.

    ``tell`` is called in the event loop with a sink's name and what has become of it: it is left
    out from then on, or loses figures.
    """

    def __init__(self, sinks: Mapping[str, Sink], tell: Callable[[str, str], None]) -> None:
        loop = asyncio.get_running_loop()

        def later(name: str, what: str) -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(tell, name, what)

        self._writers = [_Writer(name, sink, later) for name, sink in sinks.items()]
        self._wholes = WholeRounds()

    @property
    def dropped(self) -> int:
        """Figures of any sink that came to nothing, as it was too slow."""
        return sum(writer.dropped for writer in self._writers)

    def __call__(self, record: Record) -> None:
        """Queue a record that has figures; rounds of fragments as one of the whole model."""
        match record.event:
            case Step():
                self._put(record)
            case RoundDone() as done:
                if (whole := self._wholes.take(done)) is not None:
                    self._put(replace(record, event=whole))

    def _put(self, record: Record) -> None:
        for writer in self._writers:
            writer.put(record)

    async def aclose(self) -> None:
        """Write what is queued and close; gives up after :data:`CLOSE_S` seconds."""
        await asyncio.to_thread(self._finish, time.monotonic() + CLOSE_S)

    def _finish(self, end: float) -> None:
        for writer in self._writers:
            writer.finish()
        for writer in self._writers:
            writer.thread.join(max(0.0, end - time.monotonic()))


class _Writer:
    """One sink, its queue and its thread: what hangs here holds no other one."""

    def __init__(self, name: str, sink: Sink, tell: Callable[[str, str], None]) -> None:
        self.dropped = 0
        self._name, self._sink, self._tell = name, sink, tell
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._left_out = False
        self.thread = threading.Thread(target=self._work, name="atoll-sink", daemon=True)
        self.thread.start()

    def put(self, record: Record) -> None:
        if self._left_out:
            return
        if self._queue.qsize() < MAX_WAITING:
            self._queue.put(record)
            return
        self.dropped += 1
        if self.dropped == 1:
            self._tell(self._name, f"is too slow: it loses figures, with {MAX_WAITING} waiting")

    def finish(self) -> None:
        """Close it once all that is queued is written."""
        self._queue.put(None)  # however full: nothing comes after it

    def _work(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                if (found := figures(record)) is not None:
                    axis, at, values = found
                    self._sink.write(axis, at, record.time, values)
            self._sink.close()
        except Exception as error:  # noqa: BLE001  # a library's own: training is not its business
            self._left_out = True
            self._tell(self._name, f"is left out: {type(error).__name__}: {error}")


def told(events: EventLog) -> Callable[[str, str], None]:
    """What :class:`Sinks` tells of a sink, as an event."""

    def tell(name: str, what: str) -> None:
        events.emit(Notice(text=f"--sink {name} {what}"))

    return tell
