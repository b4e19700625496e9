"""Four members, one of them with a trap, and what must hold when it springs: the fault matrix.

The members are real processes in network namespaces with shaped links (:mod:`fault_member`),
forked from one server that has imported everything, since importing takes longer than a round.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any

import fault_member
import fault_relay
import pytest
from fault_member import Action, Role, Setup, Stage, Trap
from simulated_swarm import RUN

from benchmarks.netns import Network
from gossip.certificate import check_certificate, genesis, leader_order, outcome_hash
from protocols.codecs import RangeCodec
from protocols.identity import Identity, PeerId
from protocols.messages import Certificate

COUNT = 4
SIZE = 2_000_000  # elements: 2 MB in int8, so that sending takes a third of a second
CODEC = "int8"
MBIT = 80.0
NARROW = 0.35  # of that: the link of a member that shall merge nothing
SLOWER = 20
THINK_S = 0.25
FIRST = 2  # round of the fault at the earliest: by then the links are measured
AFTER = 2  # rounds that must follow it
PORT = 4390
START_S = 40.0

ENCODED = RangeCodec(CODEC, dense=SIZE - 1000).encoded_size
WIRE = 1.12  # bytes on the wire for each that travels: headers, TLS, acknowledgements
CONTROL = 192 * 1024  # bytes of announcements and messages in one round of a second or some

context = multiprocessing.get_context("forkserver")


def start_server() -> None:
    """Start the process that all others are forked from, unless it runs."""
    context.set_forkserver_preload(["fault_member", "fault_relay"])
    with pytest.MonkeyPatch.context() as patch:  # it does not look where we look for modules
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()


@dataclass(frozen=True)
class Fault:
    """What happens to the victim, and what the others may notice of it."""

    name: str
    action: Action
    silent: bool  # nobody is told: only time tells
    comes_back: bool = True
    relayed: bool = False


FAULTS = (
    Fault("SIGKILL", "kill", silent=False, comes_back=False),
    Fault("SIGSTOP", "stop", silent=True),
    Fault("link dark", "tell", silent=True),
    Fault("link 20x slower", "tell", silent=True),
    Fault("bytes corrupted", "tell", silent=False, relayed=True),
    Fault("connections reset", "tell", silent=False, relayed=True),
    Fault("messages doubled", "double", silent=False),
)


@dataclass
class Process:
    """One member as the tests see it."""

    peer: PeerId
    name: str
    process: Any
    pipe: Connection
    facts: list[dict[str, Any]] = field(default_factory=list)
    ended: bool = False

    def of(self, event: str, round_: int | None = None) -> list[dict[str, Any]]:
        """What it told of one kind, in order."""
        found = [fact for fact in self.facts if fact["event"] == event]
        return [f for f in found if round_ is None or f["round"] == round_]

    def applied(self) -> int:
        """The newest round it has applied; -1: none."""
        done = self.of("applied")
        return int(done[-1]["round"]) if done else -1


@dataclass
class Cell:
    """A swarm in which one fault happens to one member."""

    network: Network
    fault: Fault
    trap: Trap
    victim: Process
    others: list[Process]
    relay: Connection | None
    sprung: dict[str, Any] = field(default_factory=dict)

    @property
    def everybody(self) -> list[Process]:
        return [*self.others, self.victim]

    @property
    def round(self) -> int:
        """The round in which it happened."""
        return int(self.sprung["round"])

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Listen to the members until ``condition()`` is true."""
        end = time.monotonic() + timeout
        while not condition():
            left = end - time.monotonic()
            assert left > 0, f"not within {timeout:.0f} s: {what}\n{self.story()}"
            pipes = {one.pipe: one for one in self.everybody if not one.ended}
            for pipe in wait(list(pipes), timeout=left):
                one = pipes[pipe]
                try:
                    one.facts.append(pipe.recv())
                except (EOFError, OSError):
                    one.ended = True
                    assert one is self.victim, f"{one.name} ended by itself\n{self.story()}"

    def inject(self) -> None:
        """Wait for the victim to come to its stage, and do to it what it cannot do itself."""
        self.until(lambda: self.victim.of("sprung"), START_S, "the stage is reached")
        self.sprung = self.victim.of("sprung")[0]
        match self.fault.name:
            case "link dark":
                self.network.darken(self.victim.name)
            case "link 20x slower":
                self.network.rate(self.victim.name, self.usual_rate / SLOWER)
            case "bytes corrupted":
                self._relay("corrupt")
            case "connections reset":
                self._relay("reset")
        if self.fault.action == "tell":
            self.victim.pipe.send("go on")

    def mend(self) -> None:
        """Bring the victim back, as far as it can be."""
        match self.fault.name:
            case "SIGSTOP":
                os.kill(self.victim.process.pid, signal.SIGCONT)
            case "link dark":
                self.network.light(self.victim.name)
            case "link 20x slower":
                self.network.rate(self.victim.name, self.usual_rate)

    @property
    def usual_rate(self) -> float:
        """Mbit/s of the victim's link."""
        return MBIT * (NARROW if self.trap.role == "member" else 1.0)

    def _relay(self, command: str) -> None:
        assert self.relay is not None
        self.relay.send(command)
        assert self.relay.poll(10)
        self.relay.recv()

    # --- what must hold --------------------------------------------------------------------------

    def facts_of(self, round_: int) -> set[tuple[bytes, bytes]]:
        """Outcomes and states of a round, by all who have applied it."""
        found = set()
        for one in self.everybody:
            for fact in one.of("applied", round_):
                certificate: Certificate = Certificate.decode(fact["certificate"])
                found.add((outcome_hash(certificate.outcome), fact["state"]))
        return found

    def chain(self) -> list[Certificate]:
        """All certificates, checked: each follows from the one before, by its majority."""
        by_round = {f["round"]: f["certificate"] for o in self.everybody for f in o.of("applied")}
        previous, roster = genesis(RUN), None
        found: list[Certificate] = []
        for round_ in range(len(by_round)):
            certificate: Certificate = Certificate.decode(by_round[round_])
            check_certificate(certificate, run=RUN, previous=previous, roster=roster)
            previous, roster = outcome_hash(certificate.outcome), certificate.outcome.next_roster
            found.append(certificate)
        return found

    def stall(self, round_: int) -> float:
        """Seconds from the fault until all the others have applied a round."""
        return max(one.of("applied", round_)[0]["time"] for one in self.others) - float(
            self.sprung["time"]
        )

    def plan(self) -> dict[str, Any]:
        """The plan that was in force when it happened, or the first after it."""
        plans = [f for one in self.everybody for f in one.of("plan", self.round)]
        return min(plans, key=lambda f: (f["ballot"], f["time"]))

    def bound(self) -> float:
        """The longest stall that the engine's own deadlines allow, from measured speeds."""
        plan = self.plan()
        patience, expected = plan["patience"], plan["expected"]
        member = fault_member.PATIENCE
        if self.fault.silent:
            suspicion = max(member.suspect_floor_s, member.suspect_factor * member.heartbeat_s)
            notice = max(suspicion, 2.5 * patience + 4 * expected)  # of an owner's silence
        else:
            notice = member.heartbeat_s  # the next message fails
        stand = patience  # the next in the leading order takes its turn
        repair = patience + 4 * expected  # slices are waited for, and what is merged is sent
        return float(notice + stand + repair)

    def merges(self) -> dict[PeerId, int]:
        """Encoded bytes of the parts that each was to merge."""
        return {
            one.peer: sum(
                ENCODED(start, stop)
                for start, stop, owner in self.plan()["parts"]
                if owner == one.peer
            )
            for one in self.everybody
        }

    def usual_bytes(self, one: Process) -> int:
        """What a member sends in a round without faults: slices to all, its part to all."""
        own = self.merges()[one.peer]
        return ENCODED(0, SIZE) - own + own * (COUNT - 1)

    def sent(self, one: Process) -> int:
        """Bytes that a member put on the wire from the round's first plan to the next one's."""
        first = one.of("plan", self.round)[0]["sent"]
        return int(one.of("plan", self.round + 1)[0]["sent"] - first)

    def again(self, one: Process) -> int:
        """The most that a member may have to send again: what belongs to the victim's part.

        Its slice of that part, to the new owner; if it is the new owner, the part to everybody.
        Where connections broke and the victim lives, once more what was on its way to it.
        """
        merges = self.merges()
        lost = merges[self.victim.peer]
        took_over = 0
        certificate = self.chain()[self.round]
        lost_ranges = {(s, e) for s, e, owner in self.plan()["parts"] if owner == self.victim.peer}
        for result in certificate.outcome.parts:
            if (result.start, result.stop) in lost_ranges and result.owner == one.peer:
                took_over += ENCODED(result.start, result.stop)
        broken = merges[one.peer] if self.fault.relayed else 0
        return lost + (COUNT - 1) * took_over + broken

    def story(self) -> str:
        """What everybody told, for whoever reads a failure."""
        began = min((f["time"] for one in self.everybody for f in one.facts), default=0.0)
        names = {one.peer: one.name for one in self.everybody}
        lines = []
        for one in self.everybody:
            for f in one.facts:
                shown = {
                    key: names.get(value, value)
                    for key, value in f.items()
                    if key not in ("time", "certificate", "state", "event", "parts")
                }
                if "parts" in f:
                    shown["parts"] = [(names[o], e - s) for s, e, o in f["parts"]]
                role = " (victim)" if one is self.victim else ""
                lines.append((f["time"], f"{one.name}{role} {f['event']} {shown}"))
        return "\n".join(f"{at - began:8.3f} {text}" for at, text in sorted(lines))


@contextmanager
def cell(role: Role, stage: Stage, fault: Fault) -> Iterator[Cell]:
    """Four members, and the trap of one set; all gone afterwards."""
    seeds = [bytes([k + 1]) * 32 for k in range(COUNT)]
    peers = [Identity.from_seed(seed).peer_id for seed in seeds]
    order = leader_order(RUN, 0, FIRST, peers)
    chosen = peers.index(order[0] if role == "leader" else order[-1])
    trap = Trap(role, stage, fault.action, FIRST)
    names = [f"m{k}" for k in range(COUNT)]
    start_server()
    made: list[Process] = []
    relay: Connection | None = None
    helpers: list[Any] = []
    with Network([*names, "relay"]) as network:
        try:
            for k, name in enumerate(names):
                narrow = NARROW if role == "member" and k == chosen else 1.0
                network.rate(name, MBIT * narrow)
            listening = {
                peer: f"{network.address(name)}:{PORT}"
                for peer, name in zip(peers, names, strict=True)
            }
            through = {
                peer: f"{network.address('relay')}:{PORT + 1 + k}" for k, peer in enumerate(peers)
            }
            if fault.relayed:
                routes = {PORT + 1 + k: listening[peer] for k, peer in enumerate(peers)}
                relay, end = context.Pipe()
                helper = context.Process(
                    target=fault_relay.main,
                    args=(end, network.path("relay"), network.address("relay"), routes),
                    daemon=True,
                )
                helper.start()
                helpers.append(helper)
                end.close()
                assert relay.poll(START_S)
                relay.recv()
            for k, (peer, name) in enumerate(zip(peers, names, strict=True)):
                addresses = {
                    other: (through if fault.relayed and chosen in (k, j) else listening)[other]
                    for j, other in enumerate(peers)
                    if j != k
                }
                setup = Setup(
                    seeds[k],
                    listening[peer],
                    addresses,
                    network.path(name),
                    SIZE,
                    CODEC,
                    THINK_S,
                    trap if k == chosen else None,
                )
                pipe, end = context.Pipe()
                process = context.Process(
                    target=fault_member.main, args=(end, setup), name=name, daemon=True
                )
                process.start()
                end.close()
                made.append(Process(peer, name, process, pipe))
            victim = made[chosen]
            yield Cell(network, fault, trap, victim, [m for m in made if m is not victim], relay)
        finally:
            for process in [*helpers, *(one.process for one in made)]:
                process.kill()
            for process in [*helpers, *(one.process for one in made)]:
                process.join()
