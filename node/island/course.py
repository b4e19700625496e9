"""What an island's trainer is told to do next: inner steps, data, evaluations. Not when it is told.

Its cycle goes from fragment 0's merge to the next one; where islands meet at will, from one
contribution to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from gossip.common import AnySwarm
from node.checkpoints.restoring import steps_in
from node.island.allotment import Allotment
from node.island.beginning import Beginning
from node.island.choosing import Chooser
from node.island.pace import Pace
from node.island.targets import Targets
from node.modes import at_will, once
from node.monitor.event_log import EventLog
from node.multiples import Multiples
from node.replicas.replica import OuterReplica
from node.trainer.channel import Applied, Apply, Begin, StepDone
from node.trainer.fragment_progress import offset
from protocols.identity import PeerId
from protocols.messages import UNKNOWN_ETA_S

# Before a step was timed. Less than UNKNOWN_ETA_S, which says that an island cannot begin yet:
# by that a run's creator counts whom it waits for, and a newcomer knows whom a round waits for.
UNTIMED_ETA_S = 60.0


@dataclass(frozen=True)
class DataAssignment:
    """The data that an island reads next, given where a fragment stands."""

    slot: int  # its place among the islands that read a round's windows
    slots: int  # how many these are
    batches: tuple[int, ...] = ()  # more of them, by number
    anew: bool = False  # earlier batches are void


class Course:
    """Of one island; ``replicas`` are by fragment."""

    def __init__(
        self,
        manifest: Manifest,
        me: PeerId,
        replicas: tuple[OuterReplica, ...],
        pace: Pace,
        events: EventLog,
        *,
        own_inner_steps: int,
        streams: bool,
    ) -> None:
        """``own_inner_steps``: the operator's H, 0: none.

        ``streams``: data has to be made before it is read.
        """
        self.manifest, self.replicas, self.pace = manifest, replicas, pace
        self.chooser = Chooser(manifest, pace, events, own_inner_steps)
        self.targets = Targets(manifest, me, replicas, self.chooser)
        self.target = 0  # inner steps from one contribution to the next; 0: at rest
        self.since = 0  # inner steps of the cycle so far
        self._ended = False
        self._allotment = Allotment(manifest, replicas[0], ahead=streams)
        start = replicas[0].place.round
        self._evaluations = Multiples(manifest.rounds.eval_every, start)
        self._at_will = at_will(manifest)

    # --- what is told ----------------------------------------------------------------------------

    def begin(self, beginning: Beginning, swarm: AnySwarm, steps_read: int) -> Begin:
        """For ranks that begin; data of so many ``steps_read`` is not read again."""
        rounds, checkpoint = [r.place.round for r in self.replicas], beginning.checkpoint
        called = self._roll_was_called
        if called:
            beginning.joined = False  # all are as cold
        self._evaluations.pass_over(rounds[0])
        slot, slots = self.targets.slot(swarm)
        self.aim(swarm, anew=range(len(rounds)))
        self.since = steps_in(checkpoint, at_will=self._at_will)
        if not (checkpoint or self._at_will):
            self.since = steps_read
        return beginning.command(
            rounds,
            self.target,
            (slot, slots),
            self.pace,
            untrained=called or not rounds[0],
            tau=self.chooser.tau(),
            position=self.targets.position(swarm),
            steps_read=steps_read,
            batches=self._allotment.begin(checkpoint, slot),
        )

    @property
    def _roll_was_called(self) -> bool:
        """Whether the first round has let islands in before anybody trained."""
        place = self.replicas[0].place
        trained = place.work or self.pace.step or self.manifest.mode in PAIRED
        return place.round == 1 and not trained

    def next_data(self, fragment: int, swarm: AnySwarm) -> DataAssignment:
        """What is read once a fragment has moved; the batches that this brings are given once."""
        slot, slots = self.targets.slot(swarm)
        if fragment:  # fragment 0's rounds count
            return DataAssignment(slot, slots)
        return DataAssignment(slot, slots, *self._allotment.next_batches(slot))

    def evaluates(self, fragment: int) -> bool:
        """Whether the base is to be evaluated where a fragment stands; asked once a round."""
        return fragment == 0 and self._evaluations.due(self.replicas[fragment].place.round)

    def apply(
        self,
        round_: int,
        fragment: int,
        swarm: AnySwarm,
        data: DataAssignment,
        *,
        contributed: bool,
        reset: bool,
        evaluate: bool,
        steps_read: int,
    ) -> Apply:
        """For a trainer that takes a fragment's new base."""
        return Apply(
            round_,
            self.target,
            data.slot,
            data.slots,
            contributed=contributed,
            reset=reset,
            evaluate=evaluate,
            fragment=fragment,
            tau=self.chooser.tau(),
            position=self.targets.position(swarm),
            voids=self.replicas[fragment].voids,
            round_step=steps_read,
            batches=data.batches,
            anew=data.anew,
        )

    # --- what is measured ------------------------------------------------------------------------

    def transferred(self, transfer: float | None, exchanges: Sequence[float]) -> None:
        """Seconds that a fragment took from its snapshot on, if known, and that exchanges took."""
        if transfer is not None:
            self.chooser.transfer.add(transfer)
        for seconds in exchanges:
            self.chooser.timed(seconds)

    # --- the cycle -------------------------------------------------------------------------------

    def heard(self, report: StepDone | Applied) -> None:
        """The trainer has taken an inner step, or has applied what it was sent."""
        self._allotment.heard(report)
        if isinstance(report, StepDone):
            self.since += 1

    def merged(self, fragment: int, *, contributed: bool, reset: bool, steps_read: int) -> None:
        """A round of a fragment is over, after which a new cycle may begin.

        ``contributed``: with this island's work, from which steps count where islands meet at will.
        """
        if fragment == 0 and (reset or contributed or not self._at_will):
            self.since = 0 if self._at_will else steps_read

    def aim(self, swarm: AnySwarm, *, anew: Sequence[int] = ()) -> None:
        """Choose the inner steps that come next; fragments ``anew`` have no unmerged work left."""
        self.take(self.targets.next(swarm), anew=anew)

    def take(self, target: int, *, anew: Sequence[int] = ()) -> None:
        """Set the inner steps that come next; none once it has ended."""
        self.target = target = 0 if self._ended else target
        for fragment, replica in enumerate(self.replicas):
            if (turning := replica.turning) is None:
                continue
            if fragment in anew:
                turning.reset()
            if target:  # an island at rest does not fall behind
                turning.train()

    def end(self) -> None:
        """No more inner steps: rounds that are still applied bring none either."""
        self._ended = True
        self.take(0)

    def ends_with_others(self, swarm: AnySwarm) -> int | None:
        """With a single merge, a new target with which a late island ends with the others."""
        if not once(self.manifest):
            return None
        return self.targets.together(swarm, self.since, self.target)

    def needed(self, swarm: AnySwarm) -> bool:
        """Whether an island at rest is one of the round's clients after all."""
        return not (self.target or self._ended) and self.targets.drawn(swarm)

    def eta(self, fragment: int) -> float:
        """Seconds until a fragment's next snapshot, by the present pace.

        With a single merge until all steps of the run are taken, although it may end with others
        before: they end with it, and an end that followed from theirs would bring theirs forward.
        One that takes fewer by its operator's word comes to no such end, and names none.
        """
        if self.pace.steps_per_second <= 0:
            return UNTIMED_ETA_S
        if once(self.manifest) and 0 < self.chooser.own_inner_steps < self.chooser.whole:
            return UNKNOWN_ETA_S
        target = self.chooser.whole if once(self.manifest) else self.target
        left = offset(fragment, len(self.replicas), target) - self.since
        had = self.replicas[fragment].place.round > self.replicas[0].place.round
        return max(0, left + target * had) / self.pace.steps_per_second
