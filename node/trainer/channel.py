"""What daemon and trainer say to each other, and the socket they say it over.

Rank 0 inherits one end of a Unix socket pair; each frame (:mod:`node.trainer.framing`) is a message
of :mod:`protocols.wire`. Tensors never travel here: they lie in shared memory
(:mod:`node.trainer.shared`), and a message says when they may be read.

The order of a round::

    daemon                                   trainer
    Begin(round=r, target_steps=H)  ->
                                        <-   Applied(round=r)
                                             H inner steps (StepDone each)
                                        <-   Snapshot(round=r)      `sent` holds θ
    (round r is merged and committed;        goes on with inner steps
     `base` holds the new outer state,
     `sent` what was merged of θ)
    Apply(round=r+1)                ->
                                             θ ← base + (θ − sent)
                                        <-   Applied(round=r+1)     vectors are free again

A model in fragments is merged by as many such conversations side by side, each about its own
part of the vectors; the trainer evaluates with those of fragment 0 alone.

The daemon has the vectors from its claim (:meth:`SharedVectors.try_claim`) until it sends
:class:`Begin` or :class:`Apply`; from then until :class:`Applied` nobody changes them.
"""

from __future__ import annotations

import select
import socket
import time
from contextlib import suppress
from typing import Annotated, Protocol, get_args

from node.trainer.framing import READ_BYTES, Unframer, frame
from node.trainer.numbers import Stretches
from protocols.bounds import MAX_FRAGMENTS
from protocols.errors import AtollError
from protocols.wire import Max, Message, decode_any

MAX_AWAITED = 1024  # ranks that are named

Location = Annotated[str, Max(4096)]
Text = Annotated[str, Max(8192)]


# --- daemon -> trainer ------------------------------------------------------------------------


class Begin(Message, kind=100):
    """Start training from ``base``, or from a checkpoint that was made on this very ``base``.

    Answered by :class:`Applied`.
    """

    round: int  # rounds committed so far
    target_steps: int  # inner steps until the next snapshot
    slot: int  # this island's place among `slots` islands: decides which windows it reads
    slots: int
    step: int  # inner steps of this island so far; a checkpoint's own count takes precedence
    tokens: int  # trained by this island so far; likewise
    resume: Location  # directory of a checkpoint's trainer files, empty: none
    rewarm: bool  # warm the learning rate up again from here (a joiner's moments are cold)
    evaluate: bool  # before the first step; the result is an :class:`Evaluated`
    # rounds committed of fragments 1, 2, …; `round` and `slot` are those of fragment 0
    others: Annotated[tuple[int, ...], Max(MAX_FRAGMENTS - 1)] = ()
    tau: int | None = None  # as in :class:`Apply`
    at_will: bool = False  # steps count from the last contribution, not from the last round
    forgets: bool = False  # the optimizer begins anew with every round of the island's own
    # no inner steps are taken: what is sent is a batch's gradient at `base`, and dropped if late
    gradients: bool = False
    # file of a donor's moments (node/trainer/moments.py), or an earlier checkpoint; empty: none
    moments: Location = ""
    moments_steps: int = 0  # that a donor's moments have seen; 0: they are a checkpoint's
    position: int = 0  # in the learning rate's schedule, of the swarm, or the island if further
    # inner steps of the round that are in ``base``, or in a snapshot still to be merged: their
    # windows are not read again. A checkpoint's own are preferred
    round_step: int = 0
    batches: Stretches = ()  # next to read, by number; empty: each round has windows of its own


class Apply(Message, kind=101):
    """Round ``round - 1`` is committed: θ ← base + (θ − sent), exactly ``base`` if ``reset``.

    It concerns one fragment, except ``target_steps`` (the same for all), ``slot`` and ``slots``
    (those of fragment 0) and ``evaluate`` (the loss of the whole ``base``).
    ``contributed`` false: nothing of the outstanding snapshot was merged (or there is none), so
    its steps and tokens still count towards the next contribution. ``voids``: where ``sent`` is NaN
    θ is exactly ``base`` as well. ``batches``, where batches are numbered, are more to read;
    ``anew``: they replace the earlier ones, which may have been read. Answered by :class:`Applied`.
    """

    round: int
    target_steps: int
    slot: int
    slots: int
    contributed: bool
    reset: bool
    evaluate: bool
    fragment: int = 0
    tau: int | None = None  # inner steps to take before waiting for an outcome; None: as before
    position: int = 0  # as in :class:`Begin`
    voids: bool = False
    round_step: int = 0  # with ``reset`` in the same round: as in :class:`Begin`
    batches: Stretches = ()
    anew: bool = False


class InnerSteps(Message, kind=107):
    """How many inner steps from the last contribution to the next; 0: rest until told otherwise.

    Answered by nothing.
    """

    target_steps: int


class Shift(Message, kind=108):
    """θ ← θ + ``sent``, of a fragment whose snapshot is unanswered (mode ``eager``).

    The snapshot stays unanswered. This message is answered by :class:`Shifted`.
    """

    fragment: int = 0


class Save(Message, kind=102):
    """Write the trainer's files into an existing directory.

    Answered by :class:`Staged` when they have been copied, and by :class:`Saved` when written.
    """

    directory: Location


class Donate(Message, kind=109):
    """Write the optimizer's moments into an empty file, for a newcomer.

    Answered by :class:`Donated`. Who asks removes the file to give the copy up: no more is written
    then, or begun, and there is no answer.
    """

    path: Location


class Stop(Message, kind=104):
    """End after the current inner step; answered by :class:`Stopped`."""


class Terms(Message, kind=106):
    """What a script has to know of its run before :class:`Begin` (:mod:`node.script`)."""

    overlap_steps: int
    wait_s: float  # for a round's outcome, then the script goes on


class Ended(Message, kind=105):
    """The daemon itself has failed; only a script that started it is told (:mod:`node.script`)."""

    code: Annotated[str, Max(8)]
    what: Text
    why: Text
    fix: Text


# --- trainer -> daemon ------------------------------------------------------------------------


class Ready(Message, kind=110):
    """All ranks are up and the model is built; waits for :class:`Begin`."""

    parameters: int
    layout: Annotated[bytes, Max(32)]  # digest of the flat layout


class StepDone(Message, kind=111):
    """One inner step. ``loss`` and ``grad_norm``: None if they were not finite, or not told."""

    round: int
    step: int
    loss: float | None  # nats a token, mean over the island's batch
    grad_norm: float | None
    lr: float
    tokens: int  # of this step
    seconds: float
    mfu: float | None = None  # see node.trainer.speed
    data_s: float | None = None  # of the seconds, those spent waiting for the batch
    micro_batch: int | None = None  # sequences that a rank took at once
    halved: int = 0  # times it was halved since the rank's start, for lack of memory
    position: int = 0  # in the learning rate's schedule, after this step
    finite: bool = True  # loss and gradient were, as far as they are known
    batches: Stretches = ()  # left to read, by number; empty: each round has windows of its own


class Awaited(Message, kind=126):
    """Ranks wait for data of their next step, or all have theirs at last."""

    step: int
    seconds: float  # so far
    ranks: Annotated[tuple[int, ...], Max(MAX_AWAITED)] = ()  # empty: all have theirs


class Snapshot(Message, kind=112):
    """``sent`` holds θ. Steps and tokens are those since the last contribution."""

    round: int
    steps: int
    tokens: int
    finite: bool  # false: θ, or every one of the last steps, was not finite
    fragment: int = 0
    round_step: int = 0  # inner steps since the last Apply
    skipped: int = 0  # of the steps, those without a finite gradient


class Applied(Message, kind=113):
    """Answer to :class:`Begin` and :class:`Apply`; the trainer reads the vectors no more."""

    round: int
    step: int  # inner steps so far, and tokens
    tokens: int
    validation_loss: float | None  # of `base`, where asked for
    fragment: int | None = 0  # None: all of them, in answer to :class:`Begin`
    waited_s: float = 0.0  # seconds with nothing to do since the previous answer
    batches: Stretches = ()  # as in :class:`StepDone`
    dropped: int = 0  # inner steps that no merge has had, where :class:`Apply` says ``reset``


class Shifted(Message, kind=123):
    """Answer to :class:`Shift`; the trainer reads the vectors no more."""

    fragment: int = 0


class Staged(Message, kind=122):
    """First answer to :class:`Save`: the files hold the state as of now, nothing later."""

    directory: Location


class Saved(Message, kind=114):
    """Second answer to :class:`Save`; ``problem`` is empty when the files are complete."""

    directory: Location
    problem: Text
    full: bool  # the disk is full


class Donated(Message, kind=124):
    """Answer to :class:`Donate`; ``problem`` is empty when the file is complete."""

    path: Location
    steps: int  # that the moments have seen; 0: there are none
    problem: Text


class Evaluated(Message, kind=115):
    """The validation loss that a run starts from, as :class:`Begin` asked."""

    round: int
    step: int
    validation_loss: float | None


class Cold(Message, kind=125):
    """The optimizer has lost some or all of its moments; ``why`` they were dropped."""

    step: int
    why: Text


class Failed(Message, kind=116):
    """Rank 0 cannot go on and exits; ``code`` is one of docs/errors.md or empty."""

    code: Annotated[str, Max(8)]
    text: Text


class Stopped(Message, kind=117):
    """The trainer ends as asked; it keeps nothing that was not checkpointed."""


class Leaving(Message, kind=121):
    """A script wants to leave: the daemon shall save, say farewell, send :class:`Stop` and end."""


Command = Begin | Apply | Shift | InnerSteps | Save | Donate | Stop | Terms | Ended
Report = (
    Ready
    | StepDone
    | Awaited
    | Snapshot
    | Applied
    | Shifted
    | Staged
    | Saved
    | Donated
    | Evaluated
    | Cold
    | Failed
    | Stopped
    | Leaving
)

COMMANDS: tuple[type[Command], ...] = get_args(Command)
REPORTS: tuple[type[Report], ...] = get_args(Report)


class ChannelClosedError(AtollError):
    """The other end is gone."""


class TrainerEnd(Protocol):
    """The trainer's end of what it and the daemon say to each other."""

    def send(self, report: Report) -> None:
        """Raises :class:`ChannelClosedError`."""
        ...

    def receive(self, timeout: float) -> Command | None:
        """The next command, or None after ``timeout`` seconds without one."""
        ...

    def close(self) -> None:
        """Be gone, as the other side sees it."""
        ...


class Channel:
    """The trainer's end: blocking sends, receives with a time limit. Not thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._coming = select.poll()  # select takes no descriptor above 1023
        self._coming.register(sock, select.POLLIN)
        self._unframer = Unframer()
        self._commands: list[Command] = []

    def send(self, report: Report) -> None:
        """Send one message; raises :class:`ChannelClosedError`."""
        try:
            self._socket.sendall(frame(report))
        except OSError as error:
            raise ChannelClosedError(f"the daemon is gone ({error})") from error

    def close(self) -> None:
        """Be gone, as the other side sees it."""
        with suppress(OSError):  # the daemon is gone itself
            # also in the workers that a data loader has forked, which have this end open as well
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def receive(self, timeout: float) -> Command | None:
        """The next command, or None after ``timeout`` seconds without one.

        Raises :class:`ChannelClosedError` when the daemon is gone and :class:`Malformed` for bytes
        that are no command.
        """
        deadline = time.monotonic() + timeout
        while not self._commands:
            left = max(0.0, deadline - time.monotonic())
            try:
                if not self._coming.poll(1000 * left):
                    return None
                data = self._socket.recv(READ_BYTES)
            except OSError as error:
                raise ChannelClosedError(f"the daemon is gone ({error})") from error
            if not data:
                raise ChannelClosedError("the daemon closed the channel")
            self._commands += [decode_any(f, *COMMANDS) for f in self._unframer.feed(data)]
        return self._commands.pop(0)
