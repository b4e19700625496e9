"""``codec = "auto"`` with real nodes: links that get narrow and wide again under a run.

Three machines are network namespaces with shaped links. What the run chose is read off as its
operator would, from ``node status`` and the event log, which has it from the certificates. How
narrow the links get follows from how long rounds have taken before: those of a slow machine take
longer, and so may their bytes.
"""

from __future__ import annotations

import itertools
import signal
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node_process import NodeProcess, wait_until

from benchmarks.netns import Network, available
from node.checkpoints.checkpoint import CheckpointStore
from node.checkpoints.outer_files import read_outer

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

WIDE = 200.0  # Mbit/s
EXPOSED = 0.1
TOO_LONG = 2.5  # times what the run is willing to spend on its bytes: so long is int4 to take then
INT4 = 55 / 200  # of the bytes of bf16
ON_THE_WIRE = 1.045  # bytes of a link for each one of these
PATIENCE_S = 300.0  # for anything: links carry a thousandth, and the machine may be busy
RUN = f"""
[rounds]
codec = "auto"
codecs = ["bf16", "int4", "int2"]
exposed = {EXPOSED}
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

    def awaits(self, condition: Callable[[], Any], what: str) -> Any:
        """Wait for something while it runs, for longer than usual."""

        def there() -> Any:
            assert self.running, f"it ended before {what}:\n{self.text()}"
            return condition()

        return wait_until(there, f"{what} of {self.dir.name}", PATIENCE_S)

    def too_narrow(self) -> float:
        """Mbit/s at which int4 takes too long, by the rounds of all three so far."""
        whole = [event for event in self.events("round") if event["members"] == 3]
        ends = [event["time"] for event in whole]
        round_s = statistics.median(b - a for a, b in itertools.pairwise(ends))
        moved = INT4 * statistics.median(event["sent_bytes"] for event in whole)
        return float(ON_THE_WIRE * 8e-6 * moved / (TOO_LONG * EXPOSED * round_s))

    def awaits_codec(self, name: str, rounds: int = 3) -> int:
        """Wait until the newest rounds had this codec; the number of the last."""

        def there() -> Any:
            last = [event["codec"] for event in self.events("round")][-rounds:]
            return last == [name] * rounds

        self.awaits(there, f"{rounds} rounds in {name}")
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
        first.awaits(
            lambda: sum(e["members"] == 3 for e in first.events("round")) > 4, "rounds of all three"
        )
        first.awaits_codec("bf16")
        assert "codec bf16" in first.status()

        narrow = first.too_narrow()
        for name in NAMES:
            network.rate(name, narrow)
        number = first.awaits_codec("int2")
        assert "codec int2" in first.status()
        assert "knob      codec int2: " in first.status()
        told = [event for event in first.events("knob") if event["name"] == "codec"]
        # it may have tried int4 since, and given that up
        why = [event["why"] for event in told if event["value"] == "int2"]
        assert why[0] == "the one before takes longer than may be waited"
        assert told[-1]["before"] is not None
        assert told[-1]["inputs"]["budget_s"] > 0
        assert told[-1]["inputs"]["expected_s"] > 0
        third.send(signal.SIGTERM)  # and comes back with what it has yet to send
        assert third.wait() == 0
        lost = third.lost()
        assert lost > 0
        third.run("--resume", "--peers", first.where)
        third.awaits(lambda: max(third.rounds()) > number + 4, "rounds after its return")

        for name in NAMES:
            network.rate(name, WIDE)
        last = first.awaits_codec("bf16")
        third.awaits(lambda: max(third.rounds(), default=0) >= last, "the newest rounds")
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
