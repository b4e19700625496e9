"""Knobs that follow from measurements, in real processes: H from the link, and from the speed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_kit import Machine, await_merged
from mode_kit import Watcher, merged_tokens, slowed, trained_tokens
from swarm_kit import Record, islands, until

from benchmarks.netns import Network, available
from diloco.knobs import inner_steps

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(500)]
namespaces = pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc")

MBIT = 12.0
LEAST, MOST = 10, 400
MOST_ALONE = 100  # there is something to wait for in every round
SOME_EXCHANGE_S = 0.2  # half of the vector of 0.87 MB needs 0.29 s; alone it is 0.02 s
MOST_WAITED = 0.3  # 0.05 is asked for; with the fewest steps it would be 0.4 or more
SLOW_LINK = {
    "rounds.inner_steps": LEAST,
    "rounds.most_steps": MOST,
    "rounds.codec": "fp32",
    "rounds.total_rounds": 5000,
    "rounds.eval_every": 0,
    "data.batch_size": 4,
}
SMALL = {"data__batch_size": 4, "eval_every": 0}


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(["one", "two"], mbit=MBIT) as made:
        yield made


def knobs(machine: Machine, name: str) -> list[dict[str, Any]]:
    """What the machine has told of a knob."""
    log = machine.dir / "events.jsonl"
    lines = log.read_text().splitlines() if log.exists() else []
    events = [json.loads(line) for line in lines if '"kind": "knob"' in line and line[-1] == "}"]
    return [event for event in events if event["name"] == name]


@namespaces
def test_h_is_chosen_so_that_a_slow_link_exposes_little(
    network: Network, tmp_path: Path, record_property: Record
) -> None:
    one, two = (Machine(network, name, tmp_path) for name in ("one", "two"))
    words = [word for key, value in SLOW_LINK.items() for word in ("--set", f"{key}={value}")]
    one.start("start", *words)
    one.awaits(lambda: one.head() >= 0, "its first round alone")
    two.start("start", "--peers", one.where)

    # an exchange of both was timed: H is not the least any more, for whoever timed it and for
    # who heard of that first
    def chosen(machine: Machine) -> dict[str, Any] | None:
        found = knobs(machine, "inner_steps")
        return found[-1] if found and found[-1]["value"] > MOST_ALONE else None

    told = {
        m.name: m.awaits(lambda m=m: chosen(m), "H follows from the link", 200) for m in (one, two)
    }
    for name, knob in told.items():
        inputs = knob["inputs"]
        wanted = 0  # who has timed none takes what the other asks for
        if inputs["exchange_s"]:
            wanted = inner_steps(
                inputs["exchange_s"],
                1 / inputs["fastest"],
                overlap_steps=0,
                exposed=inputs["exposed"],
                least=LEAST,
                most=MOST,
            ).inner_steps
        assert inputs["wanted"] == wanted
        asked = max(LEAST, inputs["wanted"], inputs["wanted_by_others"])
        assert knob["value"] == min(MOST, asked)
        record_property(name, json.dumps({"value": knob["value"], **inputs}))
    timed = max(told.values(), key=lambda knob: knob["inputs"]["exchange_s"])
    assert timed["inputs"]["exchange_s"] > SOME_EXCHANGE_S
    state = json.loads(one.api("/api/v1/state"))
    assert state["knobs"]["inner_steps"]["value"] > MOST_ALONE

    # and rounds of that length are what follows: the exchange takes a small part of them
    await_merged(one, two, 3)  # the first of them may have begun before
    late = [(r["wait_s"], r["phases"]["compute"]) for r in one.rounds()[-2:]]
    record_property("wait_s and compute_s", late)
    waited, computed = map(sum, zip(*late, strict=True))
    assert waited / (waited + computed) < MOST_WAITED

    # the operator's word counts for more
    two.stop()
    two.start("start", "--resume", "--peers", one.where, "--inner-steps", "7")
    word = "set with --inner-steps"
    fixed = two.awaits(lambda: [k for k in knobs(two, "own_inner_steps") if k["why"] == word], word)
    assert [k["value"] for k in fixed] == [7]


def test_a_slow_island_takes_fewer_steps_and_all_its_tokens_count(
    tmp_path: Path, record_property: Record
) -> None:
    """One of four gets a quarter of the processor: H of its own, and nobody waits for it."""
    run = {"inner_steps": 24, "total_rounds": 5000, "min_grace_s": 2.0}
    with islands(tmp_path) as made, contextlib.ExitStack() as stack:
        swarm = made.swarm(4, **run, **SMALL)
        first, slow = swarm[0], swarm[3]
        seen = stack.enter_context(contextlib.closing(Watcher(first)))
        with slowed(slow, 4):

            def less() -> dict[str, Any] | None:
                told = [k for k in slow.events("knob") if k["name"] == "own_inner_steps"]
                return told[-1] if told and told[-1]["value"] <= 12 else None

            knob = until(less, 150, "the slow island takes fewer steps", slow.tail)
            assert knob["inputs"]["steps_per_second"] < 0.6 * knob["inputs"]["fastest"]
            before = len(slow.rounds())
            until(lambda: len(slow.rounds()) >= before + 4, 150, "four rounds", slow.tail)
            merged, trained = merged_tokens(seen.rounds()), trained_tokens(slow)
            record_property("H of the slow island", knob["value"])
            record_property("of its tokens merged", merged[slow.peer] / trained)
            assert trained - merged[slow.peer] <= 2 * 24 * 4 * 128, "all but what is under way"
            assert "own_inner_steps" in slow.api("status").stdout


def test_tau_follows_from_the_measured_transfer(tmp_path: Path, record_property: Record) -> None:
    run = {"mode": "streaming", "fragments": 2, "inner_steps": 40, "total_rounds": 5000}
    with islands(tmp_path) as made:
        swarm = made.swarm(2, **run, **SMALL)

        def timed() -> list[dict[str, Any]]:
            told = [k for k in swarm[1].events("knob") if k["name"] == "tau"]
            return [k for k in told if k["inputs"]["transfer_s"] > 0]

        knob = until(timed, 150, "tau follows from a transfer", swarm[1].tail)[-1]
        needed = knob["inputs"]["transfer_s"] * knob["inputs"]["steps_per_second"]
        record_property("tau", json.dumps({"value": knob["value"], **knob["inputs"]}))
        assert 1 <= knob["value"] <= 10
        assert knob["value"] >= min(10, int(needed))
