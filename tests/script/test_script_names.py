"""The names under which a script's parameters take part, whatever wraps its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_kit import process_group
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from node.script.frozen import comparable
from node.script.parameters import named_parameters
from protocols.errors import OperatorError

OWN = [
    "module.body.weight",
    "module.body.bias",
    "module.head.weight",
    "module.head.bias",
    "head.weight",
    "head.bias",
]


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 2), nn.Linear(2, 1)


class TwoHeads(nn.Module):
    """A model that calls a part of it "module", and has more of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.head = Backbone(), nn.Linear(2, 1)


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def inside_compiled(model: nn.Module) -> nn.Module:
    model.module.body = compiled(model.module.body)
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    model.module = checkpoint_wrapper(model.module)
    return compiled(checkpoint_wrapper(model))  # type: ignore[no-any-return]


WAYS = {
    "bare": lambda model: model,
    "DataParallel": nn.DataParallel,
    "compiled": compiled,
    "compiled within": inside_compiled,
    "checkpointed": checkpointed,
    "checkpointed at the top": lambda model: checkpoint_wrapper(inside_compiled(model)),
    "compiled DataParallel": lambda model: compiled(nn.DataParallel(model)),
    "DataParallel of compiled": lambda model: nn.DataParallel(compiled(model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_part_that_is_called_module_keeps_its_name(way: str) -> None:
    """Else two parameters have one name, and one of them would never be merged."""
    model = TwoHeads()
    wrapped = WAYS[way](model)
    found = named_parameters(wrapped)
    assert list(found) == OWN
    assert [id(p) for p in found.values()] == [id(p) for p in model.parameters()]
    wrapped.requires_grad_(requires_grad=False)
    assert [name for name, _ in comparable(wrapped)] == OWN


@pytest.mark.filterwarnings("ignore")  # of Lightning's own
@pytest.mark.parametrize("way", ["bare", "compiled within", "DataParallel"])
def test_so_it_does_where_fabric_has_set_it_up(way: str) -> None:
    """Else a script with Fabric and one without could not train one model."""
    lightning = pytest.importorskip("lightning")
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    wrapped = fabric.setup_module(WAYS[way](TwoHeads()))
    assert list(named_parameters(wrapped)) == OWN


def test_so_it_does_on_several_ranks(tmp_path: Path) -> None:
    model = TwoHeads()
    with process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1):
        for wrapped in (DistributedDataParallel(model), DistributedDataParallel(compiled(model))):
            assert list(named_parameters(wrapped)) == OWN


def test_tied_parameters_have_the_first_of_their_names() -> None:
    model = TwoHeads()
    model.head.weight = model.module.head.weight
    assert list(named_parameters(nn.DataParallel(model))) == [*OWN[:4], OWN[5]]


def test_where_two_would_have_one_name_it_is_refused() -> None:
    """As a wrapper with a tensor of its own, beside one in the model that is called the same."""
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    model.register_buffer("weight", torch.ones(2, 2, dtype=torch.int32))
    model.requires_grad_(requires_grad=False)
    with pytest.raises(OperatorError, match="would both be called weight") as caught:
        list(comparable(model))
    assert caught.value.code == "E204"
    assert "module.weight and weight" in caught.value.why
