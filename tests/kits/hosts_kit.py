"""Hosts of one island as real processes: on loopback, or each in a network namespace."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from swarm_kit import until

from benchmarks.netns import Network

PORT = 29_777
START_S = 150.0  # several starts of torch on a busy machine


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class HostProcess:
    """``node start`` on one host of an island, or an island of its own (``number`` None)."""

    def __init__(self, hosts: Hosts, name: str, number: int | None, where: str) -> None:
        self.hosts, self.number, self.where = hosts, number, where
        self.dir = hosts.root / name
        self.process: subprocess.Popen[Any] | None = None

    @property
    def home(self) -> Path:
        return self.dir / f"host-{self.number}" if self.number else self.dir

    def start(self, *arguments: str) -> HostProcess:
        words = ["-m", "node", "start", "--dir", str(self.dir), "--threads", "1", "--device", "cpu"]
        if not self.number:
            words += ["--listen", f"{self.hosts.address(self.where)}:0", "--api", "127.0.0.1:0"]
        if self.number is not None:
            words += ["--node-rank", str(self.number), "--rdzv-id", "tests"]
            words += ["--rdzv-endpoint", self.hosts.endpoint]
        return self._run([*words, *arguments])

    def typed(self, *arguments: str) -> HostProcess:
        """``node start`` with these settings and, beside them, only what a test machine needs."""
        words = ["-m", "node", "start", "--dir", str(self.dir), "--threads", "1", "--device", "cpu"]
        return self._run([*words, *arguments])

    def _run(self, words: list[str]) -> HostProcess:
        self.dir.mkdir(parents=True, exist_ok=True)
        with (self.dir / "console.log").open("ab") as log:
            options: dict[str, Any] = {
                "stdin": subprocess.DEVNULL,
                "stdout": log,
                "stderr": log,
                "start_new_session": True,
                "env": {**os.environ, "OMP_NUM_THREADS": "1"},
            }
            if self.hosts.net is not None:
                self.process = self.hosts.net.python(self.where, *words, **options)
            else:
                self.process = subprocess.Popen([sys.executable, *words], **options)
        return self

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def text(self) -> str:
        log = self.dir / "console.log"
        return log.read_text(errors="replace") if log.exists() else ""

    def events(self, kind: str) -> list[dict[str, Any]]:
        log = self.home / "events.jsonl"
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        found = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in found if event["kind"] == kind]

    def rounds(self) -> dict[int, dict[str, Any]]:
        return {event["round"]: event for event in self.events("round")}

    def losses(self) -> dict[int, float]:
        """Of inner steps, by their number; a repeated one counts in its last version."""
        return {event["step"]: event["loss"] for event in self.events("step")}

    def notices(self) -> list[str]:
        return [event["text"] for event in self.events("notice")]

    def ranks(self) -> list[int]:
        """Process ids of its ranks that run."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            ours = any(word.startswith(str(self.dir).encode()) for word in words)
            if ours and b"node.trainer.rank" in words and state != "Z":
                found.append(int(entry.name))
        return sorted(found)

    def kill(self) -> None:
        """SIGKILL to all of its processes, as when the machine is switched off."""
        pids = self.ranks()
        if self.process is not None and self.running:
            pids.append(self.process.pid)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if self.process is not None:
            self.process.wait(20)

    def end(self, timeout: float = START_S) -> int:
        """The exit status, once it has ended by itself."""
        assert self.process is not None
        until(lambda: not self.running, timeout, f"the end of {self.dir.name}", self.text)
        return int(self.process.returncode)

    def wait_round(self, number: int, timeout: float = START_S) -> None:
        def there() -> bool:
            assert self.running or max(self.rounds(), default=-1) >= number, self.text()
            return max(self.rounds(), default=-1) >= number

        until(there, timeout, f"round {number} of {self.dir.name}", self.text)


class Hosts:
    """The hosts of one test."""

    def __init__(self, root: Path, net: Network | None) -> None:
        self.root, self.net = root, net
        self.made: list[HostProcess] = []
        self.port = PORT if net is not None else free_port()

    @property
    def endpoint(self) -> str:
        return f"{self.address(self.net.names[0] if self.net else '')}:{self.port}"

    def address(self, where: str) -> str:
        return self.net.address(where) if self.net is not None else "127.0.0.1"

    def host(self, number: int) -> HostProcess:
        """One of the hosts of the island."""
        where = self.net.names[number] if self.net is not None else ""
        made = HostProcess(self, f"host{number}", number, where)
        self.made.append(made)
        return made

    def island(self, name: str, where: str = "") -> HostProcess:
        """An island of one host."""
        made = HostProcess(self, name, None, where)
        self.made.append(made)
        return made


@contextmanager
def hosts(root: Path, names: Sequence[str] = (), mbit: float | None = None) -> Iterator[Hosts]:
    """Hosts that are gone when the test is over; with ``names`` each in a namespace."""
    if not names:
        made = Hosts(root, None)
        try:
            yield made
        finally:
            for host in made.made:
                host.kill()
        return
    with Network(names, mbit=mbit) as net:
        made = Hosts(root, net)
        try:
            yield made
        finally:
            for host in made.made:
                host.kill()
