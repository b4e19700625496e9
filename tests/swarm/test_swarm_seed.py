"""A seed, by the real command: it has no trainer, and it is all that a newcomer has to know."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from node_process import NodeProcess, nodes, wait_until

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

Make = Callable[..., NodeProcess]
RUN = ("--set", "rounds.total_rounds=500", "--set", "rounds.inner_steps=20")


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with nodes(tmp_path) as make:
        yield make


def same_state(several: list[NodeProcess], after: int) -> None:
    """They share rounds later than ``after``, and had the same state after each they share."""

    def shared() -> set[int]:
        return set.intersection(*(set(node.rounds()) for node in several))

    several[0].wait_for(lambda: max(shared(), default=-1) > after, f"a round after {after} by all")
    states = [node.rounds() for node in several]
    for number in shared():
        assert len({one[number] for one in states}) == 1, f"round {number}"


def test_islands_bring_a_seed_their_run_and_newcomers_need_only_the_seed(make: Make) -> None:
    seed = make("seed").start("bootstrap")
    address = seed.address()  # before there is any run
    seed.wait_for(lambda: "waiting for the first island" in seed.text(), "being told so")
    # both bring the same run at the same moment: it begins once
    first = make("first").start("start", *RUN, "--peers", address)
    second = make("second").start("start", *RUN, "--peers", address)
    same_state([seed, first, second], 2)
    runs = {node.state()["run"]["id"] for node in (seed, first, second)}
    assert len(runs) == 1
    view = seed.state()
    assert view["node"]["role"] == "seed"
    assert view["status"] == "active"
    seen = {peer["role"] for peer in first.state()["peers"]}
    assert seen == {"island", "seed"}
    # a seed never decides, nor delays: it is in nobody's count of islands
    assert {event["live"] for event in first.events("round")} <= {1, 2}

    third = make("third").start("start", "--peers", address)
    same_state([seed, first, second, third], max(first.rounds()))

    # who created the run leaves: the seed still leads newcomers in
    creator, other = first, second
    if str(second.events("started")[0]["peer"]) in seed.text():  # run …, brought by …
        creator, other = second, first
    creator.send(signal.SIGINT)
    assert creator.wait() == 0
    fourth = make("fourth").start("start", "--peers", address)
    same_state([seed, other, third, fourth], max(other.rounds()))

    # another run does not fit there, and is told field by field
    stranger = make("stranger").start("start", "--peers", address, "--set", "model.n_layers=3")
    assert stranger.wait() == 1
    assert "error E201" in stranger.text()
    assert "model.n_layers 3 != 2" in stranger.text()

    seed.send(signal.SIGINT)
    assert seed.wait() == 0
    for node in (seed, first, second, third, fourth, stranger):
        assert "Traceback" not in node.text()


def test_a_seed_joins_a_run_and_finds_back_after_a_restart(make: Make) -> None:
    first = make("first").start("start", *RUN)
    seed = make("seed").start("bootstrap", "--peers", first.address())
    same_state([first, seed], 2)
    newcomer = make("newcomer").start("start", "--peers", seed.address())
    same_state([first, seed, newcomer], max(first.rounds()))

    # its operator forgets --peers: it remembers whom it has met
    wait_until((seed.dir / "peers.json").exists, "the cache of peers")
    seed.send(signal.SIGKILL)
    seed.wait()
    before = max(seed.rounds())
    seed.start("bootstrap")
    seed.wait_for(lambda: max(seed.rounds()) > before + 1, "going on")
    same_state([first, seed, newcomer], max(seed.rounds()))


def test_a_seed_gives_up_a_run_that_died_on_the_way(make: Make) -> None:
    seed = make("seed").start("bootstrap")
    broken = make("broken").start("start", *RUN, "--peers", seed.address())
    broken.wait_for(lambda: broken.events("join"), "the first greeting")
    broken.send(signal.SIGKILL)
    broken.wait()
    first = make("first").start("start", *RUN, "--set", "seed=1", "--peers", seed.address())
    same_state([seed, first], 2)
