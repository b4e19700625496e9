"""One member of a swarm as a process of its own, with a trap in it: for the fault matrix.

It is what :mod:`gossip.chain.chain` makes of it, over the real transport with mutual TLS, in a
network namespace of its own; its training is noise. It tells its parent over a pipe what it does.
At one stage of one round, if it has the role for it, its trap springs: it kills or stops itself, or
tells the parent and stands still until that has done something to its link.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import torch
from fault_meddling import Meddling
from fault_mutants import Mutant, mutate
from gossip_kit import announce_of
from toy_replica import RUN, ToyReplica

from gossip.chain.swarm import Swarm
from gossip.exchange.exchange import Exchange
from gossip.hooks import Hooks
from gossip.membership.members import Membership, Patience
from gossip.membership.presence import Presence
from gossip.plans.rules import Rules
from gossip.rounds.instructions import FollowPlan, Instruction
from gossip.rounds.round import Round
from gossip.wiring import Wiring
from node.bench.watching import Stage as Passed
from node.bench.watching import Watch, WatchedChain
from protocols.codecs import RangeCodec
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.messages import Certificate, Plan
from protocols.tasks import Tasks

Role = Literal["member", "owner", "leader"]
Stage = Literal["before sending", "in the middle of sending", "after merging", "before certifying"]
STAGES: dict[Passed, Stage] = {
    Passed.PLANNED: "before sending",  # and the leader has not sent its plan either
    Passed.MERGED: "after merging",
    Passed.CERTIFYING: "before certifying",
}  # for the middle, bytes on the wire are counted
Action = Literal["kill", "stop", "tell", "double", "spoil", "favour"]

CLONE_NEWNET = 0x40000000
WINDOW_S = 0.1
WINDOWS = 20
WINDOW_BYTES = 64 * 1024  # less is no load: handshakes and greetings say nothing of the link
POLL_S = 0.002  # how often the bytes that went out are looked at
LAG_S = 0.02  # how often it is looked whether this process runs when it wants to
ASK_S = 0.05  # until all are there
KEPT = 64  # rounds, for those who were away


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

    number: int  # whose identity it has
    listen: str
    addresses: dict[PeerId, str]  # of the others
    size: int  # elements
    codec: str
    think: float  # seconds of training between rounds
    patience: Patience
    namespace: str = ""  # a file that names it; empty: where the parent is
    trap: Trap | None = None
    mutant: Mutant | None = None  # what is wrong with its engine


def identity_of(number: int) -> Identity:
    """The same in every run."""
    return Identity.from_seed((number + 1).to_bytes(32, "big"))


def enter(namespace: str) -> None:
    """Move this process, which has one thread yet, into a network namespace."""
    if namespace:
        file = os.open(namespace, os.O_RDONLY)
        if ctypes.CDLL(None, use_errno=True).setns(file, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(file)


def wire_bytes() -> tuple[int, int]:
    """Bytes that have come into and left this namespace so far, headers included."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    found = [line.split() for line in lines[2:] if not line.lstrip().startswith("lo:")]
    return sum(int(words[1]) for words in found), sum(int(words[9]) for words in found)


def sent_bytes() -> int:
    """Bytes that have left this namespace."""
    return wire_bytes()[1]


class Meter(threading.Thread):
    """Measures in passing what the link carries: the most in a window, of the last few seconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.download = self.upload = 0.0  # bytes a second; 0: not known yet

    def run(self) -> None:
        downs: deque[float] = deque(maxlen=WINDOWS)
        ups: deque[float] = deque(maxlen=WINDOWS)
        before, then = wire_bytes(), time.monotonic()
        while True:
            time.sleep(WINDOW_S)
            bytes_, now = wire_bytes(), time.monotonic()
            for way, rates in enumerate((downs, ups)):
                count = bytes_[way] - before[way]
                if count >= WINDOW_BYTES:
                    rates.append(count / (now - then))
            before, then = bytes_, now
            self.download, self.upload = max(downs, default=0.0), max(ups, default=0.0)


def main(pipe: Connection, setup: Setup) -> None:
    """The life of a member: until it is killed."""
    enter(setup.namespace)
    torch.set_num_threads(1)
    if setup.mutant is not None:
        mutate(setup.mutant)
    member = Member(pipe, setup)
    asyncio.run(member.live())


@dataclass
class TrappedChain(WatchedChain):
    """A member that reports its plans, and shows them to its trap."""

    planned: Callable[[Plan], None] = lambda plan: None

    def carry_out(self, of: Round, instructions: list[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, FollowPlan) and of is self.round:
                self.planned(instruction.plan)
        super().carry_out(of, instructions)


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
        """Note whether this is the round: one in which the role is right.

        Where the others decide before this member comes to its stage it is the next such round.
        """
        owns = sum(part.stop - part.start for part in plan.parts if part.owner == self.me)
        leads = plan.leader == self.me
        role = "leader" if leads else "owner" if owns > rules.size / 8 else "member"
        if owns and role == "member":
            return  # neither the one nor the other
        gives = any(c.peer == self.me and c.active for c in plan.contributors)
        right = role == self.setup.role and gives and (plan.epoch, plan.ballot) == (0, 0)
        if self.done or plan.round < self.setup.first or not right:
            return
        self.round = plan.round
        if self.setup.stage == "in the middle of sending":
            other = (rules.size - owns) / rules.size
            half = int(rules.encoded_bytes(plan.codec, 0, rules.size) * other / 2)
            told = (plan.round, sent_bytes() + half)
            threading.Thread(target=self._watch, args=told, daemon=True).start()

    def passing(self, passed: Passed, round_: int) -> None:
        """Spring if it is time."""
        if STAGES.get(passed) == self.setup.stage:
            self.spring(round_)

    def spring(self, round_: int) -> None:
        """Spring if this is the round."""
        if round_ != self.round:
            return
        with self._lock:
            if self.done:
                return
            self.done = True
        action = self.setup.action
        self.told(event="sprung", round=round_)
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

    def _watch(self, round_: int, until: int) -> None:
        """Spring when so many bytes have left, if it is still that round."""
        while self.round == round_:
            if sent_bytes() >= until:
                self.spring(round_)
                return
            time.sleep(POLL_S)


class Member:
    """Everything of one member."""

    def __init__(self, pipe: Connection, setup: Setup) -> None:
        self.pipe, self.setup = pipe, setup
        self._lock = threading.Lock()
        self.lag = 0.0  # seconds, the longest yet: how much later than it wants this process runs

    async def _watch_lag(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            due = clock() + LAG_S
            await asyncio.sleep(LAG_S)
            self.lag = max(self.lag, clock() - due)

    def tell(self, **fact: Any) -> None:
        """Report to the parent."""
        with self._lock:
            self.pipe.send({"time": time.monotonic(), **fact})

    def sent(self) -> dict[PeerId, int]:
        """Bytes of bodies sent so far, by peer."""
        return {p: s.bytes_out for p, s in self.transport.stats.by_peer.items()}

    def wait(self) -> None:
        """Stand still until the parent has done its part."""
        self.pipe.recv()

    def meddle(self, action: Action) -> None:
        self.transport.doubles = action == "double"
        self.transport.spoils = action == "spoil"
        if action == "favour":
            # one that contributes nothing, if there is one: whoever merges the part anew then needs
            # a slice from another, or has to send it to this one
            busy = {one.peer for one in self.plan.contributors}
            others = sorted(self.setup.addresses)
            self.transport.favoured = min(others, key=lambda peer: peer in busy)
            self.transport.after = lambda: os.kill(os.getpid(), signal.SIGKILL)

    async def live(self) -> None:
        """Take part until killed."""
        setup = self.setup
        identity = identity_of(setup.number)
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
            spawn = Tasks(group).spawn
            wiring = Wiring(
                self.transport, identity, RUN, codec, spawn, asyncio.to_thread, loop.time
            )
            announce = announce_of(
                identity.peer_id,
                replica.place,
                ready=False,
                eta=setup.think,
                upload=0.0,
                download=0.0,
            )
            presence = Presence(
                wiring,
                Membership(identity.peer_id, setup.patience),
                announce,
                lambda: (replica.place,),
                wall=time.time,
            )

            def applied(certificate: Certificate, exchange: Exchange | None) -> None:
                del exchange
                self.tell(
                    event="applied",
                    round=certificate.outcome.round,
                    certificate=certificate.encode(),
                    state=replica.place.state,
                    moves=[copy(move) for move in self.transport.moves],
                    came=self.transport.came.copy(),
                    sent=self.sent(),
                    said=dict(self.transport.said),
                )
                moved.set()

            hooks = Hooks(
                applied=applied,
                peer=lambda who, now, before: self.tell(
                    event="peer", who=who, now=now, before=before
                ),
                rejected=lambda who, error: self.tell(event="rejected", who=who, why=str(error)),
                behind=lambda fragment, ending: self.tell(event="behind", why=ending.name),
            )
            rules = Rules(setup.size, (setup.codec,), codec.size_as)
            trap = None
            if setup.trap is not None:
                trap = Sprung(setup.trap, identity.peer_id, self.tell, self.wait, self.meddle)

            def planned(plan: Plan) -> None:
                self.plan = plan
                self.tell(
                    event="plan",
                    round=plan.round,
                    ballot=(plan.epoch, plan.ballot),
                    leader=plan.leader,
                    expected=plan.expected_s,
                    patience=plan.patience_s,
                    silence=max(i.forgiven_s for i in presence.membership.islands.values()),
                    parts=[(part.start, part.stop, part.owner) for part in plan.parts],
                    sent=self.sent(),
                    said=dict(self.transport.said),
                    lag=self.lag,
                )
                if trap is not None:
                    trap.planned(plan, rules)

            watch = Watch() if trap is None else Watch(trap.passing)
            chain = TrappedChain(
                wiring, replica, rules, presence, hooks, KEPT, watch=watch, planned=planned
            )
            swarm = Swarm((chain,))
            while len(presence.membership.islands) < len(setup.addresses):
                for peer in setup.addresses:
                    if peer not in presence.membership.islands:
                        await presence.ask(peer)
                await asyncio.sleep(ASK_S)
            group.create_task(self._watch_lag())
            group.create_task(swarm.run())
            group.create_task(self._train(chain, replica, moved))

    async def _train(self, chain: TrappedChain, replica: ToyReplica, moved: asyncio.Event) -> None:
        """Be ready ``think`` seconds after the last contribution; at once for work not used yet."""
        meter, clock = Meter(), asyncio.get_running_loop().time
        meter.start()
        due = clock() + self.setup.think
        while True:
            round_, counted = replica.place.round, replica.counted
            chain.watch.begin(round_)
            left = max(0.0, due - clock())
            chain.update(eta=left, ready=False)
            await asyncio.sleep(left)
            if replica.place.round != round_:
                continue  # repeated one that it missed, and trained on meanwhile
            replica.train(self.setup.number + 1000 * round_)
            chain.update(
                ready=True,
                tokens=1000,
                steps=10,
                weight=1000.0,
                eta=0.0,
                upload=meter.upload,
                download=meter.download,
            )
            while replica.place.round == round_:
                moved.clear()
                await moved.wait()
            if replica.counted > counted:
                due = clock() + self.setup.think
