"""Members as processes of their own, forked from one that has imported everything.

Importing takes longer than a round. What each is and tells is :mod:`fault_member`.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from socket import create_server
from typing import Any

import pytest
from toy_replica import RUN

from gossip.plans.certificate import check_certificate, genesis, outcome_hash
from protocols.identity import PeerId
from protocols.messages import Certificate

UNTOLD = {"time", "certificate", "state", "event", "parts", "sent", "said", "moves", "came"}
START_S = 40.0  # to the first rounds, on a busy machine

context = multiprocessing.get_context("forkserver")


@contextmanager
def forked() -> Iterator[Callable[..., tuple[Connection, int]]]:
    """``start(main, *arguments)`` runs ``main(pipe, *arguments)`` in a process of its own.

    It returns the other end of the pipe and the process id. All are killed in the end.
    """
    context.set_forkserver_preload(["fault_member", "fault_relay"])
    with pytest.MonkeyPatch.context() as patch:  # it does not look where we look for modules
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    processes: list[Any] = []

    def start(main: Callable[..., None], *arguments: Any) -> tuple[Connection, int]:
        pipe, end = context.Pipe()
        process = context.Process(target=main, args=(end, *arguments), daemon=True)
        process.start()
        end.close()
        processes.append(process)
        return pipe, process.pid

    try:
        yield start
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


@dataclass
class Process:
    """One member as the tests see it."""

    peer: PeerId
    name: str
    pipe: Connection
    pid: int
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
class Crew:
    """Members that take rounds together; ``doomed`` may end before the test does."""

    members: list[Process]
    doomed: Process | None = None

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Listen to the members until ``condition()`` is true."""
        end = time.monotonic() + timeout
        while not condition():
            left = end - time.monotonic()
            assert left > 0, f"not within {timeout:.0f} s: {what}\n{self.story()}"
            pipes = {one.pipe: one for one in self.members if not one.ended}
            for pipe in wait(list(pipes), timeout=left):
                one = pipes[pipe]
                try:
                    one.facts.append(pipe.recv())
                except (EOFError, OSError):
                    one.ended = True
                    assert one is self.doomed, f"{one.name} ended by itself\n{self.story()}"

    def go_on_to(self, round_: int, timeout: float, who: Sequence[Process] | None = None) -> None:
        """Listen until all, or ``who``, have applied a round."""
        members = self.members if who is None else who
        self.until(
            lambda: min(one.applied() for one in members) >= round_,
            timeout,
            f"all have applied round {round_}",
        )

    def rounds(self) -> set[int]:
        """All that anybody has applied."""
        return {int(f["round"]) for one in self.members for f in one.of("applied")}

    def facts_of(self, round_: int) -> set[tuple[bytes, bytes]]:
        """Outcomes and states of a round, by all who have applied it."""
        found = set()
        for one in self.members:
            for fact in one.of("applied", round_):
                certificate: Certificate = Certificate.decode(fact["certificate"])
                found.add((outcome_hash(certificate.outcome), fact["state"]))
        return found

    def chain(self) -> list[Certificate]:
        """All certificates, checked: each follows from the one before, by its majority."""
        by_round = {f["round"]: f["certificate"] for o in self.members for f in o.of("applied")}
        previous, roster = genesis(RUN), None
        found: list[Certificate] = []
        for round_ in range(len(by_round)):
            certificate: Certificate = Certificate.decode(by_round[round_])
            check_certificate(certificate, run=RUN, previous=previous, roster=roster)
            previous, roster = outcome_hash(certificate.outcome), certificate.outcome.next_roster
            found.append(certificate)
        return found

    def story(self) -> str:
        """What everybody told, for whoever reads a failure."""
        began = min((f["time"] for one in self.members for f in one.facts), default=0.0)
        names = {one.peer: one.name for one in self.members}
        lines = []
        for one in self.members:
            for f in one.facts:
                shown = {
                    key: names.get(value, value) for key, value in f.items() if key not in UNTOLD
                }
                if "parts" in f:
                    shown["parts"] = [(names[o], e - s) for s, e, o in f["parts"]]
                doomed = "*" if one is self.doomed else ""
                lines.append((f["time"], f"{one.name}{doomed} {f['event']} {shown}"))
        return "\n".join(f"{at - began:8.3f} {text}" for at, text in sorted(lines))


def free_ports(count: int) -> list[int]:
    """Ports of this machine on which nobody listens now."""
    with ExitStack() as stack:
        servers = [stack.enter_context(create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]
