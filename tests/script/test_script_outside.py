"""Parameters that a script's optimizer trains and that are not in the model that joins."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from script_kit import Parting
from torch import Tensor, nn

from node.script.joining import join
from node.script.session import Joined

Told = Callable[[nn.Module, Any], list[str]]


@pytest.fixture
def told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> Iterator[Told]:
    """What a join with a model and optimizers warns of; the node is played."""
    nodes: list[Parting] = []

    def start(*_: object) -> tuple[None, socket.socket]:
        nodes.append(Parting())
        return None, nodes[-1].ours

    def joins(model: nn.Module, optimizer: Any) -> list[str]:
        join(model, optimizer, dir=tmp_path).abandon()
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    monkeypatch.setattr("node.script.joining._start_node", start)
    monkeypatch.setattr(Joined, "begin", lambda *_: None)
    yield joins
    for node in nodes:
        node.close()


def both(*modules: nn.Module) -> list[Tensor]:
    return [parameter for module in modules for parameter in module.parameters()]


def test_a_layer_of_the_loss_function_is_told_of(told: Told) -> None:
    """It would go another way on each island, and be in no checkpoint."""
    model, head = nn.Linear(4, 3), nn.Linear(3, 2)
    (said,) = told(model, torch.optim.SGD(both(model, head)))
    assert "also trains 2 parameters that are not in the model ((2, 3), (2,)): " in said


def test_of_many_some_are_listed(told: Told) -> None:
    model, heads = nn.Linear(4, 3), nn.ModuleList(nn.Linear(3, 2) for _ in range(4))
    given = [torch.optim.SGD(model.parameters()), torch.optim.AdamW(heads.parameters())]
    (said,) = told(model, given)
    assert (
        "trains 8 parameters that are not in the model ((2, 3), (2,), (2, 3), (2,), (2, 3), "
        in said
    )
    assert ", …): " in said


def test_nothing_is_said_where_all_are_in_the_model(told: Told) -> None:
    model, head, frozen = nn.Linear(4, 3), nn.Linear(3, 2), nn.Linear(2, 2)
    frozen.requires_grad_(False)
    optimizer = torch.optim.SGD(both(model, head, frozen))
    assert told(nn.ModuleList([model, head]), optimizer) == []
    assert told(nn.DataParallel(nn.Sequential(model, head)), optimizer) == []


def test_what_has_no_elements_or_no_shape_yet_is_not_told_of(told: Told) -> None:
    """A lazy head gets its shape with the first batch; an empty one may be the model's own."""
    model, lazy = nn.Linear(4, 3), nn.LazyLinear(2)
    empty = nn.Parameter(torch.zeros(0))
    assert told(model, torch.optim.SGD([*both(model, lazy), empty])) == []
