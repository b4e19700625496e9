"""What the tests with real processes share: islands that are started, killed and read.

An island is a ``node start`` process of its own with its own directory, port, key and trainer.
Everything is judged by what it wrote down itself (``events.jsonl``), by its exit status and by the
certificates it hands out to anybody. Figures go into the report as properties of the test
(:data:`Record`): ``pytest -m swarm --junitxml FILE`` shows them.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.demo.run import IslandProcess
from node.interrupts import EXIT_INTERRUPTED
from node.status import fetch
from protocols.asking import ask
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.messages import Certificate, CertificateRequest, Certificates

START_S = 90.0  # four islands that start at once on two busy cores
POLL_S = 0.03
Record = Callable[[str, object], None]  # pytest's ``record_property``
TOP = ("seed", "mode")  # settings of a run that stand in no table
AT_ONCE = 32  # certificates in one answer


def until(
    condition: Callable[[], Any], timeout: float, what: str, tail: Callable[[], str] = str
) -> Any:
    """Wait until ``condition()`` is true and return it; AssertionError after ``timeout`` s."""
    end = time.monotonic() + timeout
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {timeout:.0f} s: {what}\n{tail()}"
        time.sleep(POLL_S)
    return found


class Island(IslandProcess):
    """One island under test; its log is read on from where it was read to before."""

    def __init__(self, name: str, root: Path, threads: int = 1) -> None:
        super().__init__(name, root, threads)
        self._read = 0
        self._seen: list[dict[str, Any]] = []
        self._born = 0  # events before the present start

    def start(self, *arguments: str) -> None:
        self._born = len(self.events())
        super().start(*arguments)

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        path = self.dir / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read += len(whole) + len(newline)
            for line in whole.splitlines():
                try:
                    self._seen.append(json.loads(line))
                except ValueError:  # cut short by a kill
                    continue
        return [event for event in self._seen if not kind or event["kind"] == kind]

    def since_start(self, kind: str) -> list[dict[str, Any]]:
        """Events of the present life."""
        self.events()
        return [event for event in self._seen[self._born :] if event["kind"] == kind]

    @property
    def failed(self) -> bool:
        """Whether it ended with an error, which is neither a kill nor a second Ctrl-C."""
        status = 0 if self.process is None else self.process.returncode
        return status is not None and status > 0 and status != EXIT_INTERRUPTED

    @property
    def peer(self) -> PeerId:
        return PeerId(self.events("started")[-1]["peer"])

    @property
    def label(self) -> str:
        """The run's name."""
        return str(self.events("started")[-1]["run"])

    @property
    def run_id(self) -> bytes:
        return bytes.fromhex(fetch(self.dir)["run"]["id"])

    def rounds(self) -> dict[int, dict[str, Any]]:
        """The rounds it has applied, by number; a repeated one counts in its last version."""
        return {event["round"]: event for event in self.events("round")}

    def losses(self) -> dict[int, list[float]]:
        """Every loss it ever noted, by the number of the inner step."""
        found: dict[int, list[float]] = {}
        for event in self.events("step"):
            found.setdefault(event["step"], []).append(event["loss"])
        return found

    def awaits(self, round_: int) -> bool:
        """Whether its trainer has done its inner steps of a round and takes no more for now."""
        steps = self.events("step")
        if not steps or steps[-1]["round"] != round_:
            return False
        return bool(time.time() - steps[-1]["time"] > 2 * steps[-1]["seconds"] + POLL_S)

    def await_up(self, timeout: float = START_S) -> str:
        """Wait until it is up; the address under which others join."""
        until(
            lambda: self.since_start("started") or not self.running, timeout, f"{self.name} is up"
        )
        assert self.running, f"{self.name} ended:\n{self.tail()}"
        return str(self.since_start("started")[-1]["join_address"])

    def await_round(self, round_: int, timeout: float) -> None:
        """Wait until it has applied ``round_`` in its present life."""

        def there() -> bool:
            done = self.since_start("round")
            return bool(done and done[-1]["round"] >= round_) or not self.running

        until(there, timeout, f"{self.name} at round {round_}", self.tail)
        done = self.since_start("round")
        assert done, f"{self.name} ended:\n{self.tail()}"
        assert done[-1]["round"] >= round_, f"{self.name} ended:\n{self.tail()}"

    def await_end(self, timeout: float) -> int:
        """Wait until it has ended; its exit status."""
        assert self.wait(timeout), f"{self.name} does not end:\n{self.tail()}"
        assert self.process is not None
        return int(self.process.returncode)

    def kill(self) -> None:
        """SIGKILL to the daemon alone: its ranks must notice."""
        self.signal(signal.SIGKILL)
        self.wait(10.0)

    def processes(self) -> list[int]:
        """Process ids of its daemon and ranks that still run."""
        listing = subprocess.run(
            ["ps", "-A", "-ww", "-o", "pid=,stat=,args="],
            capture_output=True,
            text=True,
            check=True,
        )
        found = []
        for line in listing.stdout.splitlines():
            pid, state, args = line.split(maxsplit=2)
            if re.search(rf"{re.escape(str(self.dir))}[/ ]", args) and not state.startswith("Z"):
                found.append(int(pid))
        return found

    def api(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a ``node`` command about this island's directory."""
        return node(*words, "--dir", str(self.dir))


def node(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a ``node`` command to its end."""
    command = [sys.executable, "-m", "node", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


class Islands:
    """The islands of one test."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.all: list[Island] = []

    def new(self, *arguments: str, threads: int = 1) -> Island:
        """Start a further island."""
        island = Island(f"island-{len(self.all) + 1}", self.root, threads)
        self.all.append(island)
        island.start(*arguments)
        return island

    def swarm(self, count: int, **changes: Any) -> list[Island]:
        """``count`` islands in a new run, all of them in office."""
        first = self.new(*settings(**changes))
        address = first.await_up()
        others = [self.new("--peers", address) for _ in range(count - 1)]
        self.await_office(first, count)
        return [first, *others]

    def await_office(self, seen_by: Island, count: int, timeout: float = START_S) -> None:
        """Wait for a round in which ``count`` islands took part."""

        def complete() -> bool:
            for island in self.all:
                assert island.running or not island.failed, f"{island.name}:\n{island.tail()}"
            done = seen_by.since_start("round")
            return bool(done and done[-1]["members"] == count)

        until(complete, timeout, f"{count} in one round", seen_by.tail)

    def up(self) -> list[Island]:
        """Those that run and can be joined."""
        return [i for i in self.all if i.running and i.since_start("started")]

    def addresses(self, without: Island | None = None) -> str:
        """Where all that run can be joined."""
        up = [i for i in self.up() if i is not without]
        return ",".join(i.since_start("started")[-1]["join_address"] for i in up)

    def come_back(self, island: Island) -> None:
        """Start a dead island again, from its checkpoint, with all living ones as its peers."""
        peers = self.addresses(without=island)
        island.start("--resume", *(("--peers", peers) if peers else ()))

    def end(self) -> None:
        """Kill what is left, ranks included."""
        for island in self.all:
            island.kill()
        for island in self.all:
            for pid in island.processes():
                os.kill(pid, signal.SIGKILL)


@contextmanager
def islands(root: Path) -> Iterator[Islands]:
    """Islands that are gone when the test is over."""
    made = Islands(root)
    try:
        yield made
    finally:
        made.end()


def settings(**changes: Any) -> tuple[str, ...]:
    """``--set`` for each change: ``inner_steps=50`` is of the rounds, ``data__seed=1`` of data."""
    words: list[str] = []
    for key, value in changes.items():
        table = key.replace("__", ".")
        if table == key and key not in TOP:
            table = f"rounds.{key}"
        words += ["--set", f"{table}={value}"]
    return tuple(words)


def digests(swarm: Sequence[Island]) -> dict[int, set[str]]:
    """The states that were reported after each round, by all islands in all their lives."""
    found: dict[int, set[str]] = {}
    for island in swarm:
        for event in island.events("round"):
            found.setdefault(event["round"], set()).add(event["state"])
    return found


@dataclass(frozen=True)
class Gap:
    """Time between two inner steps of one life in which the trainer took none."""

    begin: float  # Unix seconds
    end: float
    idle: float  # what of it no inner step took, seconds


def gaps(island: Island, begin: float = 0.0, end: float = float("inf")) -> list[Gap]:
    """From the time of each inner step's event to the next one's, within a time span."""
    found: list[Gap] = []
    before: dict[str, Any] | None = None
    for event in island.events():
        if event["kind"] == "started":
            before = None
        elif event["kind"] == "step":
            if before is not None and begin <= before["time"] and event["time"] <= end:
                idle = event["time"] - before["time"] - event["seconds"]
                found.append(Gap(before["time"], event["time"], max(0.0, idle)))
            before = event
    return found


class Stranger:
    """Somebody outside of the swarm who asks islands for certificates, as anybody may."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._transport = HttpTransport(Identity.generate())
        self._runner.run(self._transport.start())

    def close(self) -> None:
        self._runner.run(self._transport.aclose())
        self._runner.close()

    def certificates(
        self, island: Island, first: int = 0, run_id: bytes = b""
    ) -> list[Certificate]:
        """All that an island keeps, from round ``first`` on; of ``run_id``, where it is known."""
        return self._runner.run(self._certificates(island, first, run_id or island.run_id))

    async def _certificates(self, island: Island, first: int, run_id: bytes) -> list[Certificate]:
        address, _, peer = island.await_up().rpartition("/")
        self._transport.book.add(PeerId(peer), address)
        found: list[Certificate] = []
        while True:
            request = CertificateRequest(run_id, 0, first + len(found), AT_ONCE)
            part = await ask(
                self._transport, PeerId(peer), "certificates", request, Certificates, timeout=10.0
            )
            found += part.certificates
            if len(part.certificates) < AT_ONCE:
                return found
