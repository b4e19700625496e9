"""Members that are whole nodes but for the model: conductor, trainer's progress and outer state.

Only an inner step is a toy's: it changes one element of each fragment by one, and no other step,
of whichever island, changes the same. So what has become of every single step can be seen in what
rounds have merged and in what islands have yet to send (:mod:`tally_kit`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from simulated_swarm import Member, SimulatedSwarm
from tally_kit import Tally
from torch import nn
from toy_replica import RUN

from bootstrap.manifest import Manifest
from gossip.catchup.lineage import Lineage
from gossip.catchup.replay import Ending
from gossip.chain.chain import Chain
from gossip.plans.certificate import genesis
from gossip.plans.rules import Rules
from node.conductor import Conductor
from node.entry.downloading import kept_after
from node.island.beginning import Beginning
from node.island.island import Island
from node.monitor.event_log import EventLog
from node.replicas.replica import ChainStanding, OuterReplica
from node.run_rules import rules_of
from node.simulate.trainer import Line
from node.trainer.channel import Applied, Begin, Command, Ready, StepDone
from node.trainer.layout import Layout
from node.trainer.leader import Leader, TakeStep
from node.trainer.parallel import Ranks
from node.trainer.progress import Progress
from node.trainer.settings import TrainerSettings
from node.trainer.shared import SharedVectors
from node.trainer.trainer_state import FragmentState
from protocols.codecs import RangeCodec
from protocols.identity import PeerId
from protocols.messages import Certificate, Outcome

WIDE = 120  # elements of a fragment are WIDE² and WIDE
SIZE = WIDE * WIDE + WIDE
TOKENS = 100  # of an inner step
STATE_VECTORS = 3  # base, and at most two of the outer optimizer


def layout_of(fragments: int) -> Layout:
    """Of a model with as many equal layers."""
    shapes = []
    for layer in range(fragments):
        shapes += [(f"layers.{layer}.matrix", (WIDE, WIDE)), (f"layers.{layer}.norm", (WIDE,))]
    return Layout.of_shapes([(name, torch.Size(shape)) for name, shape in shapes], fragments)


async def at_once(work: Callable[[], Any]) -> Any:
    """Do ``work``; a kill comes before it or after."""
    return work()


@dataclass
class Saved:
    """What a checkpoint of a fragment would hold."""

    base: torch.Tensor
    vectors: dict[str, torch.Tensor]
    state: ChainStanding
    theta: torch.Tensor
    progress: FragmentState
    round_step: int
    step: int
    tokens: int
    history: tuple[int, list[tuple[bytes, bytes]]]  # the round it begins with, and since


class Working(OuterReplica):
    """The outer state of a fragment, and what tests of swarms look at."""

    def __init__(self, tally: Tally, theta: torch.Tensor, *how: Any) -> None:
        super().__init__(*how)
        self.tally, self.theta = tally, theta  # this island's own parameters
        self._place = replace(self._place, run=RUN, previous=genesis(RUN))
        self.history: list[tuple[bytes, bytes]] = []
        self.begins = self.counted = 0
        self.lineage: Lineage | None = None
        self.life: Life

    @property
    def fragment(self) -> int:
        return self.place.fragment

    def saved(self, lineage: Lineage) -> Saved:
        trainer = self.life.trainer
        if trainer is not None:
            trainer.obey()  # what has been written for it is a part of this moment
        state = ChainStanding(self.place, self.roster, self.certificate, deepcopy(lineage))
        return Saved(
            self.base.clone(),
            {name: vector.clone() for name, vector in self.vectors.items()},
            state,
            self.theta.clone(),
            trainer.fragments[self.fragment].state()
            if trainer
            else FragmentState(round=self.place.round),
            trainer.round_step if trainer else 0,
            trainer.step if trainer else 0,
            trainer.tokens if trainer else 0,
            (self.begins, list(self.history)),
        )

    async def restore(self, saved: Saved) -> None:
        self.base.copy_(saved.base)
        for name, vector in self.vectors.items():
            vector.copy_(saved.vectors[name])
        await self.settle(saved.state)
        self.begins, self.history = saved.history[0], list(saved.history[1])
        self.lineage, self.inherited = deepcopy(saved.state.lineage), True

    async def apply(
        self, certificate: Certificate, parts: dict[tuple[int, int], torch.Tensor]
    ) -> None:
        outcome = certificate.outcome
        assert outcome.previous == self.place.previous
        means = {}
        for result in outcome.parts:
            if result.digest:
                mean = means[result.start, result.stop] = torch.empty(result.stop - result.start)
                codec = self.codec.named(outcome.codec)
                codec.decode(result.start, parts[result.start, result.stop], mean)
        self.tally.note(outcome, means)
        await super().apply(certificate, parts)
        self.history.append((self.place.previous, self.place.state))

    def _finish(self, mine: list[tuple[int, int]], outcome: Outcome) -> None:
        super()._finish(mine, outcome)
        self.counted += bool(mine)

    async def take(
        self, vectors: Sequence[torch.Tensor], state: ChainStanding, ending: Ending, chain: Chain
    ) -> None:
        missed = state.place.round - self.place.round
        keep = kept_after(ending, missed, self.manifest.rounds.max_staleness)
        decided, sent = chain.following.decided, chain.exchange.sent
        self.tally.forked |= keep == "all"
        if keep == "nothing" or ending is Ending.DIVERGED or (sent and decided is None):
            self.tally.disturbed.add(self.me)
        await self.jump(vectors, state, keep=keep, decided=decided, sent=sent)
        self.begins, self.history = state.place.round, []


class Trainer(Progress):
    """The one rank of an island; :meth:`run` until cancelled."""

    def __init__(self, life: Life, layout: Layout, theta: torch.Tensor, wait_s: float) -> None:
        self.life, self.line = life, Line(life.report)
        clock = asyncio.get_running_loop().time
        parameters = {
            name: nn.Parameter(view, requires_grad=False)
            for name, view in layout.views(theta).items()
        }
        super().__init__(
            parameters,
            torch.optim.SGD(parameters.values(), lr=0.0),
            layout,
            Ranks.alone(torch.device("cpu")),
            Leader(self.line, life.vectors, wait_s, clock),
            0,
        )

    async def run(self) -> None:
        assert self.leader is not None
        self.report(Ready(self.layout.size, bytes.fromhex(self.layout.digest)))
        while True:
            left = self.leader.left_s(self)
            action = self.leader.choose(self, await self.line.next(left), left)
            if isinstance(action, TakeStep):
                await self._step()
            else:
                self.carry_out(action)
                await asyncio.sleep(0)

    def begin(self, command: Begin) -> None:
        saved = self.life.saved
        super().begin(replace(command, resume=""))
        if not command.resume:
            return
        assert [one.progress.round for one in saved] == [command.round, *command.others]
        self.round_step, self.step, self.tokens = (
            saved[0].round_step,
            saved[0].step,
            saved[0].tokens,
        )
        for progress, replica, one in zip(self.fragments, self.life.replicas, saved, strict=True):
            replica.theta.copy_(one.theta)
            progress.begin(one.progress)

    def obey(self) -> None:
        """Carry out now what it has been told by now."""
        while (command := self.line.receive(0.0)) is not None:
            self.carry_out(command)

    async def _step(self) -> None:
        await asyncio.sleep(self.life.step_s())
        if self.life.swarm.over:
            return
        for replica in self.life.replicas:
            replica.theta[replica.tally.learn(replica.fragment, replica.me)] -= 1.0
        self.count(TOKENS, finite=True)
        self.report(StepDone(self.round, self.step, 1.0, None, 0.0, TOKENS, self.life.step_s()))


class Within(Island):
    """A trainer in this process."""

    @property
    def alive(self) -> bool:
        return True

    trainer: Trainer

    async def send(self, command: Command) -> None:
        self.trainer.line.commands.put_nowait(command)


class Life:
    """One process of a member, from its start to its kill."""

    def __init__(
        self, swarm: WorkingSwarm, peer: PeerId, step_s: Callable[[], float], saved: list[Saved]
    ) -> None:
        self.swarm, self.saved, self.step_s = swarm, saved, step_s
        manifest = swarm.manifest
        layout = layout_of(swarm.fragments)
        self.vectors, theta = SharedVectors.create(layout.size), torch.zeros(layout.size)
        founders, self.replicas = swarm.roster, list[Working]()
        for fragment, cut in enumerate(layout.cuts):
            here = slice(cut.start, cut.stop)
            codec = RangeCodec(manifest.rounds.codec, cut.dense)
            replica = Working(
                swarm.tally, theta[here],
                manifest, peer, self.vectors, codec, at_once, founders, fragment, here,
            )  # fmt: skip
            replica.life = self
            self.replicas.append(replica)
        self.trainer: Trainer | None = None
        if swarm.role(peer) != "island":
            return
        island = Within(TrainerSettings(manifest=manifest, tokens=""), self.vectors, Path())
        self.report = island._take
        self.trainer = island.trainer = Trainer(self, layout, theta, swarm.wait_s)
        resumed = Path("saved") if saved else None
        beginning = Beginning(manifest, checkpoint=resumed, joined=peer not in founders)
        self.conducted = partial(
            Conductor, manifest, peer, island, tuple(self.replicas), layout, EventLog(),
            beginning, self._applied,
        )  # fmt: skip
        self.conductor: Conductor

    async def _applied(self, applied: Applied) -> None:
        pass

    async def settle(self) -> None:
        """Stand where the run begins, or where it was saved."""
        for number, replica in enumerate(self.replicas):
            if self.saved:
                await replica.restore(self.saved[number])
            else:
                await replica.settle()


@dataclass
class WorkingSwarm(SimulatedSwarm):
    """Such members; ``manifest`` says how they meet."""

    manifest: Manifest = field(default_factory=Manifest)
    wait_s: float = 0.0  # for a round's outcome; then inner steps go on
    paces: dict[PeerId, float] = field(default_factory=dict)  # seconds of an inner step
    over: bool = False  # no more steps are taken
    tally: Tally = field(init=False)

    def __post_init__(self) -> None:
        self.tally = Tally.of(self.fragments, SIZE, self.random.randrange(2**31))

    def check(self, islands: Sequence[Member]) -> None:
        """Look at every step that was taken; ``islands`` stand at one place."""
        if self.tally.forked:
            return
        for one in islands:
            one.replicas[0].life.trainer.obey()
        for fragment in range(self.fragments):
            head = islands[0].replicas[fragment].place.previous
            self.tally.check(fragment, head, [one.replicas[fragment] for one in islands])

    def fresh(self, peer: PeerId) -> tuple[Any, ...]:
        return self._live(peer, [])

    def rules_of(self, replica: Any) -> Rules:
        return rules_of(self.manifest, replica)

    def works(
        self, swarm: Any, replicas: Any, moved: Any, spawn: Any
    ) -> list[Coroutine[Any, Any, None]]:
        life = replicas[0].life
        if life.trainer is None:
            return []
        life.conductor, life.spawn = life.conducted(swarm), spawn
        return [life.conductor.run(), life.trainer.run()]

    def came_or_went(self, peer: PeerId) -> None:
        life: Any = self.members[peer].replicas[0].life if peer in self.members else None
        if life is not None and life.trainer is not None:
            life.spawn(life.conductor.look_again())

    def restart(
        self, member: Member, saved: Sequence[Any] = (), *, upload: float | None = None
    ) -> Member:
        self.tally.disturbed.add(member.peer)
        saved = list(saved) or self.saved(member)
        if self.role(member.peer) == "server":
            saved = [self._arrived(member, fragment) for fragment in range(self.fragments)]
        replicas = self._live(member.peer, saved)
        return self.start(member.identity, replicas=replicas, status="joining", upload=upload)

    def keeps(self, member: Member) -> bool:
        """Islands, once they train."""
        life: Any = member.replicas[0].life
        return life.trainer is not None and (life.trainer.begun or bool(life.saved))

    def saved(self, member: Member) -> list[Any]:
        """By fragment; nothing of who has no checkpoint."""
        life = member.replicas[0].life
        if life.trainer is None or not life.trainer.begun:
            return list(life.saved) if self.keeps(member) else []
        pairs = zip(member.replicas, member.swarm.chains, strict=True)
        return [replica.saved(chain.lineage) for replica, chain in pairs]

    def _arrived(self, member: Member, fragment: int) -> Saved:
        """What one who has no checkpoint takes from the others; if there is none, what it had."""
        chains = [one.swarm.chains[fragment] for one in self.living() if one.peer != member.peer]
        chains = [c for c in chains if c.status.status == "active"] or chains
        chain = max(
            chains or [member.swarm.chains[fragment]],
            key=lambda chain: (chain.replica.place.work, chain.replica.place.round),
        )
        found = chain.replica.saved(chain.lineage)
        return replace(found, history=(found.state.place.round, []))

    def _live(self, peer: PeerId, saved: list[Saved]) -> tuple[Any, ...]:
        usual = self.paces.setdefault(peer, self.random.uniform(*self.think))
        life = Life(self, peer, lambda: usual * self.random.uniform(0.9, 1.1), saved)
        done = life.settle()
        try:
            done.send(None)  # nothing of it waits
        except StopIteration:
            return tuple(life.replicas)
        raise RuntimeError("a state that is not there at once")
