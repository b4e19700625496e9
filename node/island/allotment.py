"""The numbers of batches that certified work brings its island (:mod:`node.trainer.numbers`)."""

from __future__ import annotations

from pathlib import Path

from bootstrap.manifest import Manifest
from gossip.plans.certificate import merged_tokens
from node.checkpoints.restoring import trainer_state_in
from node.replicas.replica import OuterReplica
from node.trainer.channel import Applied, StepDone
from node.trainer.numbers import MOST, Numbers
from protocols.messages import Outcome


class Allotment:
    """One island's batch numbers, as its trainer says: restarted ranks go on with them.

    Steps are not counted here. Reports of some are still under way when a round brings numbers, and
    a copy that counted them then would be ahead of the trainer: restarted ranks would leave out
    what nobody has read.
    """

    def __init__(self, manifest: Manifest, replica: OuterReplica, *, ahead: bool = False) -> None:
        """``replica`` is fragment 0's, whose rounds count.

        ``ahead``: data has to be made before it is read, so one more round's numbers are given.
        """
        data, rounds = manifest.data, manifest.rounds
        self._replica, self._numbered = replica, manifest.numbered
        self._batch = data.batch_size * data.seq_len
        self._at_first = (1 + ahead) * (rounds.inner_steps + rounds.overlap_steps)
        # for islands that have had nothing merged yet, when the run begins
        self._reserve = data.islands * self._at_first
        self._left: tuple[int, ...] = ()  # to read, as the trainer said last, or is to begin with
        self._given: tuple[int, ...] = ()  # on their way to it: behind those, or in their place
        self._anew = False  # in their place

    def begin(self, checkpoint: Path | None, slot: int) -> tuple[int, ...]:
        """What a trainer begins with, from its ``checkpoint`` if there is one."""
        if not self._numbered:
            return ()
        state = trainer_state_in(checkpoint)
        if state is not None and state.batches:
            self._left = state.batches
        else:
            self._left = Numbers(self._left + self._given or self._newcomers(slot)).stretches
        self._given, self._anew = (), False
        return self._left

    def next_batches(self, slot: int) -> tuple[tuple[int, ...], bool]:
        """The numbers that the replica's last move brings, once; and whether all others are void.

        So after a move that merged work of an earlier life, or may have: which numbers that life
        had read, or would have read next, is not known.
        """
        replica = self._replica
        outcome, anew = replica.brought, replica.relived
        replica.brought, replica.relived = None, False
        if not self._numbered or (outcome is None and not anew):
            return (), False
        more = self._newcomers(slot) if outcome is None else self._for(outcome)
        if anew:
            self._left, self._given, self._anew = (), (), True
        self._given = (*self._given, *more)[-2 * MOST :]
        return more, anew

    def heard(self, report: StepDone | Applied) -> None:
        """The trainer says what it has left; its answer for fragment 0 has what was given."""
        if isinstance(report, Applied) and not report.fragment:
            self._given, self._anew = (), False
        if report.batches and not self._anew:
            self._left = report.batches

    def _newcomers(self, slot: int) -> tuple[int, int]:
        """For an island with nothing merged: after all merged work, by its place in the roster."""
        first = self._number(self._replica.place.work) + slot * self._at_first
        return first, first + self._at_first

    def _for(self, outcome: Outcome) -> tuple[int, int]:
        """For this island's work in a round."""
        tokens = merged_tokens(outcome.contributors, outcome.parts)
        at = [one.peer for one in outcome.contributors].index(self._replica.me)
        before = outcome.work - sum(tokens[at:])
        first, end = self._number(before), self._number(before + tokens[at])
        return self._reserve + first, self._reserve + end

    def _number(self, work: int) -> int:
        """The first batch after ``work`` tokens."""
        return -(-work // self._batch)
