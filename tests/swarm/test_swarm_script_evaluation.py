"""A script's evaluation that raises on one of two ranks ends both, at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts_kit import free_port
from node_process import NodeProcess, nodes, wait_until
from places import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PROMPT_S = 30.0  # far below the half hour of a collective call

# Its arguments: the rank whose evaluation raises, the evaluation in which it does, "together" where
# the ranks evaluate by collective calls, and "stays" where it goes on to run when it has failed.
RANK = """
import signal, sys, torch, torch.distributed as dist, node
from protocols.errors import OperatorError

failing, last = int(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo")
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters())
count = 0


def evaluate():
    global count
    count += 1
    if count == last and dist.get_rank() == failing:
        raise ValueError("of the evaluation")
    if "together" in sys.argv:
        dist.all_reduce(torch.ones(1))
    return 1.0


try:
    run = {"rounds": {"inner_steps": 5, "eval_every": 1}}
    with node.join(model, optimizer, run=run, evaluate=evaluate) as joined:
        while joined.step(tokens=8):
            pass
    print("OVER", flush=True)
except (OperatorError, ValueError) as error:
    print("CAUGHT", type(error).__name__, getattr(error, "code", ""), error, flush=True)
    if "stays" in sys.argv and isinstance(error, ValueError):
        signal.pause()
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Makes processes by name; all are ended."""
    with nodes(tmp_path) as made:
        yield lambda name, **environment: made(name, PYTHONPATH=str(ROOT), **environment)


@pytest.mark.parametrize(
    ("failing", "count", "how", "told"),
    [
        (1, 3, "stays", "the evaluation of another rank of this script has failed"),
        (0, 3, "stays", "the evaluation of another rank of this script has failed"),
        (1, 1, "stays", "the evaluation of another rank of this script has failed"),
        (1, 3, "together", "another rank of this script is gone"),
        (0, 3, "together", "another rank of this script is gone"),
    ],
)
def test_all_ranks_end(
    make: Callable[..., NodeProcess],
    tmp_path: Path,
    failing: int,
    count: int,
    how: str,
    told: str,
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        make(name, RANK=str(rank), **shared).start_script(script, failing, count, how)
        for rank, name in enumerate(("node", "other"))
    ]
    broken, other = ranks[failing], ranks[1 - failing]
    wait_until(lambda: "CAUGHT" in broken.text(), "the evaluation to fail")
    assert "CAUGHT ValueError  of the evaluation" in broken.text()
    began = time.monotonic()
    assert other.wait() == 0, other.text()
    assert time.monotonic() - began < PROMPT_S
    assert f"CAUGHT OperatorError E405 {told}" in other.text()
    wait_until(lambda: not ranks[0].left_over(), "the node to leave")
    assert any(event["kind"] == "stopping" for event in ranks[0].events())
