"""Nodes on machines of their own, in network namespaces."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

from node_process import wait_until

from benchmarks.netns import Network

SETTINGS = ("--set", "rounds.total_rounds=5000", "--set", "rounds.inner_steps=5")


class Machine:
    """A node in a namespace of its own."""

    def __init__(self, network: Network, name: str, root: Path) -> None:
        self.network, self.name = network, name
        self.dir, self.out = root / name, root / f"{name}.out"
        self.process: subprocess.Popen[Any] | None = None

    @property
    def _training(self) -> tuple[str, ...]:
        """What keeps it small: the test is about the network."""
        text = self.dir.parent / "text.txt"
        if not text.exists():
            text.write_text("\n\n".join(topics.values()))
        return ("--threads", "1", "--device", "cpu", "--data", str(text))

    @property
    def where(self) -> str:
        return f"{self.network.address(self.name)}:4390"

    def start(self, command: str, *words: str) -> Machine:
        with self.out.open("ab") as out:
            self.process = self.network.python(
                self.name, "-m", "node", command, "--dir", str(self.dir), *words,
                *(self._training if command == "start" else ()),
                stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip
        return self

    def awaits(self, condition: Callable[[], Any], what: str, timeout: float = 100) -> Any:
        """The first true value; fails at once if the node has ended."""

        def alive() -> Any:
            assert self.process is not None
            assert self.process.poll() is None, self.text[-3000:]
            return condition()

        return wait_until(alive, f"{self.name}: {what}", timeout)

    @property
    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def peer(self) -> str:
        found = re.search(r"identity (12D3\w+)", self.text)
        return found[1] if found else ""

    def rounds(self) -> list[dict[str, Any]]:
        log = self.dir / "events.jsonl"
        lines = log.read_text().splitlines() if log.exists() else []
        return [json.loads(x) for x in lines if '"kind": "round"' in x and x.endswith("}")]

    def head(self) -> int:
        return max((r["round"] for r in self.rounds()), default=-1)

    def api(self, path: str) -> str:
        """What the node's own API says, asked from its own machine."""
        program = (
            "import urllib.request as u, sys; "
            f"print(u.urlopen('http://127.0.0.1:4391{path}').read().decode())"
        )
        command = self.network.command(self.name, [sys.executable, "-c", program])
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        assert self.process is not None
        self.process.send_signal(number)
        self.process.wait(60)


def await_merged(seen_by: Machine, machine: Machine, count: int = 3) -> int:
    """Wait until work of ``machine`` was merged in some more rounds, as ``seen_by`` has it."""
    after = seen_by.head()

    def merged() -> Any:
        assert machine.process is not None
        assert machine.process.poll() is None, machine.text[-3000:]
        rounds = [
            r["round"]
            for r in seen_by.rounds()
            if r["round"] > after and r["islands"].get(machine.peer, {}).get("tokens")
        ]
        return rounds if machine.peer and len(rounds) >= count else None

    return int(seen_by.awaits(merged, f"{count} rounds with work of {machine.name}")[-1])


def assert_same_bits(*machines: Machine) -> None:
    """All have had the same state in every round that they share, of six at least."""
    machines[0].awaits(lambda: len(machines[0].rounds()) > 5, "six rounds")
    seen: dict[int, set[str]] = {}
    for machine in machines:
        for done in machine.rounds():
            seen.setdefault(done["round"], set()).add(done["state"])
    assert len(seen) > 5
    assert {number for number, states in seen.items() if len(states) > 1} == set()


def await_up(machine: Machine) -> None:
    machine.awaits(lambda: "identity" in machine.text, "it is up")
