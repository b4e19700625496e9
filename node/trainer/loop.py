"""The training loop of one island, run alike by every rank: read :meth:`Trainer.run` first.

An island stands at round r, the number of rounds it has applied. It takes inner steps. After
``target_steps`` of them since then it copies θ into the shared vector ``sent`` and
reports a :class:`Snapshot` (once: the next one waits until this one is answered). It goes on for
``overlap_steps`` inner steps, then waits for the round's outcome, at most ``wait_s`` seconds;
after that it trains on, for a few rounds' worth of steps (:mod:`node.trainer.leader`). The
outcome comes as :class:`Apply`, and is taken in between two inner steps, whenever it comes:

    θ ← base + (θ − sent)

``base`` is the new outer state, and θ − sent what was learnt since the snapshot: nothing when
the loop waited, so that θ is ``base`` exactly; the work of the wait when it did not; all local
work when the round went without this island, for then the daemon has put the old outer state
into ``sent``. Apart from this only three things move θ from outside: :class:`Begin` (to ``base``
or a checkpoint), an :class:`Apply` with ``reset`` or in mode ``allreduce`` (to ``base``), and
:class:`Shift` in mode ``eager``.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from node.data.ahead import ReadPosition
from node.data.cached_file import cache_folder
from node.data.live import StreamData
from node.data.stream_recipe import is_recipe, read_recipe
from node.errors import operator_error
from node.schedule import learning_rate
from node.trainer.channel import Apply, Ready, StepDone
from node.trainer.computing import Computing, has_bf16
from node.trainer.data import Batches, TrainingData, open_tokens, targets, unreadable
from node.trainer.early import HERE, Early, Wait, may_take_long
from node.trainer.engine import Batch, Engine
from node.trainer.evaluate import EVALUATION_BATCH, shard_tokens
from node.trainer.leader import ACTIONS, Action, Idle, Leader, TakeStep
from node.trainer.moments import MomentLayout, moments_last
from node.trainer.optim import (
    clip_gradients,
    make_optimizer,
    reentry_factor,
    set_learning_rate,
)
from node.trainer.parallel import Ranks
from node.trainer.progress import Progress
from node.trainer.settings import TrainerSettings
from node.trainer.speed import Speed
from protocols.errors import reason
from protocols.wire import decode_any


class Trainer(Progress):
    """Model, data and inner steps of one rank."""

    def __init__(self, settings: TrainerSettings, ranks: Ranks, leader: Leader | None) -> None:
        """Build model and data; every rank must call it. ``leader`` is given on rank 0 only."""
        manifest = settings.manifest
        self.settings = settings
        self.inner = manifest.inner
        self.batch = manifest.data.batch_size
        self.micro_batch = settings.micro_batch or self.batch
        self.halved = 0  # how often, for lack of memory
        self.evaluated_at_once = EVALUATION_BATCH
        if settings.micro_batch:  # memory is short, says the operator, or the daemon
            self.evaluated_at_once = min(EVALUATION_BATCH, settings.at_once)
        self._data_s = 0.0  # that this step waited for its batch
        bf16 = settings.bf16
        if bf16 is None:  # the same on all ranks, though their devices may differ
            bf16 = ranks.device.type == "cuda" and ranks.all_true(has_bf16(ranks.device))
        dtype = torch.bfloat16 if bf16 else torch.float32
        computing = Computing(dtype, settings.recompute, settings.offload, settings.compile)
        self.data, self.validation = _read_data(settings, ranks)
        try:
            self.engine = Engine(manifest, ranks, computing)
        except ValueError as error:
            raise operator_error(
                "E204",
                f"the layout {ranks.dims} does not fit the run",
                why=str(error),
                fix="give another one, or --layout auto",
            ) from error
        self.early: Early | None = None
        # decided together: hosts may have the same tokens in different ways
        if not ranks.all_true(not may_take_long(self.data)):
            self.early = Early(self.data)
        self._wait = Wait()
        super().__init__(
            self.engine.weights,
            make_optimizer(self.engine.models, manifest.inner),
            self.engine.layout,
            ranks,
            leader,
            manifest.rounds.overlap_steps,
        )
        self.files.one_disk = settings.hosts == 1
        if moments_last(manifest):
            self.files.moment_layout = MomentLayout.of(self.layout, manifest.inner)
        self.speed = Speed.of(manifest, self.layout.dense, ranks)
        if settings.compile:  # takes a minute or two: before the swarm counts on this island
            self._gradients(self._any_rows)
            self.optimizer.zero_grad()

    # --- the loop -----------------------------------------------------------------------------

    def run(self) -> None:
        """Follow the daemon until it says stop."""
        self.report(Ready(self.layout.size, bytes.fromhex(self.layout.digest)))
        while True:
            action = self._agree()
            if isinstance(action, TakeStep):
                if self._has_batch():
                    self.inner_step()
            elif self.carry_out(action):
                return

    def _agree(self) -> Action:
        """Rank 0's decision, on every rank."""
        action = self.leader.decide(self) if self.leader is not None else Idle()
        if self.ranks.size == 1:
            return action
        return decode_any(self.ranks.broadcast(action.encode()), *ACTIONS)

    def _has_batch(self) -> bool:
        """Whether all ranks have their rows of the next step; raises what reading has met here."""
        if self.early is None:
            return True
        began = time.monotonic()
        here = self.early.here(self._read_position, self.engine.rows(self.micro_batch))
        everywhere = self.ranks.all_true(here)
        signs = [] if everywhere else self.ranks.each(HERE if here else self.early.sign)
        self._data_s += time.monotonic() - began
        if self.ranks.leads and (told := self._wait.look(self.step + 1, signs)) is not None:
            self.report(told)
        return everywhere

    @property
    def _read_position(self) -> ReadPosition:
        if self.numbers is not None and self.data.numbered:
            return ReadPosition(0, 0, 1, self.numbers.next)
        return ReadPosition(self.round, self.slot, self.slots, self.round_step)

    def carry_out(self, action: Action) -> bool:
        """Do it, and have the numbered batches that come next made or fetched meanwhile."""
        before = self.numbers
        stops = super().carry_out(action)
        if self.numbers is not None and (self.numbers is not before or isinstance(action, Apply)):
            self.data.expect(self.numbers.stretches)
        return stops

    # --- one inner step -----------------------------------------------------------------------

    def inner_step(self) -> None:
        """One optimizer step on this island's next batch; skipped if its gradient is not finite."""
        started = time.monotonic() - self._data_s  # plus the time it waited for the batch
        loss = self._gradients(self._rows)
        norm = float(
            clip_gradients(
                self.engine.models.parameters(),
                self.inner.clip_norm,
                self.engine.copies,
                self.ranks,
            )
        )
        lr = learning_rate(self.inner, self.round if self.gradients else self.position)
        if self.rewarm_from is not None:
            lr *= reentry_factor(self.step - self.rewarm_from)
        finite = math.isfinite(loss) and math.isfinite(norm)
        if finite and not self.gradients:
            set_learning_rate(self.optimizer, lr)
            self.optimizer.step()
        self.in_hand = finite and self.gradients  # the outer optimizer takes the step
        if not self.in_hand:
            self.optimizer.zero_grad()
        tokens = self.batch * self.settings.manifest.data.seq_len
        seconds = time.monotonic() - started
        self.count(tokens, finite=finite)
        self.report(
            StepDone(
                self.round,
                self.step,
                loss if finite else None,
                norm if finite else None,
                lr,
                tokens,
                seconds,
                self.speed.mfu(tokens, seconds),
                self._data_s,
                self.micro_batch,
                self.halved,
                self.position,
                finite,
                self.batches,
            )
        )
        self._data_s = 0.0

    def _gradients(self, batch: Batch) -> float:
        """Accumulate the gradient of a batch; the island's mean loss, on every rank.

        Out of memory on a single rank: again with half the micro-batch, the batch stays. (With
        several the others are inside a collective, and FSDP is in the middle of a layer; the daemon
        starts all of them again.)
        """
        while True:
            try:
                return self.engine.gradients(batch, self.micro_batch)
            except torch.OutOfMemoryError:
                if self.ranks.mesh is not None or self.micro_batch == 1:
                    raise
                self.micro_batch = -(-min(self.micro_batch, self.batch) // 2)
                self.halved += 1
            self.optimizer.zero_grad()
            torch.cuda.empty_cache()

    def _rows(self, rows: range) -> tuple[Tensor, Tensor]:
        began = time.monotonic()
        place = self._read_position
        if self.early is not None:
            batch = self.early.batch(place, rows)
        else:
            batch = self.data.batch(place.round, place.slot, place.slots, place.step, rows)
        self._data_s += time.monotonic() - began
        return batch

    def _any_rows(self, rows: range) -> tuple[Tensor, Tensor]:
        """A batch that looks like one of the run's, the same on ranks that share its rows.

        This island's place is not known yet, and reading at another one may take minutes.
        """
        words = torch.Generator().manual_seed(rows.start)
        shape = (len(rows), self.engine.seq_len + 1)
        model = self.settings.manifest.model
        window = torch.randint(model.vocab_size, shape, generator=words)
        return window[:, :-1], targets(window, self.engine.document_end)

    def evaluate(self) -> float | None:
        """Loss on the shared validation shard with θ as it is; None without one."""
        if self.validation is None:
            return None
        while True:
            try:
                loss = self.engine.evaluate(self.validation, self.evaluated_at_once)
                return loss if math.isfinite(loss) else None
            except torch.OutOfMemoryError:  # see _gradients; the micro-batch is not the cause
                if self.ranks.mesh is not None or self.evaluated_at_once == 1:
                    raise
                self.evaluated_at_once //= 2
            torch.cuda.empty_cache()


def _training_data(settings: TrainerSettings) -> Batches:
    manifest, cache = settings.manifest, settings.cache
    if is_recipe(settings.tokens):
        return StreamData(read_recipe(settings.tokens), manifest, cache or cache_folder())
    vocabulary = manifest.model.vocab_size
    tokens = open_tokens(settings.tokens, vocabulary, cache, settings.cache_bytes)
    return TrainingData.of(manifest, tokens)


def _read_data(settings: TrainerSettings, ranks: Ranks) -> tuple[Batches, Tensor | None]:
    """Training data, and the validation windows int64 [n, T + 1] on the device.

    Raises E601 for data that cannot be used.
    """
    data, vocabulary = settings.manifest.data, settings.manifest.model.vocab_size
    shard = settings.evaluation
    try:
        training = _training_data(settings)
        if shard is None:
            return training, None
        windows = shard_tokens(shard.read_bytes(), data.seq_len, vocabulary)
        return training, windows.to(ranks.device)
    except OSError as error:
        if shard is not None and error.filename == str(shard):
            raise operator_error(
                "E601",
                f"cannot read the run's evaluation text {shard}",
                why=reason(error),
                fix="start again: a peer given with --peers has it as well",
            ) from error
        raise unreadable(settings.tokens, error) from error
    except ValueError as error:
        raise operator_error("E601", why=str(error)) from error
