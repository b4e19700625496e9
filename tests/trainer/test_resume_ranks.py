"""A checkpoint that one of two ranks cannot read is refused on both, and nobody waits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks_kit import forked
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from node.trainer import resume
from node.trainer.layout import Layout
from node.trainer.parallel import Ranks
from node.trainer.resume import load, save
from node.trainer.trainer_state import FOLDER, FragmentState, TrainerState
from node.trainer.weights import Weights
from protocols.errors import OperatorError

RANKS = 2
WIDE = {"total": np.float64(0.1), "count": 2**40 + 1}  # moments that fp32 would round
LAYOUT = Layout.of_shapes([("w", torch.Size([4, 3]))])
STANDING = TrainerState(
    fragments=(FragmentState(round=3),), round_step=2, step=5, tokens=99, position=7,
    rewarm_from=None, optimizer_steps=1,
)  # fmt: skip


def _refused(place: Path, ranks: Ranks, one_disk: bool) -> list[Any]:
    """What a rank is told of a checkpoint that loses its end while it is read."""
    weight, gradient = (
        distribute_tensor(whole, ranks.mesh, [Shard(0)], src_data_rank=None)
        for whole in (torch.arange(12.0).view(4, 3), torch.ones(4, 3))
    )
    parameter = nn.Parameter(weight)
    parameter.grad = gradient
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    for name, value in WIDE.items():
        optimizer.state[parameter][name] = torch.full_like(
            parameter, value, dtype=torch.tensor(value).dtype
        )
    weights = Weights.of({"w": parameter}, LAYOUT, ranks)
    assert save(place, weights, optimizer, STANDING, one_disk=one_disk).finish() is None
    assert ranks.all_true(True)  # the other has written too
    optimizer.state.clear()
    assert load(place, weights, optimizer, one_disk=one_disk)[0].step == STANDING.step
    for name, value in WIDE.items():
        back = optimizer.state[parameter][name].full_tensor()
        assert (back.dtype == torch.tensor(value).dtype, bool((back == value).all())) == (
            True,
            True,
        )
    reader, read = resume.HuggingFaceStorageReader, resume.HuggingFaceStorageReader.read_data

    def cut(*given: Any) -> Any:
        file = max((place / FOLDER).glob("*.safetensors"))  # each rank reads what it has written
        file.write_bytes(file.read_bytes()[:-4])
        return read(*given)

    if ranks.rank == (RANKS - 1 if one_disk else 0):
        reader.read_data = cut  # type: ignore[method-assign]
    try:
        load(place, weights, optimizer, one_disk=one_disk)
    except OperatorError as error:
        return [error.code, error.what, error.why, len(optimizer.state)]
    finally:
        reader.read_data = read  # type: ignore[method-assign]
    return []


def _rank(rank: int, directory: Path) -> None:
    store = f"file://{directory}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    ranks = Ranks(rank, RANKS, torch.device("cpu"), init_device_mesh("cpu", (RANKS,)))
    for one_disk in (True, False):
        told = _refused(directory / str(one_disk), ranks, one_disk)
        (directory / f"told-{one_disk}-{rank}").write_text(json.dumps(told))


def test_both_ranks_are_told_of_what_one_cannot_read(tmp_path: Path) -> None:
    for one_disk in (True, False):
        (tmp_path / str(one_disk)).mkdir()
    forked(_rank, RANKS, tmp_path)
    for one_disk in (True, False):
        first, second = (
            json.loads((tmp_path / f"told-{one_disk}-{rank}").read_text()) for rank in range(RANKS)
        )
        assert first == second
        code, what, why, moments = first
        assert (code, moments) == ("E404", 0)
        assert what == f"cannot resume from {tmp_path / str(one_disk)}"
        assert "SafetensorError" in why
