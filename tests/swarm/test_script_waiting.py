"""A script that has created a run waits until its friends are there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts_kit import free_port
from node_process import NodeProcess, nodes
from places import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

# its arguments: the seed of its first parameters, and peers
SCRIPT = """
import sys

import torch
from torch import nn

import node

seed, *peers = sys.argv[1:]
torch.manual_seed(int(seed))
model = nn.Linear(8, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = {"rounds": {"inner_steps": 5, "total_rounds": 4, "quorum": 1}}
with node.join(model, optimizer, peers=peers, run=None if peers else run) as island:
    while not island.over:
        loss = model(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        island.step(tokens=16, loss=loss)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Makes processes by name; all are ended."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with nodes(tmp_path) as made:
        yield lambda name, **environment: made(name, PYTHONPATH=str(ROOT), **environment)


def gathered(first: NodeProcess, others: int) -> None:
    """Until so many of three are there."""

    def told() -> bool:
        waits = [e["text"] for e in first.events("join") if e["name"] == "wait"]
        return any(text.startswith(f"{others} of 3 islands") for text in waits)

    first.wait_for(told, f"{others} islands")


def test_a_script_that_is_killed_while_it_waits_comes_back_to_who_is_there(
    make: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    listen = f"127.0.0.1:{free_port()}"
    first = make("first", ATOLL_WAIT_FOR="3", ATOLL_LISTEN=listen).start_script(script, 1)
    address = first.address()
    second = make("second").start_script(script, 2, address)
    gathered(first, 2)
    first.kill()
    first.start_script(script, 3)
    assert first.wait() != 0, "it would begin another run under the same id"
    assert "E105" in first.text()
    first.environment |= {"ATOLL_RESUME": "true"}
    first.start_script(script, 3)
    third = make("third").start_script(script, 4, address)
    for one in (first, second, third):
        assert one.finish() == 0, one.text()
    assert [event["members"] for event in first.events("round")] == [0, 3, 3, 3]
    assert first.rounds() == second.rounds() == third.rounds()


def test_a_script_that_is_stopped_while_it_waits_leaves_the_run_to_who_is_there(
    make: Callable[..., NodeProcess], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    first = make("first", ATOLL_WAIT_FOR="3").start_script(script, 1)
    second = make("second").start_script(script, 2, first.address())
    gathered(first, 2)
    (daemon,) = first.left_over()
    os.kill(daemon, signal.SIGTERM)  # as `node stop` does
    assert first.wait() == 0, first.text()
    assert second.finish() == 0, second.text()
    assert max(second.rounds()) == 3, "all of the four"
