"""How much memory a checkpoint takes beside what is there already, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells peaks"),
]

SIZE = 8_000_000  # elements: what a process takes for itself is to count for little
SLACK = 0.5  # of a vector: buffers, and a tensor at a time

HEAD = """
from node.checkpoints import tensor_files
tensor_files._flush = lambda descriptor: None  # a busy disk is not what is measured
"""

TRAINER = """
import sys
from pathlib import Path
import torch
from torch import nn
from node.bench.memory import forget_peak, peak_bytes, resident_bytes
from node.trainer.layout import Layout
from node.trainer.parallel import Ranks
from node.trainer.resume import save
from node.trainer.trainer_state import FragmentState, TrainerState
from node.trainer.weights import Weights

layers = range(int(sys.argv[1]) // 10**6)
model = nn.Sequential(*(nn.Linear(1000, 1000, bias=False) for _ in layers))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
layout, ranks = Layout.of_module(model), Ranks.alone(torch.device("cpu"))
weights = Weights.of(dict(model.named_parameters()), layout, ranks)
standing = TrainerState(
    fragments=(FragmentState(round=1),), round_step=0, step=1, tokens=1,
    rewarm_from=None, optimizer_steps=1
)
for name in ("warm", "measured"):  # modules that are imported on the way do not count
    place = Path(sys.argv[2]) / name
    place.mkdir()
    forget_peak()
    before = resident_bytes()
    assert save(place, weights, optimizer, standing, one_disk=sys.argv[3] == "one").finish() is None
print((peak_bytes() - before) / (4 * layout.size))
"""

DAEMON = """
import sys
from pathlib import Path
import torch
from node.bench.memory import forget_peak, peak_bytes, resident_bytes
from node.checkpoints.freezing import FrozenOuter
from node.checkpoints.tensor_files import write_entries

size = int(sys.argv[1])
vectors = {name: [torch.ones(size)] for name in ("base", "outer.v")}
frozen = FrozenOuter(None, vectors, None)
forget_peak()
before = resident_bytes()
write_entries(Path(sys.argv[2]) / "outer", frozen.entries())
print((peak_bytes() - before) / (4 * size))
"""


def measured(code: str, *words: str) -> float:
    """Vectors as long as the model that a process took, at its peak."""
    done = subprocess.run(
        [sys.executable, "-c", HEAD + code, str(SIZE), *words],
        check=True,
        capture_output=True,
        text=True,
        env={"OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    return float(done.stdout)


@pytest.mark.parametrize("disks", ["one", "several"])
def test_a_trainer_takes_no_more_than_one_copy_of_what_it_writes(
    tmp_path: Path, disks: str
) -> None:
    """θ and two moments, as they were at one moment."""
    assert measured(TRAINER, str(tmp_path), disks) <= 3 + SLACK


def test_a_daemon_takes_nothing_while_no_round_changes_what_it_writes(tmp_path: Path) -> None:
    assert measured(DAEMON, str(tmp_path)) <= SLACK
