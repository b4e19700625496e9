"""How θ meets the outer state between the rounds.

Whatever takes the inner steps, Atoll's own loop (:mod:`node.trainer.loop`) or a user's script
(:mod:`node.script`), counts them and asks what is due (:mod:`node.trainer.cycle`), and carries out
here what the daemon commands.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from diloco.pseudo_gradient import is_finite
from node.trainer.afresh import begin_afresh
from node.trainer.channel import (
    Applied,
    Apply,
    Begin,
    Cold,
    Donate,
    Evaluated,
    InnerSteps,
    Report,
    Save,
    Shift,
    Shifted,
    Snapshot,
    Stop,
    Stopped,
    Terms,
)
from node.trainer.copies import Copies
from node.trainer.cycle import BAD_STEPS, Cycle
from node.trainer.files import Files
from node.trainer.fragment_progress import FragmentProgress
from node.trainer.layout import Layout
from node.trainer.leader import Action, Leader, TakeSnapshot
from node.trainer.moments import read
from node.trainer.numbers import Numbers
from node.trainer.optim import REENTRY_STEPS
from node.trainer.optimizer_state import (
    NEAR,
    Unused,
    distance,
    optimizer_steps,
    sanitise,
    stateless,
    untaken,
)
from node.trainer.parallel import Ranks
from node.trainer.remainders import Remainders
from node.trainer.resume import load
from node.trainer.trainer_state import FragmentState, TrainerState
from node.trainer.weights import Weights, gradient, local
from protocols.errors import OperatorError


class Progress(Cycle):
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
        super().__init__([layout.names(fragment) for fragment in range(len(layout.cuts))], overlap)
        self.weights, self.optimizer, self.layout = parameters, optimizer, layout
        self.ranks, self.leader = ranks, leader
        self.remainders = Remainders(parameters, Copies(optimizer))
        # False: what was decided is being carried out, or an exception has broken it off: θ may be
        # half written, and the daemon may wait for an answer that never comes
        self.whole = True
        self.forgets = False  # see :class:`~node.trainer.channel.Begin`
        self.unused: Unused | None = None  # where it forgets
        self.rewarm_from: int | None = None
        self.files = Files(self.weights, optimizer, self.report)

    def evaluate(self) -> float | None:
        """Loss on the shared validation shard with θ as it is; None without one."""
        return None

    def first_evaluation(self) -> float | None:
        """See :meth:`evaluate`; of a run's beginning, before anything is merged."""
        return self.evaluate()

    def outline(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Names and shapes that a checkpoint has to tell, as nothing else of the run does."""
        return ()

    def carry_out(self, action: Action) -> bool:
        """Do what rank 0 has decided, but for an inner step; whether the daemon says stop."""
        self.whole = False
        stop = self._carry_out(action)
        self.whole = True
        return stop

    def _carry_out(self, action: Action) -> bool:
        match action:
            case TakeSnapshot(fragment):
                self.take_snapshot(fragment)
            case Apply():
                self.apply(action)
            case Shift():
                self.shift(action)
            case Begin():
                self.begin(action)
            case InnerSteps(target_steps):
                self.target_steps = target_steps
            case Terms():
                self.overlap = action.overlap_steps
                if self.leader is not None:
                    self.leader.wait_s = action.wait_s
            case Save():
                self.checkpoint(action)
            case Donate():
                cold = self.rewarm_from is not None and self.step - self.rewarm_from < REENTRY_STEPS
                self.files.donate(action.path, warm=not cold)
            case Stop():
                self.files.finish()
                self.report(Stopped())
                return True
        return False

    @torch.no_grad()
    def begin(self, command: Begin) -> None:
        """Take ``base`` as θ, or θ and the moments of a checkpoint that was made on it.

        An optimizer that has moments already, a script's, keeps them where θ is near ``base``.
        """
        base, _ = self._vectors()
        keeps = not (command.resume or command.moments or command.forgets)
        unused = self.ranks.all_true(untaken(self.optimizer))
        warm = keeps and not unused
        cold = ""  # why moments are lost
        if warm and (far := distance(self.weights, base)) > NEAR:
            warm, cold = False, f"θ was {far:.2g} of the model's norm away from the swarm's"
        if not (warm or unused):  # some would miss what they have made before their first step
            begin_afresh(self.optimizer)
        self.unused = Unused(self.optimizer) if command.forgets else None
        rounds = (command.round, *command.others)
        self.slot, self.slots = command.slot, command.slots
        self.numbers = Numbers(command.batches) if command.batches else None
        self.at_will, self.forgets = command.at_will, command.forgets
        self.gradients, self.in_hand = command.gradients, False
        for name in self.weights.names:
            self._take(name, base.get(name), shifts=warm)
        self.step, self.tokens = command.step, command.tokens
        self.position = command.step
        self.round_step, self.bad_steps = command.round_step, 0
        states = tuple(FragmentState(round=round_) for round_ in rounds)
        self.rewarm_from = command.step if cold or (command.rewarm and not warm) else None
        if command.resume:
            states, cold = self._resume(Path(command.resume), rounds)
        elif command.moments and not (self.forgets or self.gradients):
            with self.remainders.through():
                cold = self._take_moments(Path(command.moments), command.moments_steps)
        self._take_terms(command)
        for progress, state in zip(self.fragments, states, strict=True):
            progress.begin(state)
        self.begun = True
        if cold:
            self.report(Cold(self.step, cold[:2000]))
        if command.evaluate:
            self.report(Evaluated(self.round, self.step, self.first_evaluation()))
        self._read_vectors(None, None)

    def _resume(self, path: Path, rounds: tuple[int, ...]) -> tuple[tuple[FragmentState, ...], str]:
        """Take what a checkpoint of these rounds has: its fragments, and why moments are lost."""
        # no remainders are in it: those of ``base`` are the same wherever nothing was rebased
        self.remainders.take_over()
        kept, cold = load(path, self.weights, self.optimizer, one_disk=self.files.one_disk)
        if cold or not kept.optimizer_steps:
            self.remainders.settle()
        else:
            self.remainders.believe()
        states = kept.fragments
        if (made := tuple(state.round for state in states)) != rounds:
            raise OperatorError(
                "E404",
                f"cannot resume from {path}",
                f"it was made at round {_listed(made)}, not {_listed(rounds)}",
                "begin at the checkpoint's round, then apply the later ones",
            )
        self.round_step, self.step = kept.round_step, kept.step
        self.position = max(kept.position, kept.step)
        self.tokens, self.rewarm_from = kept.tokens, kept.rewarm_from
        if self.gradients:  # no checkpoint has the one that was in hand: its step comes again
            lost = states[0].carried + states[0].unsent
            states, self.round_step = (FragmentState(round=rounds[0]),), 0
            self.step, self.tokens = self.step - lost.steps, self.tokens - lost.tokens
            self.position -= lost.steps
        if self.forgets or self.gradients:
            return states, ""  # there are none to lose
        if kept.step and not (cold or kept.optimizer_steps or stateless(self.optimizer)):
            cold = "the checkpoint holds none"
        if cold:
            self.rewarm_from = self.step  # its moments are as cold as a joiner's
        return states, cold

    def _take_moments(self, path: Path, steps: int) -> str:
        """Take a donor's moments, or an earlier checkpoint's; why some of them are lost."""
        if steps and self.files.moment_layout is not None:
            read(path, steps, self.files.moment_layout, self.weights, self.optimizer)
        if steps:
            return ""
        one_disk = self.files.one_disk
        try:
            kept = (path, self.weights, self.optimizer)
            earlier, lost = load(*kept, one_disk=one_disk, earlier=True)
        except OperatorError as error:  # raised on all ranks; the checkpoint may be gone by now
            self.rewarm_from = self.step
            return error.why
        self.rewarm_from = self.step if lost else earlier.rewarm_from
        return lost

    @torch.no_grad()
    def take_snapshot(self, fragment: int = 0) -> None:
        """A fragment of θ, or of its gradient, into ``sent``, open on rank 0; closes it."""
        _, sent = self._vectors()
        progress, finite = self.fragments[fragment], True
        for name in self._of(progress):
            whole = self.weights.gather(name, gradient if self.gradients else self.remainders.exact)
            if sent:
                assert whole is not None
                sent[name].copy_(whole)
                # on its device, where it takes no time; a script's may have another type
                same = whole if whole.dtype == torch.float32 else sent[name]
                finite = finite and is_finite(same.reshape(-1))
        work = progress.send()
        if self.leader is None:
            return
        self.leader.vectors.end_snapshot(progress.round, fragment)
        self.report(
            Snapshot(
                round=progress.round,
                steps=work.steps,
                tokens=work.tokens,
                finite=finite and self.bad_steps < BAD_STEPS,
                fragment=fragment,
                round_step=self.round_step,
                skipped=work.skipped,
            )
        )

    @torch.no_grad()
    def apply(self, command: Apply) -> None:
        """θ ← base + (θ − sent), or ``base`` with all local work dropped; of one fragment.

        The round is applied and told of also where the evaluation raises, which the caller sees.
        """
        base, sent = self._vectors()
        progress = self.fragments[command.fragment]
        aside: dict[str, list[Tensor]] = {}  # θ, where `base` is in its place to be evaluated
        for name in self._of(progress):
            if command.reset or self.gradients:
                self._take(name, base.get(name))
                continue
            was = self.weights.scatter(name, sent.get(name))
            new = self.weights.scatter(name, base.get(name))
            for parameter in self.weights.parts.get(name, ()):
                assert was is not None
                assert new is not None
                self.remainders.rebase(parameter, new, was, voids=command.voids)
                part = local(parameter)
                if command.evaluate:  # put in now, or it has to come from rank 0 once more
                    aside.setdefault(name, []).append(part.clone())
                    part.copy_(new)
        loss = None
        try:
            if command.evaluate:
                loss = self._evaluate_base(base, progress, aside)
        finally:  # a script's own evaluation may raise whatever it likes
            self._answer(command, progress, loss)
            self.whole = True

    def _answer(self, command: Apply, progress: FragmentProgress, loss: float | None) -> None:
        """Do all else that follows once θ has taken a round in."""
        if command.reset:
            sanitise(self.optimizer)
            self.bad_steps = 0
        # only fragment 0's merge begins a round for all of θ; at will, only one with own work in it
        begins = command.fragment == 0 and (command.contributed or not self.at_will)
        if self.forgets and (begins or command.reset):
            with self.remainders.through():
                assert self.unused is not None
                self.unused.restore(self.optimizer)
        if self.gradients:  # a gradient that was taken elsewhere is worth nothing here
            self.optimizer.zero_grad()
            self.in_hand = False
        dropped = command.reset or self.gradients
        lost = progress.answer(command.round, contributed=command.contributed, reset=dropped)
        if command.fragment == 0:
            self.round_step = command.round_step
        if self.numbers is not None and command.batches:
            self.numbers.give(command.batches, anew=command.anew)
        self.slot, self.slots = command.slot, command.slots
        self._take_terms(command)
        # a gradient is of one round alone, and no step of it is missed in another
        self._read_vectors(loss, command.fragment, dropped=0 if self.gradients else lost)

    @torch.no_grad()
    def shift(self, command: Shift) -> None:
        """θ ← θ + ``sent``, of one fragment; the snapshot that is out stays so."""
        _, sent = self._vectors()
        for name in self._of(self.fragments[command.fragment]):
            by = self.weights.scatter(name, sent.get(name))
            for parameter in self.weights.parts.get(name, ()):
                assert by is not None
                self.remainders.shift(parameter, by)
        self.report(Shifted(command.fragment))

    def _take(self, name: str, whole: Tensor | None, *, shifts: bool = False) -> None:
        """θ ← ``whole``; nothing beside it is of use where gradients are sent, and not θ."""
        if self.gradients:
            self.weights.set(name, whole)
        else:
            self.remainders.set(name, whole, shifts=shifts)

    def _evaluate_base(
        self, base: dict[str, Tensor], done: FragmentProgress, aside: dict[str, list[Tensor]]
    ) -> float | None:
        """The loss of all of ``base``, which the fragment ``done`` is already; θ comes back.

        ``aside``: θ of ``done``; nothing where it is ``base`` itself. However this ends, it ends
        without a collective call: one rank's evaluation may raise where another's does not.
        """
        try:
            for name in self.weights.names:
                if name not in done.names:
                    aside[name] = [part.clone() for part in self.weights.local(name)]
                    self.weights.set(name, base.get(name))
            return self.evaluate()
        finally:
            for name, parts in aside.items():
                for part, mine in zip(self.weights.local(name), parts, strict=True):
                    part.copy_(mine)

    def _of(self, progress: FragmentProgress) -> list[str]:
        return [name for name in self.weights.names if name in progress.names]

    def _take_terms(self, command: Begin | Apply) -> None:
        self.target_steps = command.target_steps
        self.position = max(self.position, command.position)
        if command.tau is not None:
            self.overlap = command.tau

    def checkpoint(self, command: Save) -> None:
        """Begin to write θ, moments and where the island stands."""
        self.remainders.complete()
        state = TrainerState(
            fragments=tuple(progress.state() for progress in self.fragments),
            round_step=self.round_step,
            step=self.step,
            tokens=self.tokens,
            position=self.position,
            rewarm_from=self.rewarm_from,
            optimizer_steps=optimizer_steps(self.optimizer),
            batches=self.batches,
            parameters=self.outline(),
        )
        self.files.save(command.directory, state)

    def _read_vectors(
        self, validation_loss: float | None, fragment: int | None, *, dropped: int = 0
    ) -> None:
        """Tell the daemon that the fragment of the vectors (None: all) is read and free again."""
        if self.leader is None:
            return
        self.leader.vectors.clear(fragment)
        round_ = self.fragments[fragment or 0].round
        self.report(
            Applied(
                round_,
                self.step,
                self.tokens,
                validation_loss,
                fragment,
                self.leader.take_waited_s(),
                self.batches,
                dropped,
            )
        )

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


def _listed(rounds: tuple[int, ...]) -> str:
    return ", ".join(map(str, rounds))
