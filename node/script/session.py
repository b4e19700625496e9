"""What a script holds after :func:`node.join`: it counts inner steps and merges between them.

The daemon is a process of its own, so rounds go on while the script computes. All that happens to
the script's parameters happens inside :meth:`Joined.step`, :meth:`Joined.outer_parameters` and
:meth:`Joined.leave`, between two of its optimizer steps, and only after a round has committed.
"""

from __future__ import annotations

import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import TracebackType

from torch import Tensor

from node.closing import newest_round
from node.errors import operator_error
from node.hosts.wire import fitting
from node.interrupts import held_back
from node.script.progress import ScriptProgress, counted, elsewhere
from node.script.standstill import STILL_S, Pulse, Standstill
from node.trainer.channel import Begin, ChannelClosedError, Ended, Leaving, Ready, StepDone, Stop
from node.trainer.leader import ACTIONS, Action, Idle, Leader, TakeStep
from node.trainer.rank import rank_lost
from protocols.errors import OperatorError
from protocols.wire import decode_any

Decide = Callable[[Leader], Action]
Parts = tuple[ScriptProgress, subprocess.Popen[bytes] | None, Path | None]

GONE = Ended(
    "E405",
    "the node of this script has ended",
    "its process closed the channel without a word",
    "see what it printed, or logs/node.log in its state directory",
)
LEAVE_S = 60.0  # for the farewell; then a daemon that saves nothing is ended
ABANDON_S = 5.0  # for the farewell alone
KILLED_S = 30.0  # until a process that was killed is gone, with all its memory
HEARING_S = 0.2  # until Ctrl-C is heard at most, also while waiting for a round's outcome


def ended(error: OperatorError) -> Ended:
    """What a script's ranks are told when the node has failed, however long its texts are."""
    return Ended(error.code, fitting(error.what), fitting(error.why), fitting(error.fix))


class Joined:
    """This script's place in a swarm: call :meth:`step` after each optimizer step, at the end
    :meth:`leave`; or use it as a context manager."""

    def __init__(
        self,
        progress: ScriptProgress,
        daemon: subprocess.Popen[bytes] | None,
        checkpoints: Path | None = None,
    ) -> None:
        """``daemon``: the node's process, on rank 0 only; ``checkpoints``: where it saves."""
        self._progress, self._daemon, self._checkpoints = progress, daemon, checkpoints
        self._leaving = False
        self._process = os.getpid()
        self.thread: threading.Thread | None = None  # that has taken the last step
        self._pulse = Pulse()  # the node's
        self._standstill = Standstill(checkpoints)  # while it leaves
        self._since = time.monotonic()

    # --- what it stands at -----------------------------------------------------------------------

    @property
    def round(self) -> int:
        """Rounds applied so far."""
        return self._progress.round

    @property
    def steps(self) -> int:
        """Inner steps of this island so far, those before a resume included."""
        return self._progress.step

    @property
    def position(self) -> int:
        """Inner steps that the swarm is into the run, as far as they tell; at least :attr:`steps`.

        Where a learning rate's schedule should stand: a late joiner anneals with the others.
        """
        return self._progress.position

    @property
    def tokens(self) -> int:
        """Tokens this island has trained on so far."""
        return self._progress.tokens

    @property
    def share(self) -> tuple[int, int]:
        """(i, n): this island is number i of the n that read data in this round.

        A script that picks windows by (round, i, n, inner step) reads none that others read.
        """
        return self._progress.slot, self._progress.slots

    @property
    def over(self) -> bool:
        """Whether the run is complete, or this node has left it."""
        return self._progress.over

    def trains(self, parameters: Iterable[Tensor]) -> bool:
        """Whether it merges one of these tensors, and is not over."""
        mine = {id(part) for parts in self._progress.weights.parts.values() for part in parts}
        return not self.over and any(id(parameter) in mine for parameter in parameters)

    # --- taking part -----------------------------------------------------------------------------

    def step(
        self,
        tokens: int | Tensor,
        loss: float | Tensor | None = None,
        *,
        lr: float | Tensor = 0.0,
    ) -> bool:
        """Count an inner step that the script has just taken, and do what is due between two.

        ``tokens`` and ``loss`` (mean, nats a token) are of the whole island's batch; loss and
        ``lr`` are for the log alone, but a loss that is not finite counts as a step that failed,
        and three in a row bring the island back to the last merge. Where a round has committed,
        θ ← base + (θ − sent) (:mod:`node.trainer.progress`). Waits for a round's outcome at most
        as long as the run allows. Every rank must call it.

        Returns whether the run goes on. Raises :class:`~protocols.errors.OperatorError` if the
        node has failed, E405 where for an hour it has not shown that it lives (a warning comes
        after two minutes), and what the script's ``evaluate`` raises, after the round is applied;
        of several ranks that ends the island, with E405 in the others. Ctrl-C, too, waits until it
        is.
        """
        if self.over:
            return False
        self._outside_evaluation("step")
        self.thread = threading.current_thread()
        # plain numbers, before anything is counted: a message takes nothing else
        tokens, lr = counted(tokens), float(lr)
        value = None if loss is None else float(loss.detach() if isinstance(loss, Tensor) else loss)
        finite = value is None or math.isfinite(value)
        seconds = time.monotonic() - self._since
        progress = self._progress
        progress.check_training()
        with held_back():  # a step must not be half counted or half reported
            progress.count(tokens, finite=finite)
            progress.report(
                StepDone(
                    progress.round,
                    progress.step,
                    value if finite else None,
                    None,
                    lr if math.isfinite(lr) else 0.0,  # no message takes others
                    tokens,
                    seconds,
                    position=progress.position,
                    finite=finite,
                )
            )
        self._follow(until=TakeStep)
        self._since = time.monotonic()
        return not self.over

    def begin(self) -> None:
        """Wait until this island is let in; the parameters are the swarm's then."""
        progress = self._progress
        progress.report(Ready(progress.layout.size, bytes.fromhex(progress.layout.digest)))
        self._follow(until=Begin)
        self._since = time.monotonic()

    def outer_parameters(self) -> dict[str, Tensor]:
        """What the swarm agrees on: copies of the outer parameters, fp32 on the CPU, by name.

        They are those of the newest committed round that this node holds, equal on all islands;
        the script's own parameters have moved on since. Every rank must call it; empty on all but
        rank 0. A round that has committed meanwhile is applied first, as in :meth:`step`.
        """
        leader = self._progress.leader
        # the daemon may be about to write: then its command comes first. Not in the script's own
        # evaluation: the round being taken in holds the vectors until that is through
        locks = not self.over and self._progress.whole
        try:
            if locks:
                self._follow(until=TakeStep, decide=_until_readable)
            if leader is None:
                return {}
            base = leader.vectors.tensors()[0].clone()
        finally:  # also after Ctrl-C, which may come once they are locked
            if locks and leader is not None:
                leader.vectors.end_reading()
        return self._progress.layout.views(base)

    def leave(self) -> None:
        """Tell the peers, write a last checkpoint, end the daemon. Every rank must call it.

        Raises :class:`~protocols.errors.OperatorError` if the node has failed meanwhile, or hangs:
        E405 where for two minutes and more nothing comes from it, and no checkpoint gets further.
        """
        if not self.over:
            self._outside_evaluation("leave")
        try:
            if not self.over:
                self._leaving = True
                self._unlock()
                self._progress.report(Leaving())
                self._follow(until=Stop, decide=self._commanded)
        except BaseException:  # also Ctrl-C: the daemon is to see that the script is gone
            self._part()
            raise
        finally:
            self._progress.end()
            self._reap(LEAVE_S, saves=True)

    def abandon(self) -> None:
        """End the daemon now: this island was never let in, and has nothing to save."""
        self._part()
        if self._daemon is not None:
            self._daemon.terminate()
        self._reap(ABANDON_S, saves=False)

    def __enter__(self) -> Joined:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if os.getpid() != self._process:
            return  # a forked child that ends: the island is its parent's
        if error is not None and not self.over and self._progress.ranks.size > 1:
            self._part()  # the other ranks may be anywhere, and are not waited for
            return
        with suppress(OperatorError) if error is not None else nullcontext():
            self.leave()

    # --- inside ----------------------------------------------------------------------------------

    def _reap(self, seconds: float, *, saves: bool) -> None:
        """Wait ``seconds`` for the daemon to end by itself, then kill it.

        Where it ``saves``, wait until its checkpoint is complete and copied, which takes minutes
        for a large model, as long as that makes progress.
        """
        if self._daemon is None:
            return
        daemon, self._daemon = self._daemon, None
        standstill = Standstill(self._checkpoints if saves else None)
        try:
            while True:
                with suppress(subprocess.TimeoutExpired):
                    daemon.wait(seconds)
                    return
                standstill.add(seconds)
                if standstill.saving is None or standstill.too_long:
                    return
        finally:  # also after Ctrl-C: it has the state directory
            daemon.kill()
            with suppress(subprocess.TimeoutExpired):  # where it hangs inside the kernel
                daemon.wait(KILLED_S)

    def _outside_evaluation(self, call: str) -> None:
        """Raise E204 in the script's own evaluation, where a round is half taken in."""
        if not self._progress.whole:
            raise operator_error(
                "E204",
                f"the script's evaluate has called island.{call}",
                why="a round is half taken in while it runs, and no checkpoint may be made of that",
                fix=f"note it there, and call island.{call} when island.step has returned",
            )

    def _part(self) -> None:
        """Close the channel: the daemon sees its end, and leaves the swarm in order."""
        self._progress.end()
        self._unlock()
        if self._progress.leader is not None:
            self._progress.leader.channel.close()

    def _unlock(self) -> None:
        """Let the daemon have the vectors, also where a second Ctrl-C has left them locked."""
        if self._progress.leader is not None:
            self._progress.leader.vectors.end_reading()

    def _follow(self, until: type[Action], decide: Decide | None = None) -> None:
        """Carry out what is decided, up to and including the first action of this kind.

        Raises OperatorError E405 where another rank has gone meanwhile, E406 where it does not
        answer.
        """
        try:
            self._carry_out(until, decide)
        except RuntimeError as error:  # torch's DistError is one, and gloo raises it as it is
            code = rank_lost(error) if self._progress.ranks.size > 1 else ""
            if not code:
                raise
            self._part()
            what = "is gone" if code == "E405" else "does not answer"
            why = f"rank {self._progress.ranks.rank} was told: {str(error)[:300]}"
            raise elsewhere(code, f"another rank of this script {what}", why) from error

    def _carry_out(self, until: type[Action], decide: Decide | None) -> None:
        while True:
            if self._leaving:  # nothing is trained any more: no need to write beside it
                self._progress.files.finish()
            # what was commanded must not get lost on its way: the daemon waits for the answer
            with held_back():
                action, stop = self._next(decide)
                if stop:
                    self._part()  # the daemon waits for that before it says farewell
                    return
            if isinstance(action, Ended):
                self._progress.end()
                raise OperatorError(action.code, action.what, action.why, action.fix)
            if isinstance(action, until):
                return

    def _next(self, decide: Decide | None) -> tuple[Action, bool]:
        """Agree on what is next, and do it, whole; whether the daemon says stop.

        Where that fails half-way this island is over: no checkpoint may be made of what is left,
        and the daemon must not wait for an answer. So it is where one of several ranks fails,
        which would then be at another place than the others.
        """
        progress = self._progress
        try:
            progress.whole = False
            action = self._agree(decide)
            return action, progress.carry_out(action)
        except BaseException as error:  # also a second Ctrl-C, which is not held back
            alone = progress.ranks.size == 1 or not isinstance(error, Exception)
            if not (alone and progress.whole):
                self._part()
            raise

    def _commanded(self, leader: Leader) -> Action:
        """What the daemon commands one that leaves; how it is given up, where it hangs."""
        command = leader.channel.receive(leader.longest_s)
        if command is not None:
            self._standstill.over()
            return command
        self._standstill.add(leader.longest_s)
        if not self._standstill.too_long:
            return Idle()
        return self._unanswered(
            f"asked to leave, it has said and written nothing for {STILL_S:.0f} s at least"
        )

    def _decided(self, leader: Leader, decide: Decide | None) -> Action:
        """What rank 0 decides; its end where the node hangs, which is ended with it."""
        if not self._leaving and self._pulse.lost(leader.vectors.beats, leader.clock()):
            self._reap(0.0, saves=False)  # else its state directory stays locked
            return self._unanswered(f"no sign of life for {self._pulse.seconds:.0f} s")
        return decide(leader) if decide is not None else leader.decide(self._progress)

    def _unanswered(self, how: str) -> Ended:
        newest = newest_round(self._checkpoints) if self._checkpoints else None
        saved = "no checkpoint" if newest is None else f"a checkpoint of round {newest}"
        return Ended(
            "E405",
            "the node of this script does not answer",
            f"{how}; it has {saved}, this script stands at round {self.round}: what came since is "
            "lost if it hangs",
            GONE.fix,
        )

    def _agree(self, decide: Decide | None) -> Action:
        """Rank 0's decision, on every rank."""
        progress = self._progress
        action: Action = Idle()
        if progress.leader is not None:
            try:
                action = self._decided(progress.leader, decide)
            except ChannelClosedError:
                action = GONE
        if progress.ranks.size == 1:
            return action
        agreed: Action = decode_any(progress.ranks.broadcast(action.encode()), *ACTIONS)
        return agreed


def _until_readable(leader: Leader) -> Action:
    """``TakeStep`` once the vectors are locked for reading; until then what the daemon commands."""
    if leader.vectors.try_read():
        return TakeStep()
    return leader.channel.receive(0.02) or Idle()
