"""Real islands in pairs whose links get narrow and wide again: inner steps and codecs follow.

Machines are network namespaces with shaped links. What an island chose is read off as its operator
would, from ``node status`` and the event log.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_kit import Machine
from swarm_kit import Record

from benchmarks.netns import Network, available

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

WIDE, TIMES_NARROWER = 200.0, 200  # Mbit/s; a letter of bf16 then takes about 4 s
LEAST, MOST = 20, 160  # a busy machine takes ten seconds for so many, and comes back within rounds
PATIENCE_S = 240.0  # for anything: the machine may be busy
NAMES = ("one", "two", "three")
RUN = f"""
name = "pairs-as-the-links-ask"
mode = "gossip"

[rounds]
codec = "auto"
inner_steps = {LEAST}
most_steps = {MOST}
total_rounds = 5000
eval_every = 0

[data]
batch_size = 4
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(NAMES, mbit=WIDE) as made:
        yield made


def events(machine: Machine, kind: str) -> list[dict[str, Any]]:
    log = machine.dir / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in lines if f'"kind": "{kind}"' in line and line[-1] == "}"]


def chosen(machine: Machine) -> int:
    """H of the newest choice; 0: none yet."""
    found = [event for event in events(machine, "knob") if event["name"] == "inner_steps"]
    return found[-1]["value"] if found else 0


def exposed(machine: Machine) -> float:
    """Seconds by which its last letters outlasted the steps beside them, in the mean."""
    state = json.loads(machine.api("/api/v1/state"))
    return float(state["knobs"]["inner_steps"]["inputs"]["beyond_overlap_s"])


def newest(machine: Machine, count: int) -> set[str]:
    """Codecs of its newest rounds."""
    return {event["codec"] for event in events(machine, "round")[-count:]}


def met(machine: Machine) -> int:
    """Exchanges in which it got a letter."""
    return sum(bool(e["others"]) or e["outcome"] == "mixed" for e in events(machine, "exchanged"))


def test_inner_steps_and_codecs_follow_from_the_links(
    network: Network, tmp_path: Path, record_property: Record
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN)
    machines = [Machine(network, name, tmp_path) for name in NAMES]
    one = machines[0]
    one.start("start", "--run", str(run))
    one.awaits(lambda: events(one, "round"), "its first round alone", PATIENCE_S)
    for other in machines[1:]:
        other.start("start", "--peers", one.where)
    for machine in machines:
        machine.awaits(lambda m=machine: met(m) >= 6, "exchanges", PATIENCE_S)
        machine.awaits(lambda m=machine: newest(m, 3) == {"bf16"}, "fine letters", PATIENCE_S)
    before = {machine.name: chosen(machine) for machine in machines}

    for name in NAMES:
        network.rate(name, WIDE / TIMES_NARROWER)
    for machine in machines:
        machine.awaits(lambda m=machine: newest(m, 2) == {"int8"}, "coarse letters", PATIENCE_S)
        more = 2 * max(before.values())
        machine.awaits(lambda m=machine, n=more: chosen(m) >= n, "more inner steps", PATIENCE_S)
    narrow = {machine.name: chosen(machine) for machine in machines}
    one.awaits(lambda: exposed(one) > 0.5, "letters that keep training up", PATIENCE_S)
    assert json.loads(one.api("/api/v1/state"))["network"]["rounds"]["codec"] == "int8"

    for name in NAMES:
        network.rate(name, WIDE)
    for machine in machines:
        machine.awaits(lambda m=machine: newest(m, 2) == {"bf16"}, "fine letters", PATIENCE_S)
        less = narrow[machine.name] / 2
        machine.awaits(lambda m=machine, n=less: chosen(m) <= n, "fewer inner steps", PATIENCE_S)
    places = [events(machine, "round")[-1]["round"] for machine in machines]
    assert max(places) - min(places) <= 5
    record_property("H before, narrow", json.dumps([before, narrow]))
    usual = statistics.median(event["seconds"] for event in events(one, "exchanged"))
    record_property("seconds of an exchange of the first", usual)
