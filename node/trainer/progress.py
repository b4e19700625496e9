"""Where an island stands between the rounds, and how θ meets the outer state.

Whoever takes the inner steps, Atoll's own loop (:mod:`node.trainer.loop`) or a script of the
user's (:mod:`node.script`), counts them here, asks here what is due, and carries out here what
the daemon commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from node.checkpoint import FULL_DISK
from node.trainer.channel import (
    Applied,
    Apply,
    Begin,
    Checkpoint,
    Evaluated,
    Report,
    Saved,
    Snapshot,
)
from node.trainer.layout import Layout
from node.trainer.leader import Leader
from node.trainer.parallel import Ranks
from node.trainer.resume import Standing, Work, load, optimizer_steps, sanitise, save
from node.trainer.weights import Weights
from protocols.errors import OperatorError

OVERDUE = 2  # rounds' worth of steps that have not been sent
BAD_STEPS = 3  # steps without a finite gradient after which the island says that it is lost


class Progress:
    """What one rank knows of its island's place in the run; θ are ``parameters``, by reference.

    Parameters given by name are such that every rank has its part of each (a plain tensor, or a
    DTensor).

    All methods that move tensors must be called by every rank. ``leader`` is given on rank 0 only.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter] | Weights,
        optimizer: torch.optim.Optimizer,
        layout: Layout,
        ranks: Ranks,
        leader: Leader | None,
        overlap: int,
    ) -> None:
        if not isinstance(parameters, Weights):
            parameters = Weights.of(parameters, layout, ranks)
        self.weights, self.optimizer, self.layout = parameters, optimizer, layout
        self.ranks, self.leader, self.overlap = ranks, leader, overlap
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

    def evaluate(self) -> float | None:
        """Loss on the shared validation shard with θ as it is; None without one."""
        return None

    def count(self, done: Work, *, finite: bool) -> None:
        """An inner step was taken; ``finite``: its loss and gradient were."""
        self.bad_steps = 0 if finite else self.bad_steps + 1
        self.unsent += done
        self.round_step += 1
        self.step += 1
        self.tokens += done.tokens

    @torch.no_grad()
    def begin(self, command: Begin) -> None:
        """Take ``base`` as θ, or θ and the moments of a checkpoint that was made on it."""
        base, _ = self._vectors()
        self.optimizer.state.clear()
        for name in self.weights.names:
            self.weights.set(name, base.get(name))
        self.round, self.slot, self.slots = command.round, command.slot, command.slots
        self.target_steps = command.target_steps
        self.step, self.tokens = command.step, command.tokens
        self.round_step = self.bad_steps = 0
        self.carried, self.outstanding, self.unsent = Work(), None, Work()
        self.rewarm_from = command.step if command.rewarm else None
        if command.resume:
            standing = load(Path(command.resume), self.weights, self.optimizer)
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
            self.report(Evaluated(self.round, self.step, self.evaluate()))
        self._read_vectors(None)

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """θ into ``sent``, which rank 0 has opened for this; closes it."""
        _, sent = self._vectors()
        for name in self.weights.names:
            whole = self.weights.gather(name)
            if sent:
                assert whole is not None
                sent[name].copy_(whole)
        work = self.carried + self.unsent
        self.carried, self.outstanding, self.unsent = Work(), work, Work()
        if self.leader is None:
            return
        finite = all(bool(view.isfinite().all()) for view in sent.values())
        self.leader.vectors.end_snapshot(self.round)
        self.report(
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
        since: dict[str, list[Tensor]] = {}  # θ − sent, kept aside while `base` is evaluated
        for name in self.weights.names:
            mine = self.weights.local(name)
            if command.reset:
                self.weights.set(name, base.get(name))
                continue
            was = self.weights.scatter(name, sent.get(name))
            for part in mine:
                assert was is not None
                part.sub_(was)
            if command.evaluate:
                since[name] = [part.clone() for part in mine]
                for part in mine:
                    part.zero_()
            new = self.weights.scatter(name, base.get(name))
            for part in mine:
                assert new is not None
                part.add_(new)
        loss = self.evaluate() if command.evaluate else None
        for name, rests in since.items():
            for part, rest in zip(self.weights.local(name), rests, strict=True):
                part.add_(rest)
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
            save(Path(command.directory), self.weights, self.optimizer, standing)
        except OSError as error:
            problem, full = str(error), error.errno in FULL_DISK
        self.report(Saved(command.directory, problem, full))

    def _read_vectors(self, validation_loss: float | None) -> None:
        """Tell the daemon that nothing is left to read in the vectors."""
        if self.leader is not None:
            self.leader.vectors.clear()
        self.report(Applied(self.round, self.step, self.tokens, validation_loss))

    def _vectors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """``base`` and ``sent`` as views by parameter on rank 0; empty on the others."""
        if self.leader is None:
            return {}, {}
        base, sent = self.leader.vectors.tensors()
        return self.layout.views(base), self.layout.views(sent)

    def report(self, report: Report) -> None:
        """Tell the daemon; only rank 0 does."""
        if self.leader is not None:
            self.leader.channel.send(report)
