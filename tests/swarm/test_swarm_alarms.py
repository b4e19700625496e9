"""Alarms in real swarms: an island that drifts, and two halves that are cut from each other.

Every place where an operator looks must tell of it: the log, ``node status``, the metrics, and what
the dashboard and ``node monitor`` are drawn from.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from machine_kit import Machine
from places import KITS
from swarm_kit import Island, islands, node, settings, until

from benchmarks.netns import Network, available
from node.status import fetch, find

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

RUN = {"total_rounds": 5000, "min_grace_s": 2.0, "data__batch_size": 4}


def metric(island: Island, kind: str) -> float:
    """``swarm_alarms`` of a kind, as a node exports it."""
    import urllib.request

    api, _ = find(island.dir)
    with urllib.request.urlopen(f"http://{api}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    found = re.search(rf'^swarm_alarms{{kind="{kind}"}} (\S+)$', text, re.MULTILINE)
    assert found, text
    return float(found[1])


def alarms(island: Island, kind: str) -> list[dict[str, Any]]:
    return [event for event in island.events("alarm") if event["alarm"] == kind]


@pytest.mark.parametrize(
    ("mode", "more"),
    [
        ("diloco", {"inner_steps": 10}),
        ("streaming", {"inner_steps": 12, "fragments": 2}),
        ("async", {"inner_steps": 10}),
        ("gossip", {"inner_steps": 10}),
    ],
)
def test_an_island_that_drifts_is_told_of_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, more: dict[str, Any]
) -> None:
    """Its steps are thirty times as long as the others'; three that mean well see who it is."""
    monkeypatch.setenv("RANK_PROGRAM", str(KITS / "drifting_rank.py"))
    with islands(tmp_path) as made:
        first = made.new(*settings(mode=mode, **RUN | more))
        address = first.await_up()
        honest = [first, *(made.new("--peers", address) for _ in range(2))]
        far = Island("far", tmp_path)
        far.program = (str(KITS / "island_of_ranks.py"),)
        made.all.append(far)
        far.start("--peers", address)
        far.await_up()

        def seen() -> Any:
            return [a for a in alarms(first, "drift") if far.peer in a["peers"]]

        [told, *_] = until(seen, 150, "a drift is seen", first.tail)
        assert "far drifts" in told["what"]
        assert told["level"] == "warning"
        until(lambda: metric(first, "drift") >= 1, 30, "the metric", first.tail)
        until(
            lambda: "drifts: before the last merges" in first.api("status").stdout,
            30,
            "node status",
            first.tail,
        )
        picture = until(
            lambda: [a for a in fetch(first.dir)["alarms"] if a["kind"] == "drift"], 30, "the API"
        )
        assert picture[0]["peers"] == [far.peer]
        log = first.dir / "console.log"
        assert re.search(r"alarm drift: far drifts.*\n  fix: Look at its loss", log.read_text())
        watching = node("monitor", "--peers", address, "--once")
        assert watching.returncode == 0, watching.stderr
        others = {peer for island in honest for a in alarms(island, "drift") for peer in a["peers"]}
        assert others <= {far.peer}, "nobody else drifts"
        distances = [
            {peer: item["apart"] for peer, item in event["islands"].items() if "apart" in item}
            for event in first.events("round")
        ]
        assert max(map(len, distances)) == 4, "the sketches of all four were compared"
        far.kill()
        until(
            lambda: [e for e in first.events("alarm_ended") if e["alarm"] == "drift"],
            90,
            "it has ended",
            first.tail,
        )


@pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc")
def test_two_halves_are_told_of_each_other_and_heal(tmp_path: Path) -> None:
    """Cut: each sees half of the islands silent and goes on. Joined: a split, then one state."""
    names = ["alps", "fjord", "mesa", "reef"]
    run = ("--set", "rounds.total_rounds=5000", "--set", "rounds.inner_steps=15")
    with Network(names) as network:
        machines = {name: Machine(network, name, tmp_path) for name in names}
        first = machines["alps"]
        first.start("start", "--name", "alps", *run)
        first.awaits(lambda: "identity" in first.text, "it is up")
        for name in names[1:]:
            machines[name].start("start", "--name", name, "--peers", first.where)

        def together() -> Any:
            return all(m.rounds() and m.rounds()[-1]["members"] == 4 for m in machines.values())

        first.awaits(together, "four in a round", 120)
        sides = (names[:2], names[2:])
        network.cut(sides[1])
        for side, others in (sides, sides[::-1]):
            for name in side:
                one = machines[name]
                told = one.awaits(lambda one=one: told_of(one, "silence"), "silence is told", 90)
                assert "2 of 4 islands are silent" in told[-1]["what"]
                assert all(other in told[-1]["what"] for other in others)
        before = {name: machines[name].head() for name in names}
        for name in names:  # each side goes on by itself
            one = machines[name]
            one.awaits(lambda one=one, n=name: one.head() >= before[n] + 3, "rounds of a half", 120)
        status = first.network.command("alps", [*node_words(), "status", "--dir", str(first.dir)])
        assert "ALARM" in run_in(status)
        network.join(sides[1])
        first.awaits(together, "four in a round again", 150)
        for name in names:
            one = machines[name]
            one.awaits(lambda one=one: not standing(one), "no alarm is left", 90)
        last = min(m.head() for m in machines.values())
        states = {r["state"] for m in machines.values() for r in m.rounds() if r["round"] == last}
        assert len(states) == 1
        for name in names:  # two states are told of too, unless they were one again at once
            one = machines[name]
            one.awaits(
                lambda one=one: all(
                    len(told_of(one, kind)) == len(told_of(one, kind, "alarm_ended"))
                    for kind in ("silence", "split")
                ),
                "it is said that it is over",
                60,
            )


def told_of(machine: Machine, kind: str, what: str = "alarm") -> list[dict[str, Any]]:
    return [e for e in logged(machine, what) if e["alarm"] == kind]


def logged(machine: Machine, kind: str) -> list[dict[str, Any]]:
    log = machine.dir / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    return [json.loads(x) for x in lines if f'"kind": "{kind}"' in x and x.endswith("}")]


def standing(machine: Machine) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(machine.api("/api/v1/state"))["alarms"]
    return found


def node_words() -> list[str]:
    import sys

    return [sys.executable, "-m", "node"]


def run_in(command: list[str]) -> str:
    import subprocess

    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
