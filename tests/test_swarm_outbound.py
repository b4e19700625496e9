"""Islands that nobody can dial, as behind a home router: real nodes in network namespaces.

What the network does to them: whoever tries to open a connection to a hidden machine hears
nothing, and what such a machine opens itself works.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from node_process import wait_until

from benchmarks.netns import Network, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(500),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

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
    """All have had the same state in every round that they share."""
    seen: dict[int, set[str]] = {}
    for machine in machines:
        for done in machine.rounds():
            seen.setdefault(done["round"], set()).add(done["state"])
    assert len(seen) > 5
    assert {number for number, states in seen.items() if len(states) > 1} == set()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["seed", "open", "home", "flat"]) as made:
        for hidden in ("home", "flat"):
            made.shut(hidden)
        yield made


@pytest.fixture
def machines(network: Network, tmp_path: Path) -> dict[str, Machine]:
    """Four machines, of which ``home`` and ``flat`` cannot be dialled."""
    return {name: Machine(network, name, tmp_path) for name in network.names}


def await_up(machine: Machine) -> None:
    machine.awaits(lambda: "identity" in machine.text, "it is up")


def carried(machine: Machine) -> float:
    """Bytes that a machine has carried for others."""
    found = re.search(r'sent[^\n]*kind="relay"[^\n]*\} ([0-9.e+]+)', machine.api("/metrics"))
    return float(found[1]) if found else 0.0


def await_relay(hidden: Machine, relay: Machine) -> None:
    """Wait until a hidden node says that its relay is gone, and that it has this one now."""
    now = f"peers call this node through {relay.where}"
    hidden.awaits(lambda: now in hidden.text, "another relay")
    assert re.search(r"E302: the relay \S+ is gone", hidden.text)


def test_a_hidden_island_takes_part_and_comes_back_when_killed(
    machines: dict[str, Machine], record_property: Any
) -> None:
    """Its work is merged, and nothing has to be carried: it dials the open island itself."""
    open_, home = machines["open"], machines["home"]
    open_.start("start", *SETTINGS)
    await_up(open_)
    home.start("start", "--peers", open_.where)
    await_merged(open_, home)
    relay = f"{open_.where}/{open_.peer}"
    assert f"outbound only -> relay {relay}, dial-back ok" in home.text
    assert f"node start --peers {relay}" in home.text  # what others can join by
    state = json.loads(home.api("/api/v1/state"))
    assert state["node"]["reachability"] == f"outbound only, relay {relay}"
    home.stop()
    home.start("start", "--resume", "--peers", open_.where)
    await_merged(open_, home)
    assert carried(open_) == 0
    assert_same_bits(open_, home)
    for machine in (home, open_):
        machine.stop(signal.SIGTERM)


def test_two_hidden_islands_and_a_relay_that_dies(
    machines: dict[str, Machine], record_property: Any
) -> None:
    """Between them the relay carries; when it is gone, they go on through the open island."""
    seed, open_, home, flat = (machines[name] for name in ("seed", "open", "home", "flat"))
    seed.start("bootstrap")
    await_up(seed)
    open_.start("start", "--peers", seed.where, *SETTINGS)
    await_up(open_)
    for hidden in (home, flat):
        hidden.start("start", "--peers", seed.where)
    await_merged(home, flat)
    await_merged(flat, home)
    record_property("carried_bytes", carried(seed))
    assert carried(seed) > 0
    seed.stop()
    for hidden in (home, flat):
        await_relay(hidden, open_)
    for hidden in (home, flat):
        await_merged(open_, hidden)
    await_merged(home, flat)
    assert carried(open_) > 0
    assert_same_bits(open_, home, flat)
    for machine in (home, flat, open_):
        machine.stop(signal.SIGTERM)


def test_one_that_must_be_reachable_is_refused(machines: dict[str, Machine]) -> None:
    seed, home = machines["seed"], machines["home"]
    seed.start("bootstrap")
    await_up(seed)
    home.start("start", "--peers", seed.where, "--require-reachable")
    assert home.process is not None
    assert home.process.wait(100) == 1
    assert "error E302: peers cannot dial this node" in home.text
    assert "--require-reachable" in home.text
    assert "Traceback" not in home.text
