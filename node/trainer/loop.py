"""The training loop of one island, run alike by every rank: read :meth:`Trainer.run` first.

An island stands at round r, the number of rounds it has applied. It takes inner steps. After
``target_steps`` of them since then it copies θ into the shared vector ``sent`` and
reports a :class:`Snapshot` (once: the next one waits until this one is answered). It goes on for
``overlap_steps`` inner steps, then waits for the round's outcome, at most ``wait_s`` seconds;
after that it trains on. The outcome comes as :class:`Apply`, and is taken in between two inner
steps, whenever it comes:

    θ ← base + (θ − sent)

``base`` is the new outer state, and θ − sent what was learnt since the snapshot: nothing when
the loop waited, so that θ is ``base`` exactly; the work of the wait when it did not; all local
work when the round went without this island, for then the daemon has put the old outer state
into ``sent``. Nothing but this formula moves θ from outside.
"""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from node.checkpoint import FULL_DISK
from node.errors import operator_error
from node.trainer.channel import (
    Applied,
    Apply,
    Begin,
    Checkpoint,
    Evaluated,
    Ready,
    Report,
    Saved,
    Snapshot,
    StepDone,
    Stop,
    Stopped,
)
from node.trainer.data import TrainingData, open_tokens
from node.trainer.evaluate import evaluate, shard_tokens
from node.trainer.layout import Layout
from node.trainer.leader import ACTIONS, Action, Idle, Leader, Step, TakeSnapshot
from node.trainer.model import build, next_token_loss
from node.trainer.optim import (
    clip_gradients,
    learning_rate,
    make_optimizer,
    reentry_factor,
    set_learning_rate,
)
from node.trainer.parallel import Ranks, gather, local, scatter, shard
from node.trainer.resume import Standing, Work, load, optimizer_steps, sanitise, save
from node.trainer.settings import TrainerSettings
from protocols.errors import OperatorError
from protocols.wire import decode_any

OVERDUE = 2  # rounds' worth of steps that have not been sent
BAD_STEPS = 3  # steps without a finite gradient after which the island says that it is lost


class Trainer:
    """Model, optimizer and place in the run of one rank."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks, leader: Leader | None) -> None:
        """Build model and data; every rank must call it. ``leader`` is given on rank 0 only."""
        manifest = settings.manifest
        self.settings, self.ranks, self.leader = settings, ranks, leader
        self.inner, self.overlap = manifest.inner, manifest.rounds.overlap_steps
        self.batch = manifest.data.batch_size
        self.micro_batch = settings.micro_batch or self.batch
        self.data, self.validation = _read_data(settings, ranks)
        bf16 = settings.bf16 if settings.bf16 is not None else ranks.device.type == "cuda"
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.model = build(manifest.model, manifest.seed)  # any value does: Begin sets θ
        shard(self.model, list(self.model.layers.values()), ranks, self.dtype)
        self.layout = Layout.of_module(self.model)
        self.parameters = dict(self.model.named_parameters())
        self.optimizer = make_optimizer(self.model, manifest.inner)
        # where this island stands
        self.begun = False
        self.round = self.slot = 0
        self.slots = 1
        self.target_steps = 0
        self.round_step = 0  # inner steps since the last Apply: the sampler's position
        self.step = self.tokens = 0
        self.rewarm_from: int | None = None
        self.bad_steps = 0  # in a row
        # what it has done since its last contribution, oldest first
        self.carried = Work()  # was in a snapshot that was not merged
        self.outstanding: Work | None = None  # lies in `sent`, not answered yet
        self.unsent = Work()  # since the last snapshot

    # --- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Follow the daemon until it says stop."""
        self._report(
            Ready(
                self.layout.size,
                bytes.fromhex(self.layout.digest),
                str(self.ranks.device),
                str(self.dtype).removeprefix("torch."),
                self.ranks.size,
            )
        )
        while True:
            match self._agree():
                case Step():
                    self.inner_step()
                case TakeSnapshot():
                    self.take_snapshot()
                case Apply() as command:
                    self.apply(command)
                case Begin() as command:
                    self.begin(command)
                case Checkpoint() as command:
                    self.checkpoint(command)
                case Stop():
                    self._report(Stopped(self.step, self.tokens))
                    return

    @property
    def due(self) -> bool:
        """Whether a snapshot is to be taken: the target is reached, or training is lost.

        Steps are counted from the last Apply, which comes to all islands at once, so that all
        are due at once; who was late in the last round has more to send, not a phase of its own.
        Nor may it be late for ever: with two rounds' work in hand it is due as well.
        """
        reached = (
            self.round_step >= self.target_steps
            or self.unsent.steps >= OVERDUE * self.target_steps
            or self.bad_steps >= BAD_STEPS
        )
        return self.begun and self.outstanding is None and reached

    @property
    def waiting(self) -> bool:
        """Whether nothing is left to do but the answer to the snapshot."""
        return self.outstanding is not None and self.unsent.steps >= self.overlap

    def _agree(self) -> Action:
        """Rank 0's decision, on every rank."""
        action = self.leader.decide(self) if self.leader is not None else Idle()
        if self.ranks.size == 1:
            return action
        return decode_any(self.ranks.broadcast(action.encode()), *ACTIONS)

    def _report(self, report: Report) -> None:
        if self.leader is not None:
            self.leader.channel.send(report)

    # --- one inner step -----------------------------------------------------------------------

    def inner_step(self) -> None:
        """One optimizer step on this island's next batch; skipped if its gradient is not finite."""
        started = time.monotonic()
        loss = self._gradients()
        norm = float(gather(clip_gradients(self.parameters.values(), self.inner.clip_norm)))
        lr = learning_rate(self.inner, self.step)
        if self.rewarm_from is not None:
            lr *= reentry_factor(self.step - self.rewarm_from)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.bad_steps = 0 if finite else self.bad_steps + 1
        done = Work(
            steps=1,
            tokens=self.batch * self.settings.manifest.data.seq_len,
            loss_sum=loss if finite else 0.0,
            finite_steps=int(finite),
            seconds=time.monotonic() - started,
        )
        self.unsent += done
        self.round_step += 1
        self.step += 1
        self.tokens += done.tokens
        self._report(
            StepDone(
                self.round,
                self.step,
                loss if finite else None,
                norm if finite else None,
                lr,
                done.tokens,
                done.seconds,
            )
        )

    def _gradients(self) -> float:
        """Accumulate the batch's gradient; the island's mean loss, on every rank.

        Out of memory on a single rank: again with half the micro-batch, the batch stays. (With
        several the others are inside a collective; the daemon starts all of them again.)
        """
        while True:
            try:
                return float(self.ranks.mean(self._accumulate()))
            except torch.OutOfMemoryError:
                if self.ranks.size > 1 or self.micro_batch == 1:
                    raise
                self.micro_batch = -(-min(self.micro_batch, self.batch) // 2)
            self.optimizer.zero_grad()
            torch.cuda.empty_cache()

    def _accumulate(self) -> Tensor:
        """This rank's share of the mean loss, times the number of ranks; gradients likewise."""
        total = torch.zeros((), device=self.ranks.device)
        for part in share(self.batch, self.ranks.rank, self.ranks.size, self.micro_batch):
            inputs, targets = self.data.batch(
                self.round, self.slot, self.slots, self.round_step, part
            )
            with self._autocast():
                logits = self.model(inputs.to(self.ranks.device))
                loss = next_token_loss(logits, targets.to(self.ranks.device))
            loss = loss * (len(part) * self.ranks.size / self.batch)
            loss.backward()
            total += loss.detach()
        return total

    def _autocast(self) -> AbstractContextManager[object]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.ranks.device.type, self.dtype)

    def evaluate(self) -> float | None:
        """Loss on the shared validation shard with θ as it is; None without one."""
        if self.validation is None:
            return None
        with self._autocast():
            loss = evaluate(self.model, self.validation)
        return loss if math.isfinite(loss) else None

    # --- θ and the shared vectors -------------------------------------------------------------

    @torch.no_grad()
    def begin(self, command: Begin) -> None:
        """Take ``base`` as θ, or θ and the moments of a checkpoint that was made on it."""
        base, _ = self._vectors()
        self.optimizer.state.clear()
        for name, parameter in self.parameters.items():
            local(parameter).copy_(scatter(base.get(name), parameter))
        self.round, self.slot, self.slots = command.round, command.slot, command.slots
        self.target_steps = command.target_steps
        self.step, self.tokens = command.step, command.tokens
        self.round_step = self.bad_steps = 0
        self.carried, self.outstanding, self.unsent = Work(), None, Work()
        self.rewarm_from = command.step if command.rewarm else None
        if command.resume:
            standing = load(Path(command.resume), self.parameters, self.optimizer, self.ranks)
            if standing.round != command.round:
                raise OperatorError(
                    "E404",
                    f"cannot resume from {command.resume}",
                    f"it was made at round {standing.round}, not {command.round}",
                    "begin at the checkpoint's round, then apply the later ones",
                )
            self.round_step, self.step = standing.round_step, standing.step
            self.tokens, self.rewarm_from = standing.tokens, standing.rewarm_from
            self.carried, self.unsent = standing.carried, standing.unsent
        self.begun = True
        if command.evaluate:
            self._report(Evaluated(self.round, self.step, self.evaluate()))
        self._read_vectors(None)

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """θ into ``sent``, which rank 0 has opened for this; closes it."""
        _, sent = self._vectors()
        for name, parameter in self.parameters.items():
            whole = gather(parameter.detach())
            if sent:
                sent[name].copy_(whole)
        work = self.carried + self.unsent
        self.carried, self.outstanding, self.unsent = Work(), work, Work()
        if self.leader is None:
            return
        finite = all(bool(view.isfinite().all()) for view in sent.values())
        self.leader.vectors.end_snapshot(self.round)
        self._report(
            Snapshot(
                round=self.round,
                steps=work.steps,
                tokens=work.tokens,
                loss=work.loss,
                seconds=work.seconds,
                finite=finite and self.bad_steps < BAD_STEPS,
            )
        )

    @torch.no_grad()
    def apply(self, command: Apply) -> None:
        """θ ← base + (θ − sent), or ``base`` with all local work dropped."""
        base, sent = self._vectors()
        since: dict[str, Tensor] = {}  # θ − sent, kept aside while `base` itself is evaluated
        for name, parameter in self.parameters.items():
            mine = local(parameter)
            if command.reset:
                mine.copy_(scatter(base.get(name), parameter))
                continue
            mine.sub_(scatter(sent.get(name), parameter))
            if command.evaluate:
                since[name] = mine.clone()
                mine.zero_()
            mine.add_(scatter(base.get(name), parameter))
        loss = self.evaluate() if command.evaluate else None
        for name, rest in since.items():
            local(self.parameters[name]).add_(rest)
        if command.reset:
            sanitise(self.optimizer)
            self.carried, self.unsent, self.bad_steps = Work(), Work(), 0
        elif not command.contributed and self.outstanding is not None:
            self.carried = self.outstanding
        self.outstanding = None
        self.round, self.round_step = command.round, 0
        self.slot, self.slots = command.slot, command.slots
        self.target_steps = command.target_steps
        self._read_vectors(loss)

    def checkpoint(self, command: Checkpoint) -> None:
        """Write the trainer's files; a disk that is full or broken is reported, no more."""
        standing = Standing(
            round=self.round,
            round_step=self.round_step,
            step=self.step,
            tokens=self.tokens,
            rewarm_from=self.rewarm_from,
            optimizer_steps=optimizer_steps(self.optimizer),
            carried=self.carried + (self.outstanding or Work()),
            unsent=self.unsent,
        )
        problem, full = "", False
        try:
            save(Path(command.directory), self.parameters, self.optimizer, standing, self.ranks)
        except OSError as error:
            problem, full = str(error), error.errno in FULL_DISK
        self._report(Saved(command.directory, problem, full))

    def _read_vectors(self, validation_loss: float | None) -> None:
        """Tell the daemon that nothing is left to read in the vectors."""
        if self.leader is not None:
            self.leader.vectors.clear()
        self._report(Applied(self.round, self.step, self.tokens, validation_loss))

    def _vectors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """``base`` and ``sent`` as views by parameter on rank 0; empty on the others."""
        if self.leader is None:
            return {}, {}
        base, sent = self.leader.vectors.tensors()
        return self.layout.views(base), self.layout.views(sent)


def _read_data(settings: TrainerSettings, ranks: Ranks) -> tuple[TrainingData, Tensor | None]:
    """Training data, and the validation windows int64 [n, T + 1] on the device.

    Raises E204 for more ranks than sequences, E601 for data that cannot be used.
    """
    data, vocabulary = settings.manifest.data, settings.manifest.model.vocab_size
    if data.batch_size < ranks.size:
        raise operator_error(
            "E204",
            f"{ranks.size} ranks are too many",
            why=f"an inner step of this run has {data.batch_size} sequences, a rank needs one",
            fix=f"start with --nproc {data.batch_size} or less",
        )
    try:
        tokens = open_tokens(settings.tokens, vocabulary)
        training = TrainingData.over(tokens, data.seq_len, data.batch_size, data.seed)
        if settings.evaluation is None:
            return training, None
        windows = shard_tokens(settings.evaluation.read_bytes(), data.seq_len)
        return training, windows.to(ranks.device)
    except (OSError, ValueError) as error:
        raise operator_error("E601", why=str(error)) from error


def share(batch: int, rank: int, ranks: int, micro_batch: int) -> list[range]:
    """A rank's rows of the batch, in parts of at most ``micro_batch`` where possible.

    Row i belongs to rank i mod ``ranks``. All ranks get equally many parts and no part is empty,
    since each part is one round of collective calls.
    """
    rows = range(rank, batch, ranks)
    parts = min(math.ceil(math.ceil(batch / ranks) / micro_batch), batch // ranks)
    cuts = [len(rows) * i // parts for i in range(parts + 1)]
    return [rows[start:stop] for start, stop in pairwise(cuts)]
