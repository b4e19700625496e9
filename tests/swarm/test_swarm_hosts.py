"""One island on two hosts, as real processes in two network namespaces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hosts_kit import START_S, HostProcess, hosts
from places import ROOT
from swarm_kit import settings, until

from benchmarks.netns import available
from node.templates import render

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not available(), reason="namespaces need Linux, root, ip and tc"),
]

ROUNDS = 2
RUN = settings(
    inner_steps=4,
    overlap_steps=0,  # what is learnt does not depend on when a merge comes
    total_rounds=ROUNDS,
    min_grace_s=30,
    data__batch_size=8,
    evaluation__sequences=8,
    inner__total_steps=100,
    seed=3,
)
WITH_OTHERS = {
    "inner_steps": 8,
    "total_rounds": 40,
    "min_grace_s": 30,
    "eval_every": 0,
    "data__batch_size": 4,
    "evaluation__sequences": 8,
}
ENDLESS = settings(
    inner_steps=4,
    total_rounds=100_000,
    min_grace_s=2,
    eval_every=100,
    data__batch_size=8,
    evaluation__sequences=8,
    seed=3,
)
LAYOUT = ("--nproc", "2", "--layout", "fsdp=4")
ELASTIC = ("--nnodes", "1:2", "--nproc", "1")  # fsdp=2 over both
DARK_S = 20.0  # ten seconds of silence, and a busy machine


def test_two_hosts_train_as_one_and_end_with_the_bits_of_the_others(tmp_path: Path) -> None:
    """2 hosts x 2 ranks: the losses of 4 ranks on one host; bit-equal with an island beside."""
    with hosts(tmp_path, ["one", "two", "three"]) as made:
        first = made.island("single", "three").start(*RUN, "--nproc", "4")
        assert first.end() == 0
        spread = [made.host(n).start("--nnodes", "2", *LAYOUT, *(() if n else RUN)) for n in (0, 1)]
        assert [host.end() for host in spread] == [0, 0]
        assert worst(spread[0], first, 4 * ROUNDS) < 5e-5
        assert len(spread[1].ranks()) == 0
        assert not (spread[1].dir / "identity.pem").exists()


def test_in_a_swarm_with_another_island_all_end_bit_equal(tmp_path: Path) -> None:
    with hosts(tmp_path, ["one", "two", "three"]) as made:
        run = settings(**WITH_OTHERS)
        one = made.host(0).start("--nnodes", "2", *LAYOUT, *run)
        two = made.host(1).start("--nnodes", "2", *LAYOUT)
        started = until(lambda: one.events("started"), START_S, "host 0 is up", one.text)
        single = made.island("single", "three").start("--peers", started[0]["join_address"])
        assert [host.end(300) for host in (one, two, single)] == [0, 0, 0]
        last = WITH_OTHERS["total_rounds"] - 1
        states = [host.rounds()[last]["state"] for host in (one, single)]
        assert len(set(states)) == 1
        assert max(done["members"] for done in one.rounds().values()) == 2


def test_the_pages_commands(tmp_path: Path) -> None:
    """The lines of docs/parallelism.md, as they are typed on each host."""
    page = (ROOT / "docs" / "parallelism.md").read_text()
    section = page.split("## Several hosts")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("node ")]
    starts = [line.split()[2:] for line in lines if line.startswith("node start")]
    assert len(starts) == 2
    with hosts(tmp_path, ["one", "two"]) as made:
        address = made.endpoint.partition(":")[0]
        both = []
        for number, words in enumerate(starts):
            typed = [word.replace("HOST0", address) for word in words]
            both.append(made.host(number).typed(*typed, *(() if number else ENDLESS)))
        both[0].wait_round(1)
        assert len(both[1].ranks()) == 2
    templates = [line.split(" > ") for line in lines if line.startswith("node bootstrap")]
    assert len(templates) == 2
    for command, file in templates:
        words = command.replace("HOST:PORT/ID", "127.0.0.1:4390").split()[1:]
        made_file = subprocess.run(
            [sys.executable, "-m", "node", *words], check=True, capture_output=True, text=True
        )
        assert made_file.stdout == render(
            file.partition(".")[0], peers=("127.0.0.1:4390",), hosts=2
        )


def worst(one: HostProcess, other: HostProcess, steps: int) -> float:
    """By how much losses of the first inner steps differ."""
    losses, expected = one.losses(), other.losses()
    return max(abs(losses[step] - expected[step]) for step in range(1, steps + 1))


def meshes(host: HostProcess) -> list[str]:
    """What host 0 said of its island's mesh, whenever it changed."""
    said = [text.partition("this island ")[2] for text in host.notices()]
    return [text for text in said if text.startswith("goes on with")]


def goes_on_alone(one: HostProcess, lose: Callable[[], None], bound: float) -> float:
    """Host 0 trains on without host 1; seconds until it knew."""
    one.wait_round(1)
    lose()
    began = time.monotonic()
    until(
        lambda: any("is lost" in text for text in one.notices()),
        bound,
        "host 1 is missed",
        one.text,
    )
    took = time.monotonic() - began
    seen = max(one.rounds())
    one.wait_round(seen + 2)
    assert len(one.ranks()) == 1
    assert meshes(one)[-1] == "goes on with 1 hosts: single"
    return took


def test_a_killed_host_is_gone_on_without(tmp_path: Path, record_property):
    with hosts(tmp_path, ["one", "two"]) as made:
        one = made.host(0).start(*ELASTIC, *ENDLESS)
        two = made.host(1).start(*ELASTIC)
        record_property("noticed_s", round(goes_on_alone(one, two.kill, 5.0), 1))
        assert any(problem["code"] == "E408" for problem in one.events("problem"))
        tokens = [event["tokens"] for event in one.events("step")]
        assert len(set(tokens)) == 1  # the batch stayed


def test_a_host_whose_ranks_refuse_to_train_is_gone_on_without(tmp_path: Path) -> None:
    with hosts(tmp_path, ["one", "two"]) as made:
        one = made.host(0).start(*ELASTIC, *ENDLESS)
        two = made.host(1).start(*ELASTIC)
        one.wait_round(1)
        (two.home / "evaluation.bin").unlink()  # they read it when they start
        os.kill(two.ranks()[0], signal.SIGKILL)
        until(
            lambda: any(problem["code"] == "E408" for problem in one.events("problem")),
            START_S,
            "host 1 is left out",
            one.text,
        )
        assert "why: rank 1 on host 1 (" in one.text()
        one.wait_round(max(one.rounds()) + 2)
        assert one.running
        assert two.running
        assert not any(problem["fatal"] for problem in one.events("problem"))


def test_a_host_that_comes_back_is_taken_in(tmp_path: Path) -> None:
    with hosts(tmp_path, ["one", "two"]) as made:
        one = made.host(0).start(*ELASTIC, *ENDLESS)
        two = made.host(1).start(*ELASTIC)
        one.wait_round(0)
        two.kill()
        until(lambda: meshes(one) == ["goes on with 1 hosts: single"], START_S, "alone", one.text)
        two.start(*ELASTIC)
        until(lambda: len(two.ranks()) == 1, START_S, "host 1 trains again", two.text)
        back = max(one.rounds())
        one.wait_round(back + 2)
        assert meshes(one)[-1] == "goes on with 2 hosts: fsdp=2"


def test_a_host_whose_link_is_dark_is_gone_on_without(tmp_path: Path, record_property):
    with hosts(tmp_path, ["one", "two"]) as made:
        one = made.host(0).start(*ELASTIC, *ENDLESS)
        two = made.host(1).start(*ELASTIC)
        assert made.net is not None
        took = goes_on_alone(one, lambda: made.net.darken("two"), DARK_S)
        record_property("noticed_s", round(took, 1))
        # the host behind the dark link ends its ranks and looks for host 0
        until(lambda: not two.ranks(), DARK_S, "its ranks end", two.text)
        assert any("host 0 of this island is lost" in text for text in two.notices())
        made.net.light("two")
        until(lambda: len(two.ranks()) == 1, START_S, "host 1 trains again", two.text)


def test_without_host_0_the_others_end_with_a_clear_message(tmp_path: Path) -> None:
    with hosts(tmp_path, ["one", "two"]) as made:
        one = made.host(0).start("--nnodes", "2", "--nproc", "1", *ENDLESS)
        until(one.notices, START_S, "host 0 looks for the other", one.text)
        two = made.host(1).start("--nnodes", "2", "--nproc", "1", "--hosts-wait-s", "6")
        one.wait_round(0)
        one.kill()
        assert two.end(60) == 1
        assert "error E409: host 0 of this island is not there: given up after 6 s" in two.text()
        assert two.ranks() == []


def test_all_hosts_that_are_stopped_at_once_lose_no_inner_step(tmp_path: Path) -> None:
    """As Slurm and Kubernetes do: the last checkpoint needs the ranks of all hosts."""
    run = settings(inner_steps=60, total_rounds=1000, eval_every=0, data__batch_size=8)
    words = ("--nnodes", "2", "--nproc", "1", "--checkpoint-every", "1")
    with hosts(tmp_path) as made:
        both = [made.host(n).start(*words, *(() if n else run)) for n in (0, 1)]
        one, two = both
        until(lambda: one.events("checkpoint"), START_S, "a checkpoint", one.text)

        def under_way() -> bool:
            return max(one.losses()) % 60 in range(20, 40)

        until(under_way, START_S, "the middle of a cycle", one.text)
        at = max(one.losses())
        for host in (two, one):
            assert host.process is not None
            host.process.terminate()
        assert [host.end() for host in both] == [0, 0]
        assert not one.events("checkpoint_skipped")
        assert not one.events("problem")
        newest = one.events("checkpoint")[-1]["path"]
        saved = json.loads((Path(newest) / "trainer" / "trainer.json").read_text())
        assert saved["step"] >= at


def test_all_hosts_killed_and_resumed(tmp_path: Path) -> None:
    """No shared disk: the checkpoint lies on host 0, and all ranks go on from it."""
    run = settings(
        inner_steps=4,
        overlap_steps=0,
        total_rounds=4,
        min_grace_s=30,
        data__batch_size=8,
        evaluation__sequences=8,
        inner__total_steps=100,
        seed=3,
    )
    every = ("--checkpoint-every", "2")
    with hosts(tmp_path, ["one", "two", "three"]) as made:
        whole = made.island("single", "three").start(*run, "--nproc", "4")
        assert whole.end() == 0
        both = [made.host(n) for n in (0, 1)]
        for host in both:
            host.start("--nnodes", "2", *LAYOUT, *(() if host.number else (*run, *every)))
        until(
            lambda: any(e["round"] >= 2 for e in both[0].events("checkpoint")),
            START_S,
            "a checkpoint",
            both[0].text,
        )
        for host in both:
            host.kill()
        for host in both:
            host.start("--nnodes", "2", *LAYOUT, *(() if host.number else ("--resume", *every)))
        assert [host.end() for host in both] == [0, 0]
        assert worst(both[0], whole, 16) < 5e-5
        assert not list((both[1].home / "checkpoints").iterdir())
