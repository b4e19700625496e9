"""Four members, one of them with a trap, and what must hold when it springs: the fault matrix.

They live in network namespaces with shaped links; their processes are :mod:`member_kit`'s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import fault_member
import fault_relay
from fault_member import Action, Role, Setup, Stage, Trap, identity_of
from member_kit import START_S, Crew, Process, forked
from toy_replica import RUN

from benchmarks.netns import Network
from gossip.membership.members import Patience
from gossip.plans.certificate import leader_order
from protocols.codecs import RangeCodec
from protocols.identity import PeerId

COUNT = 4
SIZE = 1_000_000  # elements: 1 MB in int8, so that sending takes a third of a second
CODEC = "int8"
MBIT = 40.0
NARROW = 0.35  # of that: the link of a member that shall merge nothing
SLOWER = 20
THINK_S = 0.75  # longer than the narrow link needs for a round's bytes, or it can never catch up
FIRST = 2  # round of the fault at the earliest: by then the links are measured
AFTER = 2  # rounds that must follow it
PORT = 4390
PATIENCE = Patience()

ENCODED = RangeCodec(CODEC, dense=SIZE - 1000).encoded_size
CONTROL = 96 * 1024  # bytes that a member says, or had under way, in a round of some seconds


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
SPOILT = Fault("parts spoilt", "spoil", silent=True)


@dataclass
class Cell(Crew):
    """A swarm in which one fault happens to one member."""

    network: Network = field(kw_only=True)
    fault: Fault = field(kw_only=True)
    trap: Trap = field(kw_only=True)
    relay: Connection | None = field(kw_only=True)
    sprung: dict[str, Any] = field(default_factory=dict)

    @property
    def victim(self) -> Process:
        assert self.doomed is not None
        return self.doomed

    @property
    def others(self) -> list[Process]:
        """The survivors."""
        return [one for one in self.members if one is not self.doomed]

    @property
    def round(self) -> int:
        """The round in which it happened."""
        return int(self.sprung["round"])

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
                os.kill(self.victim.pid, signal.SIGCONT)
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

    def stall(self, round_: int) -> float:
        """Seconds from the fault until all the others have applied a round."""
        return max(one.of("applied", round_)[0]["time"] for one in self.others) - float(
            self.sprung["time"]
        )

    def plan(self) -> dict[str, Any]:
        """The first plan of the round that a survivor has seen; none yet: the victim's own."""
        plans = [f for one in self.others for f in one.of("plan", self.round)]
        plans = plans or self.victim.of("plan", self.round)
        return min(plans, key=lambda f: (f["ballot"], f["time"]))

    def silence(self) -> float:
        """The longest that survivors forgave anybody to be silent for, by what they measured."""
        plans = [f for one in self.others for f in one.of("plan")]
        return max(float(f["silence"]) for f in plans if f["round"] <= self.round)

    def bound(self) -> float:
        """The longest stall that the engine's own deadlines allow, from measured speeds."""
        plan = self.plan()
        patience, expected = plan["patience"], plan["expected"]
        if self.fault.silent:
            notice = 2.5 * patience + 4 * expected  # of an owner that does not deliver
            if self.fault.name != "link 20x slower":  # or of its silence
                notice = min(notice, self.silence())
            notice += patience / 4  # doubts wait for each other
        else:
            notice = PATIENCE.heartbeat_s  # the next message fails
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
            for one in self.members
        }

    def usual_bytes(self) -> int:
        """What survivors send to each other without faults: slices, and their merged parts."""
        merges, lost = self.merges(), self.lost()
        slices = sum(ENCODED(0, SIZE) - lost - merges[one.peer] for one in self.others)
        return slices + (ENCODED(0, SIZE) - lost) * (COUNT - 2)

    def sent(self) -> int:
        """Bytes of bodies between survivors, from the round's first plan to the next one's.

        Not those to the victim: it may have to get everything once more to catch up.
        """
        total = 0
        for one in self.others:
            before, after = (one.of("plan", r)[0]["sent"] for r in (self.round, self.round + 1))
            total += sum(after[p] - before.get(p, 0) for p in after if p != self.victim.peer)
        return total

    def lost(self) -> int:
        """Encoded bytes of the victim's part."""
        return self.merges()[self.victim.peer]

    def again(self) -> int:
        """The most that survivors may send again, all together: what the victim's part needs.

        Its slices go to a new owner, and from there, or from whoever has it merged already, the
        part goes to the others: each has it sent to once.
        """
        return 2 * (COUNT - 2) * self.lost()


@contextmanager
def cell(role: Role, stage: Stage, fault: Fault) -> Iterator[Cell]:
    """Four members, and the trap of one set; all gone afterwards."""
    peers = [identity_of(k).peer_id for k in range(COUNT)]
    order = leader_order(RUN, 0, FIRST, peers)
    chosen = peers.index(order[0] if role == "leader" else order[-1])
    trap = Trap(role, stage, fault.action, FIRST)
    names = [f"m{k}" for k in range(COUNT)]
    with Network([*names, "relay"]) as network, forked() as start:
        listening = [f"{network.address(name)}:{PORT}" for name in names]
        relay, through = None, listening
        if fault.relayed:
            through = [f"{network.address('relay')}:{PORT + 1 + k}" for k in range(COUNT)]
            relay, _ = start(
                fault_relay.main, network.path("relay"), dict(zip(through, listening, strict=True))
            )
            assert relay.poll(START_S)
            relay.recv()
        members = []
        for k, name in enumerate(names):
            mine = k == chosen
            network.rate(name, MBIT * (NARROW if mine and role == "member" else 1.0))
            addresses = {
                peer: (through if mine or j == chosen else listening)[j]
                for j, peer in enumerate(peers)
                if j != k
            }
            setup = Setup(
                k,
                listening[k],
                addresses,
                SIZE,
                CODEC,
                THINK_S,
                PATIENCE,
                network.path(name),
                trap if mine else None,
            )
            members.append(Process(peers[k], name, *start(fault_member.main, setup)))
        yield Cell(members, members[chosen], network=network, fault=fault, trap=trap, relay=relay)
