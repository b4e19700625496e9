"""A simulated island's trainer: real inner steps, whose time passes on the virtual clock.

What is counted, sent, applied and waited for is :class:`~node.trainer.progress.Progress` and
:class:`~node.trainer.leader.Leader`, as in the ranks that ``node start`` has; the other end is the
same :class:`~node.conductor.Conductor`. Only the step, and the channel within this process, are the
simulation's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from bootstrap.manifest import Manifest
from node.island.island import Island
from node.simulate.world import Node
from node.trainer.channel import Apply, Command, Ready, Report, StepDone
from node.trainer.layout import Layout
from node.trainer.leader import LONGEST_WAIT_S, Action, Leader, TakeStep
from node.trainer.optim import reentry_factor
from node.trainer.parallel import Ranks
from node.trainer.progress import Progress
from node.trainer.settings import TrainerSettings
from node.trainer.shared import SharedVectors


class Line:
    """A channel within one process (:class:`~node.trainer.channel.TrainerEnd`)."""

    def __init__(self, report: Callable[[Report], None]) -> None:
        self.send = report
        self.commands: asyncio.Queue[Command] = asyncio.Queue()

    def receive(self, timeout: float) -> Command | None:
        """The next command, if one is there."""
        return None if self.commands.empty() else self.commands.get_nowait()

    def close(self) -> None:
        """Nobody is told."""

    async def next(self, seconds: float) -> Command | None:
        """The next command, or None after so many virtual seconds without one."""
        if not self.commands.empty() or seconds <= 0:
            return self.receive(0.0)
        try:
            async with asyncio.timeout(seconds):
                return await self.commands.get()
        except TimeoutError:
            return None


class Trainer(Progress):
    """The one rank of a simulated island; :meth:`run` until cancelled."""

    def __init__(
        self,
        node: Node,
        manifest: Manifest,
        layout: Layout,
        vectors: SharedVectors,
        report: Callable[[Report], None],
        wait_s: float,
        over: Callable[[], bool],
    ) -> None:
        """It waits ``wait_s`` for a round's outcome, and takes no step when it is all ``over``."""
        self.node, self.learner, self.line, self.over = node, node.learner, Line(report), over
        leader = Leader(self.line, vectors, wait_s, asyncio.get_running_loop().time)
        super().__init__(
            dict(self.learner.model.named_parameters()),
            self.learner.optimizer,
            layout,
            Ranks.alone(torch.device("cpu")),
            leader,
            manifest.rounds.overlap_steps,
        )
        self._rounds = manifest.rounds.total_rounds
        self.at_rest = False  # the run's steps are taken, and nothing of mine is on its way
        # by fragment, inner steps that the last snapshot has, and that others have
        self._sent_at, self._merged = [0] * len(layout.cuts), [0] * len(layout.cuts)

    async def run(self) -> None:
        """Follow the conductor."""
        assert self.leader is not None
        layout = self.layout
        self.report(Ready(layout.size, bytes.fromhex(layout.digest)))
        while True:
            left = self.leader.left_s(self)
            action = self.leader.choose(self, await self.line.next(left), left)
            # what is taken after the last round goes nowhere
            out = any(p.outstanding is not None and p.round < self._rounds for p in self.fragments)
            over = self.over()
            self.at_rest = over and not out and (self.resting or isinstance(action, TakeStep))
            if not isinstance(action, TakeStep):
                self.carry_out(action)
            elif not over:
                await self._inner_step()
            elif (command := await self.line.next(LONGEST_WAIT_S)) is not None:
                self.carry_out(command)

    def carry_out(self, action: Action) -> bool:
        """As any trainer does, but a liar's words, once merged, leave its parameters alone."""
        if isinstance(action, Apply) and action.contributed and not self.node.honest:
            action = replace(action, reset=True)
        stops = super().carry_out(action)
        if isinstance(action, Apply) and action.contributed:
            self._merged[action.fragment] = self._sent_at[action.fragment]
            self.node.merged = min(self._merged)
        return stops

    @torch.no_grad()
    def take_snapshot(self, fragment: int = 0) -> None:
        """A fragment of θ, or what a liar says of it, into ``sent``."""
        super().take_snapshot(fragment)
        cut = self.layout.cuts[fragment]
        assert self.leader is not None
        base, sent = (v[cut.start : cut.stop] for v in self.leader.vectors.tensors())
        said = self.node.outgoing(sent if self.gradients else base - sent)
        if not self.node.honest:
            sent.copy_(said if self.gradients else base - said)
        self._sent_at[fragment] = self.node.steps

    async def _inner_step(self) -> None:
        node = self.node
        factor = 1.0
        if self.rewarm_from is not None:
            factor = reentry_factor(self.step - self.rewarm_from)
        node.loss = self.learner.gradient()
        if self.gradients:
            self.learner.clip()
        else:
            self.learner.step(node.world.share, factor)
        await node.rest()
        self.in_hand = self.gradients
        batch = node.world.scenario.batch
        self.count(batch, finite=True)
        self.report(
            StepDone(
                self.round,
                self.step,
                node.loss,
                None,
                0.0,
                batch,
                node.step_s,
                position=self.position,
                batches=self.batches,
            )
        )


class Simulated(Island):
    """What the conductor drives: a :class:`Trainer` in this process."""

    def __init__(
        self,
        node: Node,
        manifest: Manifest,
        layout: Layout,
        wait_s: float,
        over: Callable[[], bool],
    ) -> None:
        """As of :class:`Trainer`."""
        vectors = SharedVectors.create(layout.size)
        super().__init__(TrainerSettings(manifest=manifest, tokens=""), vectors, Path())
        self.trainer = Trainer(node, manifest, layout, vectors, self._take, wait_s, over)

    @property
    def alive(self) -> bool:
        """It lives as long as its node."""
        return True

    async def send(self, command: Command) -> None:
        """Hand a command to the trainer."""
        self.trainer.line.commands.put_nowait(command)

    async def restart(self, **changes: Any) -> None:
        """Nothing of it can die alone."""
        raise RuntimeError("a simulated trainer was to be started again")
