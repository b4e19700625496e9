"""Four islands, and somebody is always dying: real kills at random moments of real rounds.

Who leads a round and who merges parts of it follows from certificates, which any island hands out:
the certificate of round r - 1 names the roster of round r,
``gossip.plans.certificate.leader_order`` who of it leads first; the outcome of round r names the
owner of every part. The victim is chosen by the former just before the kill; afterwards the chain
tells what the victims really were.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from swarm_kit import (
    Gap,
    Island,
    Islands,
    Record,
    Stranger,
    digests,
    gaps,
    islands,
    until,
)

from gossip.plans.certificate import check_certificate, genesis, leader_order, outcome_hash
from protocols.errors import TransportError
from protocols.identity import PeerId
from protocols.messages import Certificate

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(500)]

GRACE_S = 0.5
SLACK_S = 2.0
RUN = {"inner_steps": 60, "total_rounds": 500, "min_grace_s": GRACE_S, "data__batch_size": 4}
KILLS = 6
MIN_ROUNDS = 12
STOPPED_S = 6.0
END_S = 0.5  # of a round: the grace, while plans are made and parts merged


@dataclass
class Kill:
    """What was done to whom."""

    time: float
    round: int  # under way at that moment
    role: str  # as what it was chosen
    victim: PeerId


class Killer:
    """Chooses victims and moments, and collects the chain: the killed forget it."""

    def __init__(self, made: Islands, stranger: Stranger, seed: int) -> None:
        self.made, self.stranger = made, stranger
        self.random = random.Random(seed)
        self.kills: list[Kill] = []
        self.chain: list[Certificate] = []

    def collect(self) -> Certificate:
        """Get the certificates that are new; the newest one."""

        def more() -> bool:
            for island in self.made.up():
                with contextlib.suppress(TransportError):  # it is just starting, or stopping
                    self.chain += self.stranger.certificates(island, len(self.chain))
            return bool(self.chain)

        until(more, 30, "somebody shows a certificate")
        return self.chain[-1]

    def in_office(self) -> list[Island]:
        """Members of the roster of the round under way that run, the leader first."""
        newest = self.collect()
        order = leader_order(newest.run, 0, newest.outcome.round + 1, newest.outcome.next_roster)
        running = {island.peer: island for island in self.made.up()}
        return [running[peer] for peer in order if peer in running]

    def kill(self, role: str) -> Island:
        """Wait for a random moment of a round, and kill its leader or another member.

        A member dies at any time of the round, an owner or leader around its end, when plans are
        made and parts merged: within :data:`END_S` after the second one has taken its last step.
        """
        office = until(lambda: len(o := self.in_office()) >= 3 and o, 90, "three in office")
        watched = max(office, key=Island.last_round)
        before = watched.events("round")[-1]
        until(lambda: watched.last_round() > before["round"], 60, "a round begins")
        number = watched.last_round() + 1
        leader, *others = self.in_office()
        victim = leader if role == "leader" else self.random.choice(others)
        if role == "member":
            length = watched.events("round")[-1]["time"] - before["time"]
            wait = self.random.uniform(0, min(5.0, length))
        else:
            until(lambda: sum(i.awaits(number) for i in office) >= 2, 60, "two are done")
            wait = self.random.uniform(0, END_S)
        moment = time.monotonic() + wait
        until(lambda: time.monotonic() >= moment, 60, "the moment")
        victim.kill()
        round_ = 1 + max(island.last_round() for island in office if island is not victim)
        self.kills.append(Kill(time.time(), round_, role, victim.peer))
        return victim

    def told(self) -> Iterator[tuple[Kill, str]]:
        """What the chain tells of each kill."""
        certificates = {c.outcome.round: c for c in self.chain}
        for kill in self.kills:
            roster = certificates[kill.round - 1].outcome.next_roster
            certificate = certificates[kill.round]
            outcome, here = certificate.outcome, []
            if leader_order(certificate.run, 0, kill.round, roster)[0] == kill.victim:
                here.append("first to lead")
            if kill.victim in {c.peer for c in outcome.contributors}:
                here.append("in the plan")
            counted = {i.contributor for part in outcome.parts for i in part.included}
            if kill.victim in {outcome.contributors[i].peer for i in counted}:
                here.append("its work counted")
            if kill.victim in {part.owner for part in outcome.parts}:
                here.append("a part of its merging is in the outcome")
            here.append(f"epoch {certificate.epoch}, ballot {certificate.ballot}")
            yield kill, ", ".join(here)


def survivors_gaps(swarm: list[Island], stopped: tuple[float, float, Island]) -> list[Gap]:
    """All that no inner step took, in all lives, except of the island that was itself stopped."""
    begin, end, who = stopped
    return [
        gap
        for island in swarm
        for gap in gaps(island)
        if island is not who or gap.end < begin or gap.begin > end
    ]


def check_chain(chain: list[Certificate], run: bytes) -> None:
    """Every certificate must follow from the one before and carry its majority."""
    previous, roster = genesis(run), None
    for certificate in chain:
        check_certificate(certificate, run=run, previous=previous, roster=roster)
        previous, roster = outcome_hash(certificate.outcome), certificate.outcome.next_roster


def pause(island: Island, seconds: float) -> float:
    """SIGSTOP the daemon and all its ranks, SIGCONT ``seconds`` later; when it went on."""
    pids = island.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + seconds
    until(lambda: time.monotonic() > end, seconds + 1, "the pause is over")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    return time.time()


def test_nobody_differs_and_nobody_waits(tmp_path: Path, record_property: Record):
    with islands(tmp_path) as made:
        swarm = made.swarm(4, **RUN)
        stranger = Stranger()
        try:
            killer = Killer(made, stranger, seed=1)
            for number in range(KILLS):
                victim = killer.kill(("member", "owner", "leader")[number % 3])
                until(lambda victim=victim: not victim.processes(), 5, "its ranks end with it")
                made.come_back(victim)
            for island in swarm:
                island.await_up()
                made.await_office(island, 4)
            sleeper = swarm[-1]
            asleep = time.time()
            awake = pause(sleeper, STOPPED_S)
            for island in swarm:
                island.await_round(max(map(Island.last_round, swarm)) + 1, 60)
                made.await_office(island, 4)
            last = max(map(Island.last_round, swarm))
            for island in swarm:
                island.await_round(last, 60)
            killer.collect()
            check_chain(killer.chain, swarm[0].run_id)
        finally:
            stranger.close()
    rounds = digests(swarm)
    assert len(rounds) >= MIN_ROUNDS
    assert {r: states for r, states in rounds.items() if len(states) > 1} == {}
    assert {island.rounds()[last]["state"] for island in swarm} == rounds[last]

    idle = sorted(g.idle for g in survivors_gaps(swarm, (asleep - 1, awake + 1, sleeper)))
    assert idle[-1] < GRACE_S + SLACK_S

    told = list(killer.told())
    assert any("first to lead" in what for _, what in told)
    assert any(c.ballot > 0 for c in killer.chain)  # somebody else had to lead
    for kill, what in told:
        ended = [e["time"] for island in swarm for e in island.events("round")]
        into = kill.time - max(at for at in ended if at < kill.time)
        record_property(
            f"killed in round {kill.round} as {kill.role}", f"after {into:.2f} s: {what}"
        )
    record_property("rounds", len(rounds))
    record_property(
        "rounds that needed more than one plan", sum(c.ballot > 0 for c in killer.chain)
    )
    record_property("rounds without the old majority", sum(c.epoch > 0 for c in killer.chain))
    record_property("downloads", sum(len(i.events("behind")) for i in swarm))
    record_property("attempts given up", sum(len(i.events("round_failed")) for i in swarm))
    quantiles = {q: round(idle[int(q * (len(idle) - 1))], 3) for q in (0.5, 0.9, 0.99, 0.999, 1.0)}
    record_property("idle s by quantile", quantiles)
