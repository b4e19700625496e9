"""Several processes of one system that average with each other, turn by turn.

>>> with Fleet("atoll", 4, {"codec": "fp32"}) as fleet:
...     fleet.meet()
...     seconds = fleet.turn().seconds
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from benchmarks.netns import Network

ROOT = Path(__file__).resolve().parent.parent
START_S = 120.0  # for importing, opening ports, meeting
TURN_S = 120.0

Fact = dict[str, Any]


class WorkerFailed(Exception):
    """A worker ended or fell silent; with the end of what it wrote to its standard error."""


@dataclass(frozen=True)
class Turn:
    """One averaging. Times are ``time.monotonic``, equal for all processes of a machine."""

    facts: list[Fact]  # "took" of each worker

    @property
    def seconds(self) -> float:
        """From the first worker that knew its group until the last has the mean in its memory."""
        return float(max(f["end"] for f in self.facts) - min(f["start"] for f in self.facts))

    @property
    def matchmaking(self) -> float:
        """From when the last worker was ready until the first byte of any vector leaves."""
        first = min(f.get("first_byte") or f["start"] for f in self.facts)
        return float(first - max(f["asked"] for f in self.facts))


class Worker:
    """One process; what it says is kept in order."""

    def __init__(self, system: str, name: str, options: Fact, net: Network | None) -> None:
        self.name = name
        module = ["-m", f"benchmarks.systems.{system}", json.dumps(options)]
        command = [sys.executable, *module]
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed by close()
        self.process = subprocess.Popen(
            net.command(name, command) if net else command,
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,  # a group, as some start processes of their own
        )
        self._facts: queue.Queue[Fact | None] = queue.Queue()
        self._waiting = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def settle(self) -> None:
        """Wait until it has prepared its next turn."""
        if not self._waiting:
            self.hear("waiting", within=TURN_S)
            self._waiting = True

    def go(self) -> None:
        """It is this worker's turn."""
        self.settle()
        self._waiting = False
        assert self.process.stdin is not None
        try:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerFailed(f"{self.name} has ended\n{self._end()}") from None

    def hear(self, *events: str, within: float) -> Fact:
        """The next fact of one of these kinds; raises WorkerFailed if none comes."""
        deadline = time.monotonic() + within
        while True:
            try:
                fact = self._facts.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise WorkerFailed(
                    f"{self.name}: no {events} in {within} s\n{self._end()}"
                ) from None
            if fact is None:
                raise WorkerFailed(f"{self.name} has ended\n{self._end()}")
            if fact["event"] in events:
                return fact

    def close(self) -> None:
        """Kill it and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout, self._errors):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):  # of what it did not read any more
                    stream.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):  # libraries print too
                self._facts.put(json.loads(line))
        self._facts.put(None)

    def _end(self) -> str:
        self._errors.seek(0)
        return self._errors.read()[-3000:]


class Fleet:
    """All workers of one system; made on entry, killed on exit."""

    def __init__(
        self, system: str, count: int, options: Fact | None = None, net: Network | None = None
    ) -> None:
        self.system, self.count, self.net = system, count, net
        self.options = options or {}
        self.workers: list[Worker] = []

    def __enter__(self) -> Self:
        self._start(0, "")
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.workers:
            worker.close()

    def meet(self) -> None:
        """Start the others, and wait until all know each other."""
        rendezvous = self.workers[0].hear("opened", within=START_S)["rendezvous"]
        for rank in range(1, self.count):
            self._start(rank, rendezvous)
        for worker in self.workers:
            worker.hear("met", within=START_S)

    def turn(self, among: list[int] | None = None, within: float = TURN_S) -> Turn:
        """Let all, or those of these ranks, average once."""
        workers = [self.workers[i] for i in among] if among else self.workers
        for worker in workers:
            worker.settle()
        for worker in workers:
            worker.go()
        return Turn([worker.hear("took", within=within) for worker in workers])

    def settle(self) -> None:
        """Wait until all have prepared their next turn."""
        for worker in self.workers:
            worker.settle()

    def _start(self, rank: int, rendezvous: str) -> None:
        name = self.net.names[rank] if self.net else f"{self.system} {rank}"
        address = self.net.address(name) if self.net else "127.0.0.1"
        options = {"rank": rank, "count": self.count, "address": address} | self.options
        self.workers.append(
            Worker(self.system, name, options | {"rendezvous": rendezvous}, self.net)
        )
