"""``node.join`` once more in one process, as in a notebook; the node is played."""

from __future__ import annotations

import gc
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from node.script.joining import join
from node.script.session import Joined
from protocols.errors import OperatorError

Join = Callable[[nn.Module, Path], Joined]


@pytest.fixture
def join_played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Joins with a node that lets everybody in at once, and only listens."""
    ends: list[socket.socket] = []

    def start(*_: object) -> tuple[None, socket.socket]:
        ours, theirs = socket.socketpair()
        ends.extend((ours, theirs))
        return None, ours

    monkeypatch.setattr("node.script.joining._start_node", start)
    monkeypatch.setattr(Joined, "begin", lambda *_: None)
    yield lambda model, place: join(model, torch.optim.SGD(model.parameters()), dir=place)
    for end in ends:
        end.close()


def test_two_islands_do_not_move_the_same_parameters(join_played: Join, tmp_path: Path) -> None:
    """Each would take what the other merges for its own work."""
    model = nn.Linear(4, 3)
    island = join_played(model, tmp_path)
    with pytest.raises(OperatorError, match="another island of this script trains") as caught:
        join_played(nn.Sequential(model), tmp_path / "other")
    assert caught.value.code == "E204"
    island.abandon()
    join_played(model, tmp_path / "other").abandon()


def test_a_cell_that_is_run_again_is_told_to_leave_first(join_played: Join, tmp_path: Path) -> None:
    """With a new model: the old island is there until the new one takes its name."""
    island = join_played(nn.Linear(4, 3), tmp_path)
    with pytest.raises(OperatorError, match="another island of this script runs in") as caught:
        join_played(nn.Linear(4, 3), tmp_path)
    assert caught.value.code == "E105"
    assert "leave()" in caught.value.fix
    del island, caught
    gc.collect()
    join_played(nn.Linear(4, 3), tmp_path).abandon()
