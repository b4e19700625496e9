"""Four members, one of them with a trap, and what must hold when it springs: the fault matrix.

They live in network namespaces with shaped links; their processes are :mod:`member_kit`'s.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import fault_member
import fault_relay
from fault_limits import Deadlines, honest
from fault_member import Action, Role, Setup, Stage, Trap, identity_of
from fault_mutants import Mutant
from fault_traffic import Move, Repeats, repeats
from member_kit import START_S, Crew, Process, forked
from toy_replica import RUN

from benchmarks.netns import Network
from gossip.membership.members import Patience
from gossip.plans.certificate import leader_order
from protocols.codecs import CHUNK, RangeCodec
from protocols.identity import PeerId

COUNT = 4
SIZE = 1_000_000  # elements: 1 MB in int8, so that sending takes a third of a second
CODEC = "int8"
MBIT = 40.0
NARROW = 0.35  # of that: the link of a member that shall merge nothing
SLOWER = 20
THINK_S = 0.75  # longer than the narrow link needs for a round's bytes, or it can never catch up
FIRST = 2  # round of the fault at the earliest: by then the links are measured
LEAST_SHARE = 0.5  # of a survivor's work that is merged, whatever happens to another member
AGAIN = CHUNK  # elements that survivors may send again: a transfer may begin as another one ends
AFTER = 2  # rounds that must follow it
PORT = 4390
PATIENCE = Patience()

RANGES = RangeCodec(CODEC, dense=SIZE - 1000)
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
FAVOURS = Fault("one has its part", "favour", silent=False, comes_back=False)
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
        """The longest stall: by the engine's own deadlines, and by what these may be at most."""
        plan = self.plan()
        own = Deadlines(plan["patience"], plan["expected"], self.silence())
        return min(self._longest(own), self._longest(self.most))

    def _longest(self, deadlines: Deadlines) -> float:
        return deadlines.stall(
            silent=self.fault.silent,
            connected=self.fault.name == "link 20x slower",
            heartbeat=PATIENCE.heartbeat_s,
        )

    @property
    def most(self) -> Deadlines:
        """The longest honest deadlines on these links."""
        narrow = self.usual_rate if self.trap.role == "member" else None
        lag = max(f["lag"] for o in self.others for f in o.of("plan") if f["round"] <= self.round)
        return honest(RANGES.encoded_size(0, SIZE), MBIT, narrow, PATIENCE, lag)

    def moves(self, round_: int) -> list[tuple[PeerId, Move]]:
        """Slices and merged parts of a round that went from one survivor to another.

        Not those to the victim: it may have to get everything once more to catch up.
        """
        return [
            (one.peer, move)
            for one in self.others
            for move in one.of("applied")[-1]["moves"]
            if move.round == round_ and move.to != self.victim.peer
        ]

    def repeats(self) -> Repeats:
        """What survivors sent each other in the round though it, or its sum, was there already."""
        came = [
            move
            for one in self.others
            for sender, move in one.of("applied")[-1]["came"]
            if move.round == self.round and sender == self.victim.peer
        ]
        return repeats(self.moves(self.round), came, RANGES)

    def said(self) -> int:
        """Bytes of all else between survivors, from the round's first plan to the next one's."""
        total = 0
        for one in self.others:
            before, after = (one.of("plan", r)[0]["said"] for r in (self.round, self.round + 1))
            total += sum(after[p] - before.get(p, 0) for p in after if p != self.victim.peer)
        return total

    def uncounted(self) -> int:
        """Bytes that have left survivors and are neither in a move nor said; less than none."""
        total = 0
        for one in self.others:
            newest = one.of("applied")[-1]
            total += sum(newest["sent"].values()) - sum(newest["said"].values())
            total -= sum(move.given for move in newest["moves"])
        return total

    def share(self) -> dict[PeerId, float]:
        """How much of each survivor's work was merged: in the round, or in those after.

        The latter only for what came late: whoever contributes to the round has it in there.
        """
        chain, found = self.chain(), {}
        for one in self.others:
            for round_ in range(self.round, self.round + 1 + AFTER):
                outcome = chain[round_].outcome
                numbers = [i for i, c in enumerate(outcome.contributors) if c.peer == one.peer]
                included = [i for part in outcome.parts for i in part.included]
                found[one.peer] = (
                    sum(i.elements for i in included if i.contributor in numbers) / SIZE
                )
                if numbers:
                    break
        return found

    def committed(self) -> bool:
        """Whether the round merged anything; else it was certified that it did not."""
        return any(part.digest for part in self.chain()[self.round].outcome.parts)

    def wrongs(self, told: Callable[[str, object], None]) -> list[str]:
        """What does not hold, in a word or two each; ``told`` gets what was measured."""
        equal = all(len(self.facts_of(round_)) == 1 for round_ in self.rounds())
        told("digests_equal", equal)
        if not equal:
            return ["histories differ"]
        found = []
        stall, bound, plan = self.stall(self.round), self.bound(), self.plan()
        told("stall_s", round(stall, 2))
        told("bound_s", round(bound, 2))
        if stall >= bound:
            found.append("a long stall")
        told("patience_s", round(plan["patience"], 2))
        told("most_patience_s", round(self.most.patience, 2))
        told("expected_s", round(plan["expected"], 2))
        told("most_expected_s", round(self.most.expected, 2))
        if plan["patience"] > self.most.patience or plan["expected"] > self.most.expected:
            found.append("dishonest deadlines")
        again = self.repeats()
        told("needless", again.needless)
        told("broken", again.broken)
        if again.needless + again.broken > AGAIN:
            found.append("sent again")
        if self.said() > CONTROL * len(self.others) or self.uncounted() > CONTROL:
            found.append("much was said")
        shares = self.share()
        told("least_share", round(min(shares.values()), 3))
        told("outcome", "committed" if self.committed() else "certified as not committed")
        if min(shares.values()) < LEAST_SHARE:
            found.append("work lost")
        decided = self.chain()[self.round]
        told("ballot", (decided.epoch, decided.ballot))
        return found


@contextmanager
def cell(role: Role, stage: Stage, fault: Fault, mutant: Mutant | None = None) -> Iterator[Cell]:
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
                mutant,
            )
            members.append(Process(peers[k], name, *start(fault_member.main, setup)))
        yield Cell(members, members[chosen], network=network, fault=fault, trap=trap, relay=relay)
