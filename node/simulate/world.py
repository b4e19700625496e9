"""The simulated world: islands on a virtual clock and network, and what is noted of them.

An island trains for real, at once, and then lets the virtual time pass that its steps would take.
What it says to others goes over :mod:`protocols.memory.network`, so latency, bandwidth and loss
act on the very bytes that a mode sends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bootstrap.validation import check
from diloco import federated, knobs
from node.island.pace import inner_steps
from node.simulate.decisions import Decisions
from node.simulate.learner import Learner, initial, validation_loss
from node.simulate.run import codecs_of
from node.simulate.scenario import Diverged, Scenario
from protocols.codecs import codec
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork, MemoryTransport
from protocols.tasks import beside

BODIES = ("letter", "slice", "merged", "sum", "part")  # what carries what rounds exchange
STATES = ("chunk", "moment", "shared")  # what newcomers download is neither that nor control
TOLD = 0.05  # share of the inner steps: where more were not taken, the result says so
LEFT = 8_000_000  # parameters of islands that are gone and still in memory, of 34 bytes or so each
ShareDone = Callable[[float], None]  # share of the run that is done, 0 to 1


@dataclass
class Node:
    """One simulated machine: an island, or a server that does not train."""

    born: int  # its number in the order of arrival, from 0
    shard: int  # whose text it has
    identity: Identity
    transport: MemoryTransport
    learner: Learner
    step_s: float  # virtual seconds of an inner step
    bandwidth: float  # bytes a second of its link, each way
    honest: bool
    world: World
    steps: int = 0
    merged: int = 0  # of its steps, as far as they have reached others
    loss: float = 0.0

    def sent(self, *, control: bool = False) -> int:
        """Bytes of what rounds exchange that it has sent, or of what is control."""
        counted = self.transport.stats.out_by_name.items()
        left_out = {*BODIES, *STATES}
        return sum(
            n for name, n in counted if (name not in left_out if control else name in BODIES)
        )

    @property
    def me(self) -> PeerId:
        """Its name."""
        return self.identity.peer_id

    @property
    def chosen_steps(self) -> int:
        """Inner steps of a round: fewer for a slow island, so that all arrive together."""
        steps = self.world.scenario.inner_steps
        if not self.world.scenario.dynamic_steps:
            return steps
        others = [1 / other.step_s for other in self.world.nodes.values() if other is not self]
        return inner_steps(steps, 1 / self.step_s, others)

    async def rest(self) -> None:
        """Let the time of an inner step pass, and count it."""
        self.steps += 1
        self.world.stepped()
        await asyncio.sleep(self.step_s)

    def outgoing(self, delta: Tensor) -> Tensor:
        """What this island says its progress is: the truth, or −attack times it."""
        said = delta if self.honest else delta.mul(-self.world.scenario.attack)
        if not math.isfinite(said.norm().item()):  # in fp32, as it is announced
            raise Diverged("what an island has to send")
        return said


@dataclass(frozen=True, slots=True)
class Point:
    """What the observer noted at a moment of virtual time."""

    time: float  # virtual seconds
    steps: float  # inner steps an island, in the mean
    bytes: float  # of tensors, sent by an island a parameter, in the mean
    loss: float  # validation, nats a byte; the mean where islands differ


@dataclass
class World:
    """All of one simulated run."""

    scenario: Scenario
    progress: ShareDone = lambda share: None
    start: Tensor = field(init=False)
    rounds: int = field(init=False)  # until the islands that train in each have spent the budget
    network: MemoryNetwork = field(init=False)
    nodes: dict[PeerId, Node] = field(default_factory=dict)  # living islands
    servers: list[Node] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    notes: dict[str, float] = field(default_factory=dict)  # what a mode counts
    decisions: Decisions = field(default_factory=Decisions)  # that followed from links
    views: Callable[[], list[Tensor]] = field(init=False)  # parameters to be evaluated
    total_steps: int = 0
    born: int = 0
    _retired: int = 0  # bytes of tensors sent by those who are gone
    _retired_control: int = 0  # and of everything else
    _left: int = 0  # parameters of those

    def __post_init__(self) -> None:
        one = self.scenario
        self.start = initial(one)
        self.views = lambda: [self.start]
        self.network = MemoryNetwork(one.seed, link=Link(latency=one.latency, loss=one.loss))
        self.random = random.Random(one.seed)
        self._model = Learner(one, 0, 0).model
        for index in range(one.islands):
            self.add(index)
        part = 1.0
        if one.mode == "fedavg":
            part = len(federated.sampled(self.members, one.sample, 0, one.seed)) / one.islands
        each = part * sum(node.chosen_steps for node in self.nodes.values())
        self.rounds = max(1, round(self.budget / each)) if each else one.rounds

    def add(self, index: int) -> Node:
        """Add an island of those that begin; ``index`` is its number, from 0.

        The first ones are slow, those after them have narrow links, and the last ones lie.
        """
        one = self.scenario
        slow = index < one.stragglers
        narrow = 0 <= index - one.stragglers < one.narrow
        node = self._node(
            index,
            one.step_s * (one.straggler_factor if slow else 1.0),
            one.bandwidth / (one.narrow_factor if narrow else 1.0),
            honest=index < one.islands - one.attackers,
        )
        self.nodes[node.me] = node
        return node

    def replace(self, gone: Node) -> Node:
        """End an island; a new one has its text, its speed and link, and lies if it did.

        So a run has as many slow ones, narrow links and liars to its end as it began with.
        """
        self.kill(gone)
        self.notes["replaced"] = self.notes.get("replaced", 0) + 1
        node = self._node(gone.shard, gone.step_s, gone.bandwidth, honest=gone.honest)
        self.nodes[node.me] = node
        return node

    def add_server(self) -> Node:
        """A peer that does not train."""
        node = self._node(0, self.scenario.step_s, self.scenario.bandwidth)
        self.servers.append(node)
        return node

    def _node(self, shard: int, step_s: float, bandwidth: float, *, honest: bool = True) -> Node:
        identity = Identity.from_seed((self.born + 1).to_bytes(32, "big"))
        transport = self.network.join(identity.peer_id, upload=bandwidth, download=bandwidth)
        learner = Learner(self.scenario, self.born, shard)
        node = Node(self.born, shard, identity, transport, learner, step_s, bandwidth, honest, self)
        self.born += 1
        return node

    def kill(self, node: Node) -> None:
        """End an island: its links break."""
        self._retired += node.sent()
        self._retired_control += node.sent(control=True)
        self.nodes.pop(node.me, None)
        self.network.kill(node.me)
        self._left += len(self.start)
        if self._left >= LEFT:  # all in cycles, which Python looks for by their number, not size
            gc.collect()
            self._left = 0

    @property
    def members(self) -> list[PeerId]:
        """The living islands, in an order that all share."""
        return sorted(self.nodes)

    @property
    def budget(self) -> int:
        """Inner steps of all islands together."""
        return self.scenario.islands * self.scenario.rounds * self.scenario.inner_steps

    @property
    def share(self) -> float:
        """How much of its steps the run has taken, 0 to 1: what learning rates follow."""
        return min(1.0, self.total_steps / self.budget)

    @property
    def done(self) -> bool:
        """Whether all steps have been taken."""
        return self.total_steps >= self.budget

    def stepped(self) -> None:
        """Count an inner step, for the budget and whoever watches."""
        self.total_steps += 1
        self.progress(self.share)

    def bytes_a_parameter(self) -> float:
        """Mean bytes of tensors an island has sent for each parameter (servers': :attr:`notes`)."""
        sent = self._retired + sum(node.sent() for node in self.nodes.values())
        return sent / self.scenario.islands / len(self.start)

    def control_bytes(self) -> float:
        """Mean bytes an island has sent that were no tensors."""
        living = sum(node.sent(control=True) for node in self.nodes.values())
        return (self._retired_control + living) / self.scenario.islands

    def observe(self) -> None:
        """Evaluate what there is now."""
        losses = [validation_loss(self.scenario, one, self._model) for one in self.views()]
        if not math.isfinite(sum(losses)):
            raise Diverged("the validation loss")
        now = asyncio.get_running_loop().time()
        steps = self.total_steps / self.scenario.islands
        self.points.append(Point(now, steps, self.bytes_a_parameter(), sum(losses) / len(losses)))

    async def watch(self) -> None:
        """Observe once a round's time, until cancelled."""
        span = self.scenario.inner_steps * self.scenario.step_s * self.scenario.eval_every
        while True:
            self.observe()
            await asyncio.sleep(span)


@dataclass(frozen=True)
class Result:
    """What a simulated run came to."""

    scenario: Scenario
    parameters: int
    points: list[Point]
    notes: dict[str, float]
    seconds: float  # of real time
    decisions: Decisions = field(default_factory=Decisions)

    @property
    def loss(self) -> float:
        """The last validation loss, over all islands that differ."""
        return self.points[-1].loss

    def to_json(self) -> dict[str, object]:
        """As it is written to a file."""
        last = self.points[-1]
        return {
            "scenario": self.scenario.model_dump(mode="json"),
            "codecs": codecs_of(self.scenario),
            "parameters": self.parameters,
            "loss": round(last.loss, 5),
            "bytes_per_parameter": round(last.bytes, 4),
            "virtual_s": round(last.time, 3),
            "seconds": round(self.seconds, 1),
            "notes": {key: round(value, 4) for key, value in self.notes.items()},
            "decisions": self.decisions.told,
            "curve": [
                [round(value, 4) for value in dataclasses.astuple(point)] for point in self.points
            ],
        }


async def live(world: World) -> Result:
    """Run the scenario's mode to its end, on the loop of :mod:`protocols.memory.virtual_time`."""
    from node.simulate.swarm import live as take_part  # it imports this file

    began = time.perf_counter()
    async with beside(world.watch()):
        await take_part(world)
    world.observe()
    if world.share < 1 - TOLD:
        world.notes["steps_not_taken"] = world.budget - world.total_steps
    world.notes["unmerged_steps"] = max(n.steps - n.merged for n in world.nodes.values())
    world.notes["control_bytes"] = world.control_bytes()
    for node in world.servers:
        sent = node.sent() / len(world.start)
        world.notes["server_bytes"] = max(world.notes.get("server_bytes", 0.0), sent)
    for node in [*world.nodes.values(), *world.servers]:
        await node.transport.aclose()
    return Result(
        world.scenario,
        len(world.start),
        world.points,
        world.notes,
        time.perf_counter() - began,
        world.decisions,
    )


def decide(scenario: Scenario) -> tuple[Scenario, dict[str, float]]:
    """The scenario with H chosen where it asks for that, and what it was chosen from."""
    if scenario.inner_steps:
        return scenario, {}
    finest = scenario.codecs[0] if scenario.codec == "auto" else scenario.codec
    size = codec(finest).encoded_size(len(initial(scenario)))
    slowest = scenario.bandwidth / (scenario.narrow_factor if scenario.narrow else 1.0)
    transfer_s = _transfer_s(scenario, size / slowest)
    bounds = {"least": knobs.LEAST_STEPS, "most": knobs.MOST_STEPS}
    if most := scenario.most_steps:  # which H grows up to from there
        bounds = {"least": min(knobs.LEAST_STEPS, most), "most": most}
    found = knobs.inner_steps(transfer_s, scenario.step_s, exposed=scenario.exposed, **bounds)
    notes = {"inner_steps": float(found.inner_steps), "exposed": found.exposed}
    notes |= {"transfer_s": found.transfer_s, "step_s": found.step_s}
    values = scenario.model_dump() | {"inner_steps": found.inner_steps}
    return check(Scenario, values, "the scenario"), notes


def _transfer_s(scenario: Scenario, whole_s: float) -> float:
    """Seconds of what a round sends, where a whole model takes ``whole_s``."""
    if scenario.mode == "push-sum":  # to all receivers at once
        return scenario.neighbours * whole_s + scenario.latency
    if scenario.mode == "gossip":  # one exchange after the other, each both ways at once
        return scenario.neighbours * (whole_s + scenario.latency)
    others = (scenario.islands - 1) / scenario.islands
    return 2 * (others * whole_s + scenario.latency)  # an all-reduce: there and back


def simulate(scenario: Scenario, progress: ShareDone = lambda share: None) -> Result:
    """One run from beginning to end; the same scenario gives the same result."""
    from protocols.memory.virtual_time import run

    scenario, decided = decide(scenario)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors this small only lose time to more
    try:
        return run(live(World(scenario, progress, notes=decided)))
    finally:
        torch.set_num_threads(threads)
