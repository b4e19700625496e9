"""Files of the steps to come are fetched before they are read, and nothing depends on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from data_kit import Server, folder, serving

from node.data.ahead import Ahead, ReadPosition
from node.data.remote import Folder, FolderTokens
from node.trainer.data import TrainingData
from node.trainer.sampler import TOGETHER, Sampler, _several
from protocols.errors import OperatorError
from protocols.files import DRAFT, new_draft

PATIENCE_S = 30.0
Served = tuple[Server, str, Path]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = folder(tmp_path / "www" / "data", shard_tokens=20_000)
    with serving(tmp_path / "www") as server:
        yield server, f"{server.url}/data", made


def far(url: str, cache: Path, size: int = 10**9, steps: int = 4) -> TrainingData:
    tokens = FolderTokens(Folder(url, cache, size))
    sampler = Sampler(len(tokens), 32, 4, seed=0, reserved=64, pool=64)
    return TrainingData(tokens, sampler, None, Ahead(tokens, sampler, steps))


def caught_up(data: TrainingData) -> None:
    assert data.ahead is not None
    assert data.ahead.wait(PATIENCE_S)


def test_the_next_steps_are_here_before_they_are_read(served: Served, tmp_path: Path) -> None:
    server, url, made = served
    data = far(url, tmp_path / "cache")
    near = TrainingData(FolderTokens(Folder(str(made))), data.sampler)
    for round_ in (7, 8):  # the next round's first steps were seen coming in the last one
        for step in range(4):
            before = len(server.asked)
            found = data.batch(round_, 0, 1, step)
            if (round_, step) != (7, 0):
                assert len(server.asked) == before, (round_, step)
            assert torch.equal(found[0], near.batch(round_, 0, 1, step)[0])
            caught_up(data)


def test_windows_to_come_are_computed_once_for_several_steps(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, compute = [], Sampler.compute

    def counted(self: Sampler, round: int, slot: int, slots: int, rows: range) -> Any:
        computed.append(rows)
        return compute(self, round, slot, slots, rows)

    monkeypatch.setattr(Sampler, "compute", counted)
    _several.cache_clear()  # of what other tests have read by an equal sampler
    _, url, _ = served
    data = far(url, tmp_path / "cache")
    for step in range(2 * TOGETHER):
        data.batch(0, 0, 1, step)
        caught_up(data)
    # by the trainer once, by the thread what is left of these, four more, and four of a round
    assert len(computed) == 2 * (1 + 2 + 1)


def test_no_more_than_half_of_the_cache_is_filled_ahead(served: Served, tmp_path: Path) -> None:
    server, url, _ = served
    largest = max(shard.tokens for shard in Folder(url).index.shards)
    data = far(url, tmp_path / "cache", 4 * largest, steps=1000)
    assert data.ahead is not None
    data.ahead.reading(ReadPosition(0, 0, 1, 0))
    caught_up(data)
    assert 1 <= sum(name.endswith(".bin") for name in server.asked) <= 2 * largest // 20_000 + 1
    files = [file for file in (tmp_path / "cache").iterdir() if file.name[0] != "."]
    assert sum(file.stat().st_size for file in files) <= 2 * largest


def test_what_fails_ahead_is_told_by_the_read(served: Served, tmp_path: Path) -> None:
    server, url, _ = served
    data = far(url, tmp_path / "cache")
    for shard in Folder(url).index.shards:
        server.spoil[shard.name] = 99
    assert data.ahead is not None
    data.ahead.reading(ReadPosition(0, 0, 1, 0))
    caught_up(data)
    with pytest.raises(OperatorError, match="another hash"):
        data.batch(0, 0, 1, 1)


def test_a_draft_that_somebody_left_goes(served: Served, tmp_path: Path) -> None:
    _, url, _ = served
    cache = tmp_path / "cache"
    cache.mkdir()
    left = cache / f"{DRAFT}left"
    left.write_bytes(b"x")
    handle, written = new_draft(cache)
    there = Folder(url, cache)
    there.tokens(there.index.shards[0])
    assert not left.exists()
    assert Path(written).exists(), "somebody is at it"
    os.close(handle)
