"""``node.join`` once more in one process, as in a notebook; the node is played."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from script_kit import Parting
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from node.script.joining import join
from node.script.session import Joined
from protocols.errors import OperatorError

Join = Callable[[nn.Module, Path], Joined]


@pytest.fixture
def join_played(monkeypatch: pytest.MonkeyPatch) -> Iterator[Join]:
    """Joins with a node that lets everybody in at once, and go."""
    nodes: list[Parting] = []

    def start(*_: object) -> tuple[None, socket.socket]:
        nodes.append(Parting())
        return None, nodes[-1].ours

    monkeypatch.setattr("node.script.joining._start_node", start)
    monkeypatch.setattr(Joined, "begin", lambda *_: None)
    yield lambda model, place: join(model, torch.optim.SGD(model.parameters()), dir=place)
    for node in nodes:
        node.close()


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


def held() -> int:
    """Descriptors of this process to the vectors of islands, mappings included."""
    gc.collect()
    count = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            count += "atoll-vectors" in os.readlink(entry)
    return count


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are looked up in /proc")
def test_an_island_that_is_over_keeps_no_memory(join_played: Join, tmp_path: Path) -> None:
    before = held()
    island = join_played(nn.Linear(4, 3), tmp_path)
    assert held() == before + 2
    island.abandon()
    assert set(island.outer_parameters()) == {"weight", "bias"}  # as long as somebody has it
    del island
    assert held() == before


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are looked up in /proc")
def test_a_join_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr("node.script.joining._start_node", fails)
    before, hooks = held(), len(_global_optimizer_post_hooks)
    model = nn.Linear(4, 3)
    with pytest.raises(BlockingIOError):
        join(model, torch.optim.SGD(model.parameters()), dir=tmp_path)
    assert held() == before
    assert len(_global_optimizer_post_hooks) == hooks


@pytest.mark.parametrize("where", ["argument", "variable"])
@pytest.mark.parametrize("role", ["server", "seed", "observer"])
def test_a_node_that_would_never_ask_a_script_to_train_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: str, where: str
) -> None:
    monkeypatch.setattr("node.script.joining._start_node", lambda *_: pytest.fail("started"))
    if where == "variable":
        monkeypatch.setenv("ATOLL_ROLE", role)
    settings: dict[str, Any] = {"role": role} if where == "argument" else {}
    model = nn.Linear(4, 3)
    with pytest.raises(OperatorError, match=f"joins as {role}") as caught:
        join(model, torch.optim.SGD(model.parameters()), dir=tmp_path, **settings)
    assert caught.value.code == "E204"
