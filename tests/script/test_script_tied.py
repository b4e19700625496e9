"""Parameters of a script that have memory in common: a merge must not come to it twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks_kit import process_group
from script_kit import TARGET, Played, committing, silent
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from node.script.parameters import named_parameters
from node.trainer.channel import Snapshot, StepDone
from protocols.errors import OperatorError


class Pair(nn.Module):
    def __init__(self, one: Tensor, other: Tensor) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(one), nn.Parameter(other)


def refused(model: nn.Module) -> str:
    """Why, or nothing."""
    try:
        named_parameters(model)
    except OperatorError as error:
        return f"{error.code}: {error.what}"
    return ""


FLAT = torch.arange(16.0)
SQUARE = FLAT.view(4, 4)
COMMON = "E204: the parameters one and other have memory in common"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (SQUARE, SQUARE),
        (SQUARE, SQUARE.t()),
        (FLAT[:9], FLAT[8:]),
        (SQUARE[:, :3], SQUARE[:, 2:]),
        (SQUARE[:, 1:3], SQUARE[1]),
        (torch.from_numpy(FLAT.numpy()), FLAT),  # two storages
    ],
)
def test_parameters_that_have_memory_in_common_are_refused(one: Tensor, other: Tensor) -> None:
    assert refused(Pair(one, other)) == COMMON
    assert refused(Pair(one, other.bfloat16())) == ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (FLAT[:8], FLAT[8:]),
        (FLAT[8:], FLAT[:8].view(2, 4)),
        (SQUARE[:, :2], SQUARE[:, 2:]),
        (FLAT[::2], FLAT[1::2]),
        (FLAT[:0], FLAT),
        (torch.empty(4, device="meta"), torch.empty(4, device="meta")),
    ],
)
def test_views_of_one_buffer_that_lie_side_by_side_take_part(one: Tensor, other: Tensor) -> None:
    """So some optimizers and wrappers lay all parameters."""
    assert refused(Pair(one, other)) == ""


def test_what_is_frozen_may_have_the_memory_of_what_trains() -> None:
    model = Pair(FLAT, FLAT)
    model.other.requires_grad_(False)
    assert refused(model) == ""


def test_parts_of_sharded_parameters_are_compared_by_where_they_are(tmp_path: Path) -> None:
    with process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1):
        mesh = init_device_mesh("cpu", (1,))
        one = distribute_tensor(SQUARE, mesh, [Shard(0)])
        assert refused(Pair(one, one.clone())) == ""
        assert refused(Pair(one, one.detach())) == COMMON


class Tied(nn.Module):
    """Two layers whose weights are parameters of their own."""

    def __init__(self, wide: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(wide, wide), nn.Linear(wide, wide)
        self.last = nn.Linear(wide, out)

    def forward(self, given: Tensor) -> Tensor:
        last: Tensor = self.last(self.second(self.first(given)))
        return last


def test_weights_that_are_tied_after_joining_are_told_of_at_the_next_step() -> None:
    """Else what others merge would come to them twice in each round."""
    played = Played(committing, model=Tied)
    assert played.train(2)
    played.model.second.weight.data = played.model.first.weight.data
    with pytest.raises(OperatorError, match="have memory in common") as caught:
        played.train()
    assert caught.value.code == "E204"
    assert "first.weight and second.weight" in caught.value.what
    assert len(played.script.of(StepDone)) == 2


def test_parameters_that_only_move_go_on() -> None:
    played = Played(silent, model=Tied)
    played.model.second.weight.data = played.model.second.weight.data.clone()
    assert played.train(TARGET)
    assert len(played.script.of(Snapshot)) == 1
