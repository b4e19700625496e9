"""Scripts of one rank and of two whose node or other rank ends: all are told. Real processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts_kit import free_port
from node_process import NodeProcess, nodes, wait_until
from places import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Makes nodes by name; all are ended."""
    with nodes(tmp_path) as made:
        yield lambda name, **environment: made(name, PYTHONPATH=str(ROOT), **environment)


RANK = """
import os, sys, torch, torch.distributed as dist, node
from node.script import standstill
from node.trainer.channel import Stop
from protocols.errors import OperatorError

dist.init_process_group("gloo")
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
try:
    run = {"rounds": {"inner_steps": 5}}
    with node.join(model, optimizer, peers=sys.argv[2:], run=run) as joined:
        if sys.argv[1] == "impatient":
            standstill.STILL_S, standstill.SILENT_S = 10.0, 20.0
        while True:
            model(torch.ones(8, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            joined.step(tokens=8)
            if sys.argv[1] == "raises" and joined.steps == 40 and dist.get_rank() == 1:
                raise ValueError("of the script's own")
            if sys.argv[1] == "garbles" and joined.steps == 40:
                joined._progress.report(Stop())  # which only a node says
except OperatorError as error:
    print("CAUGHT", error.code, error.what, flush=True)
except ValueError as error:
    print("CAUGHT", error, flush=True)
if dist.get_rank() == 0:
    try:
        os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        print("REAPED", flush=True)
"""


def start(
    make: Callable[..., NodeProcess], tmp_path: Path, size: int, how: str
) -> list[NodeProcess]:
    """All ranks of one script."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    meeting |= {"MASTER_PORT": str(free_port())}
    return [
        make(f"rank{number}", RANK=str(number), **meeting).start_script(script, how)
        for number in range(size)
    ]


@pytest.mark.parametrize("how", ["killed", "raises"])
def test_the_end_of_one_rank_reaches_the_others(
    make: Callable[..., NodeProcess], tmp_path: Path, how: str
) -> None:
    ranks = start(make, tmp_path, 2, how)
    wait_until(lambda: len(ranks[0].events("round")) >= 3, "three rounds")
    if how == "killed":
        ranks[1].send(signal.SIGKILL)
    assert ranks[0].wait(60) == 0, ranks[0].text()
    assert "CAUGHT E405 another rank of this script is gone" in ranks[0].text()
    ranks[1].wait(30)
    if how == "raises":
        assert "CAUGHT of the script's own" in ranks[1].text()
    wait_until(lambda: not ranks[0].left_over(), "the node to leave")
    assert any(event["kind"] == "stopping" for event in ranks[0].events())


@pytest.mark.parametrize("size", [1, 2])
def test_a_node_that_is_killed_is_told_to_all_ranks(
    make: Callable[..., NodeProcess], tmp_path: Path, size: int
) -> None:
    ranks = start(make, tmp_path, size, "stays")
    wait_until(lambda: len(ranks[0].events("round")) >= 2, "two rounds")
    (daemon,) = ranks[0].left_over()
    os.kill(daemon, signal.SIGKILL)
    for rank in ranks:
        assert rank.wait(60) == 0, rank.text()
        assert "CAUGHT E405 the node of this script has ended" in rank.text()
    assert "REAPED" in ranks[0].text()


@pytest.mark.parametrize("size", [1, 2])
def test_a_node_that_hangs_is_told_to_all_ranks(
    make: Callable[..., NodeProcess], tmp_path: Path, size: int
) -> None:
    """It reads nothing, and is no more waited for than one that is gone, only longer."""
    ranks = start(make, tmp_path, size, "impatient")
    wait_until(lambda: len(ranks[0].events("round")) >= 2, "two rounds")
    (daemon,) = ranks[0].left_over()
    assert "no sign of life" not in ranks[0].text()
    os.kill(daemon, signal.SIGSTOP)
    for rank in ranks:
        assert rank.wait(90) == 0, rank.text()
        assert "CAUGHT E405 the node of this script does not answer" in rank.text()
    assert "has shown no sign of life for 10 s" in ranks[0].text()
    assert "REAPED" in ranks[0].text()
    assert not ranks[0].left_over()


@pytest.mark.parametrize("size", [1, 2])
def test_a_node_that_cannot_read_a_script_ends_with_a_code_that_all_ranks_are_told(
    make: Callable[..., NodeProcess], tmp_path: Path, size: int
) -> None:
    ranks = start(make, tmp_path, size, "garbles")
    wait_until(lambda: len(ranks[0].events("round")) >= 2, "two rounds")
    for rank in ranks:
        assert rank.wait(60) == 0, rank.text()
        assert "CAUGHT E999 internal error" in rank.text()
    assert "error E999" in ranks[0].text()
    assert "REAPED" in ranks[0].text()
    assert not ranks[0].left_over()
    saved, merged = ranks[0].events("checkpoint"), ranks[0].events("round")
    assert saved[-1]["round"] >= merged[-1]["round"], "what was merged stays"
