"""A script's side of where its island stands in the run, and of how its steps are counted."""

from __future__ import annotations

import logging
import math
import secrets
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from node.errors import operator_error
from node.script.buffers import mend
from node.script.optimizers import Watch
from node.script.parameters import addresses_of, refuse_shared, training
from node.trainer.channel import Apply, Begin, ChannelClosedError, Report, Save, Shift
from node.trainer.optimizer_state import unkept
from node.trainer.progress import Progress
from protocols.errors import OperatorError

logger = logging.getLogger(__name__)
MOST_TOKENS = 2**40  # of one step; a run's sum has to stay below 2^63

# steps in a row without any, and as many as a round has: fewer may be batches that are all masked
UNCOUNTED = 10


def elsewhere(code: str, what: str, why: str) -> OperatorError:
    """What has happened on another rank, for this one."""
    fix = "see what the other ranks printed; start all of them again, with resume=True"
    return operator_error(code, what, why=why, fix=fix)


def counted(tokens: int | Tensor) -> int:
    """Tokens of a step: also where a script has summed them up in a tensor, or in numpy."""
    try:
        count = int(tokens)
        if float(tokens) != count:  # less than one would count as none
            count = -1
    except (TypeError, ValueError, OverflowError, RuntimeError):  # torch's, of several elements
        count = -1
    if not 0 <= count <= MOST_TOKENS:
        raise operator_error(
            "E204",
            f"tokens={str(tokens)[:100]} is not a number of tokens",
            why=f"an inner step is of 0 to {MOST_TOKENS:,} whole tokens",
            fix="give island.step the tokens of this step's batch, of the whole island",
        )
    return count


def _number(loss: Any) -> float:
    """What a script's evaluation has returned."""
    try:
        return float(loss)
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # as in `counted`
        raise operator_error(
            "E204",
            f"the script's evaluate has returned {str(loss)[:100]}",
            why="it has to return the validation loss, a number",
            fix="end it with return loss",
        ) from error


class ScriptProgress(Progress):
    """Progress of a script's model, which only the script itself can evaluate."""

    def __init__(self, evaluator: Callable[[], float] | None, *given: Any) -> None:
        super().__init__(*given)
        self.evaluator = evaluator
        self.model: nn.Module | None = None  # the model whose parameters have joined
        self.sharded: Sequence[FSDPModule] = ()
        self.watch: Watch | None = None
        self.over = False  # the run is complete, this node was stopped, or it has left
        self.on_end: Callable[[], object] | None = None
        self._addresses: list[int] = []  # of parameters that share no memory
        self._looked = False
        self._told = ""  # what of the optimizer's state no checkpoint holds
        self._uncounted = 0  # steps without tokens in a row, but for those that went astray

    def begin(self, command: Begin) -> None:
        """See :meth:`Progress.begin`; a checkpoint to go on from says who sees the disk."""
        if place := command.resume or command.moments:
            self._look(Path(place))
        self._reshard()
        super().begin(command)

    def apply(self, command: Apply) -> None:
        """See :meth:`Progress.apply`; running statistics may have gone astray with θ."""
        self._reshard()
        if command.reset and self.model is not None and (spoiled := mend(self.model)):
            logger.warning(
                "buffers of the model are NaN since its steps went astray: %s; only the script can "
                "set them anew",
                ", ".join(spoiled)[:200],
            )
        super().apply(command)

    def shift(self, command: Shift) -> None:
        """See :meth:`Progress.shift`."""
        self._reshard()
        super().shift(command)

    def count(self, tokens: int, *, finite: bool) -> None:
        """See :meth:`Cycle.count`; raises E204 where a round would weigh nothing in the merge.

        It counts by rank 0 what an island has done, so that no other rank has to.
        """
        uncounted = 0 if tokens else self._uncounted + finite
        if self.ranks.leads and uncounted >= max(UNCOUNTED, self.target_steps):
            raise operator_error(
                "E204",
                f"the script has counted no tokens in {uncounted} steps",
                why="the swarm weighs islands by what they have trained on: nothing of this one "
                "would be merged, and each merge would undo what it has learnt",
                fix="give island.step the tokens of each batch; where there are none, its images, "
                "frames or samples, counted alike on all islands, or 1 a step",
            )
        self._uncounted = uncounted
        super().count(tokens, finite=finite)

    def check_training(self) -> None:
        """Raise E204 where the script trains what takes no part, or by an optimizer unknown here.

        Sharded parameters are compared by name alone: while a forward pass has gathered them, other
        tensors are in their places.
        """
        if self.watch is not None:
            self.watch.check()
        self._check_memory()
        if self.model is None:
            return
        joined = {id(parts[0]): name for name, parts in self.weights.parts.items()}
        if {id(p) for p in self.model.parameters() if p.requires_grad} == joined.keys():
            return  # nearly always
        there = {id(parameter) for parameter in self.model.parameters()}
        gone = [name for place, name in joined.items() if place not in there]
        if gone and not self.sharded:
            raise operator_error(
                "E204",
                f"{len(gone)} of the model's parameters are not those that have joined",
                why=f"{', '.join(gone)[:200]}: replaced after node.join, and never merged since",
                fix="replace parameters before node.join, or copy into those that are there "
                "(load_state_dict without assign=True)",
            )
        late = training(self.model).keys() - self.weights.parts.keys()
        if late:
            raise operator_error(
                "E204",
                f"{len(late)} parameters that require a gradient have not joined",
                why=f"{', '.join(sorted(late))[:200]}: unfrozen or added after node.join, so no "
                "round would merge them",
                fix="let all parameters that will ever train require a gradient at node.join, and "
                "freeze afterwards what is not to train yet",
            )

    def _check_memory(self) -> None:
        """Raise E204 where parameters have been put into each other's memory since they joined."""
        joined = {name: parts[0] for name, parts in self.weights.parts.items()}
        addresses = addresses_of(joined.values())
        if addresses != self._addresses:  # they are looked at once, and seldom move
            refuse_shared(joined)
            self._addresses = addresses

    def end(self) -> None:
        """The island is over: what the script trains from now on is its own affair."""
        self.over = True
        if self.on_end is not None:
            self.on_end()
        if self.watch is not None:
            self.watch.end()

    def _reshard(self) -> None:
        """Drop what forward passes have gathered, which hides what is written to the shards."""
        for module in self.sharded:
            module.reshard()

    def checkpoint(self, command: Save) -> None:
        """See :meth:`Progress.checkpoint`; the first one says what none can hold."""
        self._look(Path(command.directory))
        if not self._told:
            self._told = unkept(self.weights, self.optimizer.state)
            if self._told and self.ranks.leads:
                logger.warning("%s: after a resume the optimizer begins anew there", self._told)
        super().checkpoint(command)

    def outline(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """See :meth:`Progress.outline`: the manifest has only their hash."""
        return tuple((entry.name, tuple(entry.shape)) for entry in self.layout.entries)

    def _look(self, directory: Path) -> None:
        """Find out, once, whether all ranks see the node's disk: their hosts are not known."""
        if self._looked or self.ranks.size == 1:
            return
        word, mark = "", directory / ".seen"
        if self.ranks.leads:
            with suppress(OSError):  # a full disk is reported when the checkpoint is written
                mark.write_text(written := secrets.token_hex(16), encoding="utf-8")
                word = written
        word = self.ranks.broadcast(word.encode()).decode()
        self._looked = bool(word)  # else this try says nothing, and the next may
        seen = False
        with suppress(OSError):
            seen = bool(word) and mark.read_text(encoding="utf-8") == word
        self.files.one_disk = self.ranks.all_true(seen)
        if self.ranks.leads:
            with suppress(OSError):  # it is removed with the draft folder at last
                mark.unlink(missing_ok=True)

    def report(self, report: Report) -> None:
        """See :meth:`Progress.report`; a node that is gone is met where it is asked what to do.

        All ranks hear of it there.
        """
        with suppress(ChannelClosedError):
            super().report(report)

    def evaluate(self) -> float | None:
        """Validation loss of the model as it is, None where the script gave no evaluation.

        Raises OperatorError E204 where it returns no number, E405 where another rank's evaluation
        has raised.
        """
        loss, well = math.nan, False
        try:
            if self.evaluator is not None:
                loss = _number(self.evaluator())
            well = True
        finally:
            self._reshard()
            alike = self.ranks.unanimous(well)
        if not alike:
            what = "the evaluation of another rank of this script has failed"
            raise elsewhere("E405", what, "ranks that go on without it would not stay in step")
        return loss if math.isfinite(loss) else None

    def first_evaluation(self) -> float | None:
        """See :meth:`evaluate`; where that raises, the join goes on without a loss.

        It may need what the script has only once it has joined, and a run whose creator is gone
        before its first step would be in the way of the next one. Dropout and the like are then as
        they were before.
        """
        modules = self.model.modules() if self.model is not None else ()
        modes = [(module, module.training) for module in modules]
        try:
            return self.evaluate()
        except Exception as error:  # whatever the script raises: the log has it
            for module, training in modes:
                module.training = training
            logger.warning(
                "the script's evaluate has failed before its first step (%s: %s), so the loss of "
                "the model as it is now is not known; after a merge island.step raises such errors",
                type(error).__name__,
                error,
                exc_info=True,
            )
            return None
