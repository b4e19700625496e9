"""``codec = "auto"`` with real nodes: links that get narrow and wide again under a run.

Three machines are network namespaces with shaped links. What the run chose is read off as its
operator would, from ``node status`` and the event log, which has it from the certificates.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess

from benchmarks.netns import Network, available
from node.checkpoint import CheckpointStore
from node.outer_files import read_outer

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

LADDER = ("bf16", "int4", "int2")  # 200, 55 and 30 KB of the smallest model
WIDE, NARROW = 200.0, 0.8  # Mbit/s
RUN = """
[rounds]
codec = "auto"
codecs = ["bf16", "int4", "int2"]
exposed = 0.15
inner_steps = 40
total_rounds = 5000
min_grace_s = 20.0
"""
NAMES = ("first", "second", "third")


class Machine(NodeProcess):
    """A node in a namespace of its own, on the usual ports."""

    def __init__(self, network: Network, name: str, root: Path) -> None:
        super().__init__(root / name, prefix=tuple(network.command(name, [])))
        self.where = f"{network.address(name)}:4390"

    def run(self, *words: str) -> None:
        self.start("start", "--checkpoint-every", "2", *words, ports=False)

    def status(self) -> str:
        """What ``node status`` prints on this machine."""
        words = [*self.prefix, sys.executable, "-m", "node", "status", "--dir", str(self.dir)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
        return done.stdout

    def codecs(self) -> dict[int, str]:
        """The codec of each round, as its certificate has it."""
        return {event["round"]: event["codec"] for event in self.events("round")}

    def awaits_codec(self, name: str, rounds: int = 3) -> int:
        """Wait until the newest rounds had this codec; the number of the last."""

        def there() -> Any:
            last = [event["codec"] for event in self.events("round")][-rounds:]
            return last == [name] * rounds

        self.wait_for(there, f"{rounds} rounds in {name}, not {[*self.codecs().items()][-5:]}")
        return max(self.codecs())

    def lost(self) -> float:
        """The norm of what coarse codecs have lost and is not sent yet, by its checkpoint."""
        newest = CheckpointStore(self.dir / "checkpoints").latest().checkpoint
        assert newest is not None
        residual = read_outer(newest.path).residual
        assert residual is not None
        return float(residual.norm())


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(NAMES, mbit=WIDE) as made:
        yield made


def test_links_that_get_narrow_and_wide_again(network: Network, tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    machines = [Machine(network, name, tmp_path) for name in NAMES]
    first, second, third = machines
    try:
        first.run("--run", str(run))
        first.wait_for(lambda: first.events("started"), "it is up")
        for other in (second, third):
            other.run("--peers", first.where)
        first.wait_for(lambda: any(e["members"] == 3 for e in first.events("round")), "all three")
        first.awaits_codec("bf16")
        assert "codec bf16" in first.status()

        for name in NAMES:
            network.rate(name, NARROW)
        number = first.awaits_codec("int2")
        assert "codec int2" in first.status()
        third.send(signal.SIGTERM)  # and comes back with what it has yet to send
        assert third.wait() == 0
        lost = third.lost()
        assert lost > 0
        third.run("--resume", "--peers", first.where)
        third.wait_for(lambda: max(third.rounds()) > number + 4, "rounds after its return")

        for name in NAMES:
            network.rate(name, WIDE)
        last = first.awaits_codec("bf16")
        first.wait_for(lambda: max(third.rounds(), default=0) >= last, "the third has it too")
        third.send(signal.SIGTERM)
        assert third.wait() == 0
        assert third.lost() < 0.05 * lost  # it was sent as soon as there was room
        seen = [machine.codecs() for machine in machines]
        for number in set(seen[0]) & set(seen[1]) & set(seen[2]):
            assert len({codecs[number] for codecs in seen}) == 1
        states: dict[int, set[str]] = {}
        for machine in machines:
            for number, state in machine.rounds().items():
                states.setdefault(number, set()).add(state)
        assert all(len(each) == 1 for each in states.values())
        assert len(states) > 15
    finally:
        for machine in machines:
            if machine.running:
                machine.kill()
