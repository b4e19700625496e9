"""One member of a swarm as a process of its own, with a trap in it: for the fault matrix.

It is what :mod:`gossip.driver` makes of it, over the real transport with mutual TLS, in a network
namespace of its own; its training is noise. It tells its parent over a pipe what it does. At one
stage of one round, if it has the role for it, its trap springs: it kills or stops itself, or tells
the parent and stands still until that has done something to its link.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from simulated_swarm import RUN, ToyReplica

from gossip.driver import Hooks, Swarm
from gossip.exchange import Exchange, Wiring
from gossip.membership import Membership, Patience
from gossip.planning import Rules
from gossip.presence import Presence
from gossip.round import Instruction, Round, Send, Work
from protocols.codecs import RangeCodec
from protocols.http import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.messages import Announce, Certificate, PartResult, Plan, Vote
from protocols.transport import Buffer, Incoming, Outgoing

Role = Literal["member", "owner", "leader"]
Stage = Literal["before sending", "in the middle of sending", "after merging", "before certifying"]
Action = Literal["kill", "stop", "tell", "double", "spoil"]

CLONE_NEWNET = 0x40000000
POLL_S = 0.002  # how often the bytes that went out are looked at
ASK_S = 0.05  # until all are there
KEPT = 64  # rounds, for those who were away
PATIENCE = Patience()


@dataclass(frozen=True)
class Trap:
    """When and how something happens to a member."""

    role: Role
    stage: Stage
    action: Action
    first: int  # in this round at the earliest


@dataclass(frozen=True)
class Setup:
    """What a member is started with."""

    seed: bytes
    listen: str
    addresses: dict[PeerId, str]  # of the others
    namespace: str  # a file that names it; empty: where the parent is
    size: int  # elements
    codec: str
    think: float  # seconds of training between rounds
    trap: Trap | None = None


def enter(namespace: str) -> None:
    """Move this process, which has one thread yet, into a network namespace."""
    if namespace:
        file = os.open(namespace, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def sent_bytes() -> int:
    """Bytes that have left this namespace on the wire so far, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    return sum(int(line.split()[9]) for line in lines[2:] if not line.lstrip().startswith("lo:"))


def main(pipe: Connection, setup: Setup) -> None:
    """The life of a member: until it is killed."""
    enter(setup.namespace)
    torch.set_num_threads(1)
    member = Member(pipe, setup)
    asyncio.run(member.live())


@dataclass
class TrappedSwarm(Swarm):
    """A swarm member that passes its trap at every stage."""

    trap: Sprung | None = None
    told: Callable[..., None] = lambda **fact: None

    def carry_out(self, of: Round, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Work) and of is self.round:
                self._on_plan(instruction.plan)
            if isinstance(instruction, Send) and isinstance(instruction.message, Vote):
                self._pass("before certifying")
        super().carry_out(of, instructions)

    def held(self, result: PartResult) -> None:
        merges = self.trap is None or self.trap.setup.role != "member"
        if result.owner == self.me or not merges:
            self._pass("after merging")
        super().held(result)

    def _on_plan(self, plan: Plan) -> None:
        parts = [(part.start, part.stop, part.owner) for part in plan.parts]
        self.told(
            event="plan",
            round=plan.round,
            ballot=(plan.epoch, plan.ballot),
            leader=plan.leader,
            expected=plan.expected_s,
            patience=plan.patience_s,
            parts=parts,
            sent=sent_bytes(),
        )
        if self.trap is not None:
            self.trap.planned(plan, self.rules)
            self._pass("before sending")

    def _pass(self, stage: Stage) -> None:
        if self.trap is not None:
            self.trap.passing(stage, self.round.place.round)


@dataclass
class Sprung:
    """A trap at work. ``told`` reports; ``wait`` stands still until the parent says go on."""

    setup: Trap
    me: PeerId
    told: Callable[..., None]
    wait: Callable[[], None]
    meddle: Callable[[Action], None]
    round: int | None = None  # in which it is to spring
    done: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def planned(self, plan: Plan, rules: Rules) -> None:
        """Note whether this is the round; it is the first one in which the role is right."""
        owns = sum(part.stop - part.start for part in plan.parts if part.owner == self.me)
        leads = plan.leader == self.me
        role = "leader" if leads else "owner" if owns else "member"
        gives = any(c.peer == self.me and c.active for c in plan.contributors)
        right = role == self.setup.role and gives and (plan.epoch, plan.ballot) == (0, 0)
        if self.round is not None or plan.round < self.setup.first or not right:
            return
        self.round = plan.round
        if self.setup.stage == "in the middle of sending":
            other = (rules.size - owns) / rules.size
            half = int(rules.encoded_bytes(0, rules.size) * other / 2)
            threading.Thread(target=self._watch, args=(sent_bytes() + half,), daemon=True).start()

    def passing(self, stage: Stage, round_: int) -> None:
        """Spring if it is time."""
        if stage != self.setup.stage or round_ != self.round:
            return
        with self._lock:
            if self.done:
                return
            self.done = True
        action = self.setup.action
        self.told(event="sprung", round=round_, stage=stage)
        match action:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "tell":
                if threading.current_thread() is threading.main_thread():
                    self.wait()
            case _:
                self.meddle(action)

    def _watch(self, until: int) -> None:
        """Spring when so many bytes have left."""
        while sent_bytes() < until:
            time.sleep(POLL_S)
        assert self.round is not None
        self.passing("in the middle of sending", self.round)


class Meddling:
    """The transport of a member that doubles what it sends, or spoils the parts it merged."""

    def __init__(self, inner: HttpTransport) -> None:
        self.inner = inner
        self.doubles = False
        self.spoils = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def call(self, peer: PeerId, name: str, body: bytes, **options: Any) -> bytes:
        """The call, twice at the same time."""
        if not self.doubles:
            return await self.inner.call(peer, name, body, **options)
        first, _ = await asyncio.gather(
            self.inner.call(peer, name, body, **options),
            self.inner.call(peer, name, body, **options),
            return_exceptions=True,
        )
        if isinstance(first, BaseException):
            raise first
        return first

    async def push(
        self, peer: PeerId, name: str, header: bytes, body: Any, *, timeout: float
    ) -> bytes:
        """The push, and the same bytes again afterwards."""
        if self.spoils and name == "merged":
            body = again([spoilt(await everything(body))])
        if not self.doubles:
            return await self.inner.push(peer, name, header, body, timeout=timeout)
        data = await everything(body)
        first, _ = await asyncio.gather(
            self.inner.push(peer, name, header, again([data]), timeout=timeout),
            self.inner.push(peer, name, header, again([data]), timeout=timeout),
            return_exceptions=True,
        )
        if isinstance(first, BaseException):
            raise first
        return first

    def pull(self, *arguments: Any, **options: Any) -> AbstractAsyncContextManager[Incoming]:
        return self.inner.pull(*arguments, **options)


async def everything(body: Outgoing) -> bytes:
    """All of a body."""
    return b"".join([bytes(chunk) async for chunk in body.chunks])


def again(pieces: list[bytes]) -> Outgoing:
    """A body of these bytes."""

    async def chunks() -> AsyncIterator[Buffer]:
        for piece in pieces:
            yield piece

    return Outgoing(sum(map(len, pieces)), chunks())


def spoilt(data: bytes) -> bytes:
    """The same but for one bit."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


class Member:
    """Everything of one member."""

    def __init__(self, pipe: Connection, setup: Setup) -> None:
        self.pipe, self.setup = pipe, setup
        self._lock = threading.Lock()

    def tell(self, **fact: Any) -> None:
        """Report to the parent."""
        with self._lock:
            self.pipe.send({"time": time.monotonic(), **fact})

    def wait(self) -> None:
        """Stand still until the parent has done its part."""
        self.pipe.recv()

    def meddle(self, action: Action) -> None:
        self.transport.doubles = action == "double"
        self.transport.spoils = action == "spoil"

    async def live(self) -> None:
        """Take part until killed."""
        setup = self.setup
        identity = Identity.from_seed(setup.seed)
        loop = asyncio.get_running_loop()
        codec = RangeCodec(setup.codec, dense=setup.size - 1000)
        everybody = tuple(sorted([identity.peer_id, *setup.addresses]))
        replica = ToyReplica(identity.peer_id, everybody, setup.size, codec)
        inner = HttpTransport(identity, listen=setup.listen)
        for peer, address in setup.addresses.items():
            inner.book.add(peer, address)
        self.transport = Meddling(inner)
        moved = asyncio.Event()
        async with inner, asyncio.TaskGroup() as group:

            def spawn(coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
                return group.create_task(coroutine)

            wiring = Wiring(
                self.transport, identity, RUN, codec, spawn, asyncio.to_thread, loop.time
            )
            place = replica.place
            announce = Announce(
                peer=identity.peer_id,
                role="island",
                status="active",
                incarnation=1,
                addresses=(),
                version="0",
                region="",
                round=0,
                head=place.previous,
                state=place.state,
                work=0,
                ready=False,
                tokens=0,
                steps=0,
                weight=0.0,
                eta=setup.think,
                tokens_per_second=0.0,
                steps_per_second=0.0,
                upload=0.0,
                download=0.0,
                loss=0.0,
                validation_loss=0.0,
                total_tokens=0,
                sketch_round=0,
                sketch=b"",
            )
            presence = Presence(
                wiring,
                Membership(identity.peer_id, PATIENCE),
                announce,
                lambda: replica.place,
                wall=time.time,
            )

            def applied(certificate: Certificate, exchange: Exchange | None) -> None:
                del exchange
                self.tell(
                    event="applied",
                    round=certificate.outcome.round,
                    certificate=certificate.encode(),
                    state=replica.place.state,
                    sent=sent_bytes(),
                )
                moved.set()

            hooks = Hooks(
                applied=applied,
                peer=lambda who, now, before: self.tell(
                    event="peer", who=who, now=now, before=before
                ),
                rejected=lambda who, why: self.tell(event="rejected", who=who, why=why),
                behind=lambda ending, peers: self.tell(event="behind", why=ending.name),
            )
            rules = Rules(setup.size, setup.codec, codec.encoded_size)
            trap = None
            if setup.trap is not None:
                trap = Sprung(setup.trap, identity.peer_id, self.tell, self.wait, self.meddle)
            swarm = TrappedSwarm(
                wiring, replica, rules, presence, hooks, KEPT, trap=trap, told=self.tell
            )
            while len(presence.membership.islands) < len(setup.addresses):
                for peer in setup.addresses:
                    await presence.ask(peer)
                await asyncio.sleep(ASK_S)
            group.create_task(swarm.run())
            group.create_task(self._train(swarm, replica, moved))

    async def _train(self, swarm: Swarm, replica: ToyReplica, moved: asyncio.Event) -> None:
        while True:
            round_ = replica.place.round
            swarm.update(eta=self.setup.think, ready=False)
            await asyncio.sleep(self.setup.think)
            if replica.place.round != round_:
                continue
            replica.train(int.from_bytes(self.setup.seed[:2], "big") + 1000 * round_)
            speeds = list(self.transport.stats.by_peer.values())
            swarm.update(
                ready=True,
                tokens=1000,
                steps=10,
                weight=1000.0,
                eta=0.0,
                upload=max((s.upload or 0.0 for s in speeds), default=0.0),
                download=max((s.download or 0.0 for s in speeds), default=0.0),
            )
            while replica.place.round == round_:
                moved.clear()
                await moved.wait()
