"""A script of several ranks that is killed and started again: it repeats its steps bit for bit.

That is, from a checkpoint that it had a part in: its node makes another one of the last merge.
"""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts_kit import free_port
from node_process import NodeProcess, nodes, wait_until
from places import ROOT

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

ROUND = 5  # inner steps
SAVED = 3 * ROUND  # from here on a checkpoint is made, between two rounds
KILLED = SAVED + 2 * ROUND + 2
END = KILLED + ROUND

# Its arguments: ddp or fsdp, a folder for its records, the step to stop at, and whether to resume.
# It writes what it holds after every step, as hashes. Once a checkpoint is due it looks after every
# step how far that is, for the node hears of what the ranks have written when they take the next:
# so that it is made before the next round, and whole before they are killed.
RANK = f"""
import hashlib, json, os, signal, sys, time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import node

kind, folder, last, resume = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "yes"
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(10 * resume + rank)
model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 7))
if kind == "fsdp":
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = {{"rounds": {{"inner_steps": {ROUND}}}}}
island = node.join(model, optimizer, run=None if resume else run, resume=resume)


def digest(tensors):
    hasher = hashlib.sha256()
    for tensor in tensors:
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        hasher.update(whole.detach().numpy().tobytes())
    return hasher.hexdigest()


def record():
    found = {{
        "step": island.steps,
        "round": island.round,
        "parameters": digest(model.parameters()),
        "optimizer": digest(
            optimizer.state[parameter][name]
            for parameter in model.parameters()
            for name in ("step", "exp_avg", "exp_avg_sq")
        ),
        "outer": digest(island.outer_parameters().values()),
    }}
    with (folder / f"rank{{rank}}").open("a") as out:
        out.write(json.dumps(found) + "\\n")


def on_disk():
    return {{place for place, _, _ in os.walk(folder / "node" / "checkpoints")}}


if resume:
    record()
while island.steps < last:
    generator = torch.Generator().manual_seed(2 * island.steps + rank)
    x = torch.randn(16, 24, generator=generator)
    loss = (model(x) - x[:, :7].sin()).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    island.step(tokens=32, loss=loss)
    record()
    seen, end = on_disk(), time.monotonic() + 1.0
    while not resume and island.steps >= {SAVED} and time.monotonic() < end:
        if on_disk() != seen or any("ckpt-" in path for path in seen):
            break
        time.sleep(0.01)
if not resume:
    print("HERE", flush=True)
    signal.pause()
island.leave()
dist.destroy_process_group()
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    """Makes processes by name; all are ended."""
    with nodes(tmp_path) as made:
        yield lambda name, **environment: made(name, PYTHONPATH=str(ROOT), **environment)


def records(folder: Path, rank: int) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / f"rank{rank}").read_text().splitlines()]


def check_alike(ranks: list[list[dict[str, object]]]) -> None:
    """Gathered from shards, or copies; the outer parameters are on rank 0 alone."""
    without = [[record | {"outer": ""} for record in rank] for rank in ranks]
    assert without[0] == without[1]


@pytest.mark.parametrize("kind", ["fsdp", "ddp"])
def test_all_ranks_go_on_where_the_checkpoint_was(
    make: Callable[..., NodeProcess], tmp_path: Path, kind: str
) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)

    def life(last: int, resume: str) -> list[NodeProcess]:
        shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared["ATOLL_CHECKPOINT_EVERY"] = "3"
        return [
            make(name, RANK=str(rank), **shared).start_script(script, kind, tmp_path, last, resume)
            for rank, name in enumerate(("node", "other"))
        ]

    first = life(KILLED, "no")
    first[0].wait_for(lambda: "HERE" in first[0].text(), "the steps before it is killed")
    for rank in first:
        rank.send(signal.SIGKILL)
        rank.wait()
    wait_until(lambda: not first[0].left_over(), "the node of a script that is gone to leave")
    # the disk as it was when the script had a part in a checkpoint: the one after it is of the last
    # merge with moments of before, and rounds in which the node had promised begin anew
    for made in sorted((first[0].dir / "checkpoints").glob("ckpt-*"))[1:]:
        shutil.rmtree(made)
    (first[0].dir / "promised-0").unlink()
    before = [records(tmp_path, rank) for rank in range(2)]
    check_alike(before)
    second = life(END, "yes")
    for rank in second:
        assert rank.wait() == 0, rank.text()
    after = [records(tmp_path, rank)[KILLED:] for rank in range(2)]
    check_alike(after)
    for again, earlier in zip(after, before, strict=True):
        steps = [record["step"] for record in again]
        assert SAVED <= steps[0] < SAVED + ROUND
        assert steps == list(range(steps[0], END + 1))
        # as it was then, and after the two rounds that come next
        repeated = again[: KILLED - steps[0] + 1]
        assert repeated == earlier[steps[0] - 1 :]
        assert repeated[-1]["round"] == KILLED // ROUND
