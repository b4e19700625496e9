"""Between trainer and swarm: turns snapshots into contributions and rounds into applied merges.

The trainer waits for this code no longer than its ``wait_s``, unless it rests; what comes late is
applied between two of its inner steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from bootstrap.manifest import Manifest
from bootstrap.manifest_gossip import PAIRED
from gossip.common import AnySwarm
from gossip.rounds.gathering import Gathering
from node.checkpoints.trainer_files import Asked, Taken, TrainerFiles
from node.data.stream_recipe import is_recipe
from node.island.beginning import Beginning, Todo, check_built
from node.island.course import Course
from node.island.events import dropped_of, problem_of, shrunk_of, step_of, told_of
from node.island.fitting import Fitting
from node.island.guessing import Guesses
from node.island.island import Island
from node.island.ownership import VectorOwnership
from node.island.pace import Pace
from node.island.rank_ends import TrainerDied
from node.island.readiness import NotFinite, Readiness
from node.island.restarts import Restarts
from node.island.silence import Silent
from node.monitor.event_log import EventLog
from node.monitor.events import Problem, Rejected
from node.replicas.eager_state import EagerReplica
from node.replicas.replica import OuterReplica
from node.replicas.trainer_gate import FragmentGate
from node.trainer.channel import (
    Applied,
    Awaited,
    ChannelClosedError,
    Cold,
    Donated,
    Evaluated,
    InnerSteps,
    Ready,
    Saved,
    Shifted,
    Snapshot,
    Staged,
    StepDone,
    Stopped,
)
from node.trainer.layout import Outline
from protocols.errors import OperatorError, Reason
from protocols.identity import PeerId
from protocols.messages import UNKNOWN_ETA_S


@dataclass
class Conductor:
    """Drives one island through the rounds; :meth:`run` ends when the trainer has stopped.

    The replicas call :meth:`hold` before they write what the trainer reads, and :meth:`release`
    afterwards. ``on_applied`` is awaited after each round the trainer has applied, with the
    validation loss where it was measured: for the report, the checkpoint, the end of the run.
    """

    manifest: Manifest
    me: PeerId
    island: Island
    replicas: tuple[OuterReplica, ...]  # by fragment
    layout: Outline
    events: EventLog
    beginning: Beginning
    on_applied: Callable[[Applied], Awaitable[None]]
    swarm: AnySwarm
    pace: Pace = field(default_factory=Pace)
    gathering: Gathering = field(default_factory=Gathering)  # whom a run's creator waits for
    own_inner_steps: int = 0  # the operator's H for this island, 0: none
    fitting: Fitting | None = None  # notes a micro-batch that memory was short for
    refresh: Callable[[], Awaitable[None]] | None = None  # brings the state up to date, once
    # gives the moments of the newest checkpoint, for ranks that are started again
    spare: Callable[[], Awaitable[Taken | None]] | None = None
    failed: OperatorError | None = None  # why the trainer is not kept alive any more
    _grows: bool = False  # a host is to be taken in
    _reset_due: set[int] = field(default_factory=set)  # fragments in which θ is not finite
    # those whose local work a merge drops, and whether because an earlier life may have sent it
    _drops: dict[int | None, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.course = Course(
            self.manifest,
            self.me,
            self.replicas,
            self.pace,
            self.events,
            own_inner_steps=self.own_inner_steps,
            streams=is_recipe(str(self.island.settings.tokens)),
        )
        self.files = TrainerFiles(self.island)
        # after a restart the trainer first has to stand where its checkpoint was made
        self._ownership = VectorOwnership(
            len(self.replicas), free=self.beginning.checkpoint is None
        )
        self._restarts = Restarts(self.replicas)
        self.readiness = Readiness(
            self.manifest, self.island, self.replicas, self.layout, self._ownership
        )
        self._guesses: Guesses | None = None  # where nobody waits for a merge
        for fragment, replica in enumerate(self.replicas):
            replica.trainer = FragmentGate(self, fragment)
            if isinstance(replica, EagerReplica):
                self._guesses = Guesses(replica, self.island, self._ownership)

    # --- for the replicas (see node.replicas.trainer_gate) ---------------------------------------

    async def hold(self, fragment: int) -> int | None:
        """Wait until the trainer has applied the last round; then keep it from writing."""
        await self._ownership.take(fragment)
        if not self.training:
            return None
        self._time_transfer(fragment)
        await self.island.claim(fragment)
        return self.island.vectors.snapshot(fragment)

    async def release(self, fragment: int, *, contributed: bool, reset: bool) -> None:
        """Send the new base to the trainer, or begin if this is the first one it can use."""
        self.readiness.answered(fragment, contributed=contributed)
        if reset and self.beginning.begun:  # ranks that are still to begin have nothing to drop
            self._drops[fragment] = self.replicas[fragment].relived
        await self._go_on(fragment, contributed=contributed, reset=reset)

    def late_s(self, fragment: int) -> float:
        """Seconds that the trainer takes to apply a fragment, beyond the longest it ever took."""
        return self._ownership.late_s(fragment)

    async def _go_on(
        self, fragment: int, *, contributed: bool, reset: bool, steps_read: int = 0
    ) -> None:
        """Send the new base, or begin; ``steps_read``: inner steps that are not read again."""
        reset = reset or fragment in self._reset_due
        self._reset_due.discard(fragment)
        self._ownership.written(fragment)
        data = self.course.next_data(fragment, self.swarm)
        if not self.beginning.begun:
            self._ownership.free(fragment)
            await self._begin()
            return
        self.course.aim(self.swarm, anew=[fragment] if reset else ())
        round_ = self.replicas[fragment].place.round
        evaluate = self.course.evaluates(fragment)
        if evaluate:  # of all fragments
            starts = self.island.starts
            await self._ownership.all_to_read()
            if self.island.starts != starts:
                return  # other ranks by now: they begin, or have begun, with what was written here
        counts = contributed and self._guesses is None  # steps from here, else from a snapshot
        self.course.merged(fragment, contributed=counts, reset=reset, steps_read=steps_read)
        apply = self.course.apply(
            round_,
            fragment,
            self.swarm,
            data,
            contributed=contributed,
            reset=reset,
            evaluate=evaluate,
            steps_read=steps_read,
        )
        try:
            await self.island.send(apply)
        except ChannelClosedError:
            self._ownership.free(fragment)  # its death is on its way as an event

    # --- the trainer's events --------------------------------------------------------------------

    async def run(self) -> None:
        """Follow the trainer until it has stopped as asked.

        Raises :attr:`failed` when it cannot be kept alive: the outer state is whole then.
        """
        while True:
            match await self.island.next_event():
                case Ready() as ready:
                    await self._on_ready(ready)
                case StepDone() as done:
                    await self._on_step(done)
                case Snapshot() as snapshot:
                    await self._on_snapshot(snapshot)
                case Applied() as applied:
                    await self._on_applied(applied)
                case Shifted() if self._guesses is not None:
                    await self._guesses.moved()
                case (Staged() | Saved() | Donated()) as told:
                    self.files.told(told)
                case TrainerDied() as died:
                    await self._on_death(died)
                case Stopped():
                    self.files.lost()  # a script that was killed has left some unwritten
                    return
                case (Awaited() | Evaluated() | Cold() | Silent()) as said:
                    self.events.emit(told_of(said))

    @property
    def follows(self) -> bool:
        """Whether rounds are applied without a trainer, until one of them lets this node in."""
        return not (self.beginning.begun or self._in_office)

    @property
    def _in_office(self) -> bool:
        return any(self.me in replica.roster for replica in self.replicas)

    @property
    def training(self) -> bool:
        """Whether there is a trainer at work, whose state belongs into a checkpoint."""
        return self.beginning.begun and self.island.alive

    async def take_back(self) -> None:
        """Before :meth:`save`: have the trainer go back from its guess, if it stands on one."""
        if self._guesses is not None:
            await self._guesses.take_back()

    async def save(self, directory: Path) -> Asked | None:
        """Ask the trainer for its files; however late it copies them, they fit the present state.

        None where it stands on a guess, which is to be taken back first.
        """
        if self._guesses is None:
            return await self.files.save(directory)
        return await self._guesses.without(lambda: self.files.save(directory))

    async def take(self, moments: Taken | None) -> None:
        """Begin with a donor's moments, or without where none are to be had."""
        self.beginning.given(moments)
        await self._begin()

    async def rest(self) -> None:
        """Have the trainer take no more inner steps, as this node leaves.

        Nothing merges them any more. In the last checkpoint they would be one round's work, however
        long that took to be written, and a lone island that resumes from it would merge it whole.
        """
        self.course.end()
        if self.beginning.begun:
            await self._tell_target()

    def eta(self, fragment: int) -> float:
        """Seconds until a fragment's next snapshot, by the present pace."""
        if not self.beginning.begun:
            return UNKNOWN_ETA_S
        return self.course.eta(fragment)

    # --- inside ----------------------------------------------------------------------------------

    async def _on_ready(self, ready: Ready) -> None:
        check_built(ready, self.layout)
        self.beginning.built()
        await self._begin()
        if not self.beginning.begun:
            self._say_it_can()

    def _say_it_can(self) -> None:
        """Before a run's first round its creator may wait until enough islands can begin.

        Of itself it says nothing: nobody is to expect that it is ready by then.
        """
        place = self.replicas[0].place
        if place.round or self.manifest.mode in PAIRED:
            return
        self.gathering.able = True
        for chain in self.swarm.chains:
            if self.gathering.on(place):
                chain.kick()
            else:
                chain.update(eta=self.course.eta(chain.fragment))

    async def _begin(self) -> None:
        """Begin if it is time; else the node follows rounds until it is: see :meth:`release`."""
        waits = self.gathering.on(self.replicas[0].place)
        steps = self.beginning.steps(
            in_office=self._in_office and not waits,
            alive=lambda: self.island.alive,
        )
        with contextlib.closing(steps):  # also where one of them fails
            for todo in steps:
                await self._carry_out(todo)

    async def _carry_out(self, todo: Todo) -> None:
        match todo:
            case Todo.REFRESH if self.refresh is not None:
                await self.refresh()
            case Todo.FIND_MOMENTS if self.spare is not None:
                donated = self.beginning.donated
                if donated is None or not donated.exists():
                    self.beginning.found(await self.spare())
            case Todo.HAND_OVER:
                await self._ownership.all_to_read()
                if self._guesses is not None:
                    await self._guesses.leave()
            case Todo.BEGIN:
                await self._send_begin()
            case Todo.LET_GO:
                self._ownership.free()

    async def _send_begin(self) -> None:
        self._ownership.begin()
        for fragment in range(len(self.replicas)):
            self.readiness.keep(self.swarm, fragment)
        begin = self.course.begin(self.beginning, self.swarm, self.readiness.steps_read(self.swarm))
        with contextlib.suppress(ChannelClosedError):  # its death is on its way as an event
            await self.island.send(begin)

    async def _on_applied(self, applied: Applied) -> None:
        if self._restarts.applied(applied):
            self.island.merged()
        self.course.heard(applied)
        if applied.fragment is None:
            self._has_begun()
        relived = self._drops.pop(applied.fragment, None)
        if applied.dropped and relived is not None:
            of = applied.fragment if len(self.replicas) > 1 else None
            self.events.emit(dropped_of(applied.dropped, of, relived=relived))
        self._ownership.free(applied.fragment)
        await self._reset_if_due()
        self.pace.step, self.pace.tokens = applied.step, applied.tokens
        await self.on_applied(applied)

    def _has_begun(self) -> None:
        if (file := self.beginning.read()) is not None:
            with contextlib.suppress(OSError):
                file.unlink()

    async def _on_step(self, done: StepDone) -> None:
        self._note(done)
        await self._take_hosts_in()
        if end := self.course.ends_with_others(self.swarm):
            self.course.take(end)
            await self._tell_target()

    def _note(self, done: StepDone) -> None:
        """Measure the pace by an inner step, and let the swarm and the monitor know of it."""
        if short := shrunk_of(done, self.pace.halved, self.island.settings):
            self.events.emit(Problem.of(short))
        if self.fitting is not None and done.micro_batch is not None:
            self.fitting.stepped(self.island.settings, done.micro_batch)
        self.pace.add(done)
        self.course.heard(done)
        swarm = self.swarm
        for chain in swarm.chains:
            chain.note(eta=self.eta(chain.fragment))
        swarm.presence.note(**self.pace.said)
        alive = swarm.membership.members_alive(swarm.now())
        islands = 1 + sum(one.role == "island" for one in alive)
        self.events.emit(step_of(done, self.pace.tokens_per_second, islands))

    async def _on_snapshot(self, snapshot: Snapshot) -> None:
        fragment = snapshot.fragment
        self.readiness.came(self.swarm, snapshot, asyncio.get_running_loop().time())
        if flaw := await self.readiness.flaw(snapshot):
            await self._discard(flaw)
            return
        try:
            ready = await self.readiness.contribution(
                snapshot, self.swarm, ramped=self.beginning.joined
            )
        except NotFinite as flaw:
            await self._discard(str(flaw))
            return
        if ready is None:
            return
        if self._guesses is not None:
            self.course.since = 0
            await self._guesses.make()
            if self.island.vectors.snapshot(fragment) != snapshot.round:
                return  # the trainer has died: others wait while a guess is made
        self.swarm.chains[fragment].update(ready=True, eta=0.0, **ready)

    async def _discard(self, flaw: str) -> None:
        """Go back to the last merge: what was trained since then is of no use to anybody."""
        self.events.emit(
            Rejected(
                peer=self.me,
                reason=Reason.NON_FINITE,
                detail=f"own training is {flaw}; back to the last merge",
            )
        )
        self._reset_due = set(range(len(self.replicas)))
        await self._reset_if_due()

    async def _on_death(self, died: TrainerDied) -> None:
        settings = self.island.settings
        changes = self._restarts.died(died, settings, begun=self.beginning.begun)
        problem = problem_of(died, settings)
        self.events.emit(Problem.of(problem, fatal=changes is None))
        if changes is None:
            self._lose()  # neither a round nor the last checkpoint is to wait for it
            self.failed = problem
            raise problem
        await self._start_again(**changes)

    async def _start_again(self, **changes: int) -> None:
        """Start all ranks anew; :mod:`node.island.beginning` says with what they begin."""
        self._lose()
        await self.island.restart(**changes)

    def _lose(self) -> None:
        """There are no ranks any more that could answer."""
        self.gathering.able = False
        self._drops.clear()
        may_change = self.beginning.lost()
        self.files.lost()
        if self._guesses is not None:
            self._guesses.lost()
        if may_change:
            self._ownership.free()
        for fragment in range(len(self.replicas)):
            self.readiness.withdraw(self.swarm, fragment, self.eta(fragment))

    async def _take_hosts_in(self) -> None:
        """Start again with a host that has come, when least is lost.

        That is after the first step of a cycle: by then a checkpoint of the ended round has begun.
        The restart waits until that is written, which may take longer than the step.
        """
        self._grows = self.island.grown and (self._grows or self.course.since == 1)
        if self._grows and not self.files.writing:
            await self._start_again()

    async def _reset_if_due(self) -> None:
        """Take a trainer whose θ is not finite back to the last merge, once its fragment is free.

        Where a merge is under way its Apply does it (see :meth:`release`).
        """
        for fragment in sorted(self._reset_due):
            if self._ownership.is_free(fragment):
                await self.hold(fragment)
                if self._guesses is not None:
                    await self._guesses.leave()
                self.readiness.withdraw(self.swarm, fragment, self.eta(fragment))
                self.readiness.keep(self.swarm, fragment)
                steps_read = self.readiness.steps_read(self.swarm)
                await self._go_on(fragment, contributed=False, reset=True, steps_read=steps_read)

    def _time_transfer(self, fragment: int) -> None:
        """A round of a fragment has committed: how long did it take, from the snapshot on?"""
        if not (chain := self.swarm.chains[fragment]).under_way:
            return
        taken = self.readiness.out_since(fragment)
        seconds = asyncio.get_running_loop().time() - taken if taken is not None else None
        self.course.transferred(seconds, chain.timed())

    async def look_again(self) -> None:
        """Somebody came, went or changed its status: an island at rest may be needed now."""
        if self.beginning.begun and self.course.needed(self.swarm):
            self.course.aim(self.swarm)
            await self._tell_target()

    async def _tell_target(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # its death is on its way as an event
            await self.island.send(InnerSteps(self.course.target))
