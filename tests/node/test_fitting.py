"""A micro-batch that fitted into memory at one start, for the next one of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer_kit import tiny_manifest, tiny_settings

from bootstrap.manifest import Manifest
from node.hosts.crew import Crew
from node.island.events import ways_to_less
from node.island.fitting import LAYOUTS, Fitting
from node.trainer.dims import ParallelDims

MEMORY = 80 << 30


def noted(directory: Path, micro_batch: int = 1, *, asked: int = 0, **given: Any) -> Path:
    """A node that has taken a step with so many sequences at once."""
    path = directory / "micro-batch.json"
    Fitting(path, asked, MEMORY).stepped(tiny_settings(directory, **given), micro_batch)
    return path


def known(path: Path, *, asked: int = 0, memory: int = MEMORY, **given: Any) -> int:
    """What a node begins with that is started there."""
    return Fitting(path, asked, memory).known(tiny_settings(path.parent, **given))


def other(section: str, **changes: Any) -> Manifest:
    manifest = tiny_manifest()
    part = getattr(manifest, section).model_copy(update=changes)
    return manifest.model_copy(update={section: part})


def test_what_fitted_is_known_at_the_next_start(tmp_path: Path) -> None:
    path = noted(tmp_path)
    assert known(path) == 1
    assert known(path, manifest=other("inner", lr=0.5)) == 1
    assert known(path, threads=3) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"manifest": other("model", d_ff=48)},
        {"manifest": other("data", seq_len=8)},
        {"manifest": other("data", batch_size=8)},
        {"manifest": other("inner", optimizer="muon")},
        {"asked": 3},
        {"memory": MEMORY // 2},
        {"ranks": 2},
        {"ranks": 2, "dims": ParallelDims(dp_replicate=2)},
        {"device": "cuda"},
        {"bf16": False},
        {"recompute": "full"},
        {"offload": True},
        {"compile": True},
    ],
)
def test_it_is_forgotten_where_anything_differs_that_memory_depends_on(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    assert known(noted(tmp_path), **change) == 0


def test_it_is_forgotten_with_another_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = noted(tmp_path)
    monkeypatch.setattr(torch, "__version__", "99.0")
    assert known(path) == 0


@pytest.mark.parametrize(("asked", "took"), [(0, 4), (3, 3), (9, 9)])
def test_nothing_is_noted_where_all_fitted(tmp_path: Path, asked: int, took: int) -> None:
    assert not noted(tmp_path, took, asked=asked).exists()


def test_ranks_that_run_short_once_more_leave_the_smaller_one(tmp_path: Path) -> None:
    path, settings = noted(tmp_path, 2), tiny_settings(tmp_path)
    again = Fitting(path, 0, MEMORY)
    assert again.known(settings) == 2
    path.unlink()
    again.stepped(settings, 2)
    assert not path.exists()  # it is written once
    again.stepped(settings, 1)
    assert known(path) == 1


def test_each_layout_has_a_note_of_its_own_and_the_newest_stay(tmp_path: Path) -> None:
    for ranks in range(1, LAYOUTS + 2):
        noted(tmp_path, 2, ranks=ranks)
        path = noted(tmp_path, 1, ranks=ranks)
    assert [known(path, ranks=ranks) for ranks in range(1, LAYOUTS + 2)] == [0] + [1] * LAYOUTS


def test_an_island_with_fewer_hosts_begins_with_what_fitted_on_these(tmp_path: Path) -> None:
    path = noted(tmp_path, 2, ranks=2, dims=ParallelDims(dp_shard=2), hosts=2)
    said: list[str] = []
    hub: Any = SimpleNamespace(say=said.append)
    fitting = Fitting(path, 0, MEMORY)
    full = tiny_settings(tmp_path, ranks=3, dims=ParallelDims(dp_shard=3), hosts=3)
    assert fitting.known(full) == 0
    crew = Crew(hub, 1, lambda ranks, hosts: ParallelDims(dp_shard=ranks), fitting)
    host: Any = SimpleNamespace(ranks=1)
    fewer = crew.fit(full, [host])
    assert (fewer.hosts, fewer.micro_batch) == (2, 2)
    assert "2 sequences at a time: memory was short for more" in said[-1]
    short = fewer.model_copy(update={"micro_batch": 1})
    assert crew.fit(short, [host]).micro_batch == 1  # it has run short since
    fitting.stepped(short, 1)
    assert crew.fit(full, [host]).micro_batch == 1
    assert crew.fit(full, [host, host]).micro_batch == 0


@pytest.mark.parametrize("asked", [0, 3])
def test_an_island_whose_hosts_are_back_takes_as_many_as_before(tmp_path: Path, asked: int) -> None:
    """What was too much for fewer hosts says nothing of all of them."""
    fewer = {"ranks": 2, "dims": ParallelDims(dp_shard=2), "hosts": 2}
    fitting = Fitting(noted(tmp_path, 1, asked=asked, **fewer), asked, MEMORY)
    hub: Any = SimpleNamespace(say=lambda text: None)
    host: Any = SimpleNamespace(ranks=1)
    crew = Crew(hub, 1, lambda ranks, hosts: ParallelDims(dp_shard=ranks), fitting)
    dims = ParallelDims(dp_shard=3)
    full = tiny_settings(tmp_path, ranks=3, dims=dims, hosts=3, micro_batch=asked)
    short = crew.fit(full, [host])
    assert short.micro_batch == 1
    back = crew.fit(short, [host, host])
    assert back.micro_batch == asked
    fitting.stepped(back, back.micro_batch or 4)
    assert fitting.known(full) == 0


def test_an_island_that_loses_a_host_keeps_what_its_memory_was_short_for(tmp_path: Path) -> None:
    fitting = Fitting(tmp_path / "file", 0, MEMORY)
    hub: Any = SimpleNamespace(say=lambda text: None)
    host: Any = SimpleNamespace(ranks=1)
    crew = Crew(hub, 1, lambda ranks, hosts: ParallelDims(dp_shard=ranks), fitting)
    dims = ParallelDims(dp_shard=3)
    short = tiny_settings(tmp_path, ranks=3, dims=dims, hosts=3, micro_batch=1)
    assert crew.fit(short, [host]).micro_batch == 1


@pytest.mark.parametrize("change", [{"micro_batch": 0}, {"micro_batch": 4}, {"more": 1}])
def test_a_note_that_nobody_made_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    path = noted(tmp_path)
    (note,) = json.loads(path.read_text())["notes"]
    path.write_text(json.dumps({"notes": [note]}))
    assert known(path) == 1
    path.write_text(json.dumps({"notes": [note | change]}))
    assert known(path) == 0
    path.write_text(json.dumps({"notes": [note] * (LAYOUTS + 1)}))
    assert known(path) == 0
    for text in ("", "[]", "{" * 10_000):
        path.write_text(text)
        assert known(path) == 0


def test_a_disk_that_takes_no_note_stops_nobody(tmp_path: Path) -> None:
    settings = tiny_settings(tmp_path)
    one = Fitting(tmp_path / "nowhere" / "file", 0, MEMORY)
    one.stepped(settings, 1)
    assert one.known(settings) == 0


@pytest.mark.parametrize(
    ("given", "named", "not_named"),
    [
        ({}, ["--recompute full,", "--nproc"], ["--offload", "ddp", "--zero", "--precision"]),
        ({"recompute": "full", "device": "cuda"}, ["--offload,"], ["--recompute"]),
        ({"offload": True, "device": "cuda", "bf16": False}, ["--precision"], ["--offload"]),
        (
            {"dims": ParallelDims(pp=2, schedule="zbv"), "device": "cuda"},
            ["--recompute full with --schedule interleaved", "--offload with --schedule"],
            [],
        ),
        ({"dims": ParallelDims(dp_replicate=2, dp_shard=2, zero=1)}, ["fsdp", "--zero 3"], []),
    ],
)
def test_what_to_do_is_what_the_layout_allows(
    tmp_path: Path, given: dict[str, Any], named: list[str], not_named: list[str]
) -> None:
    text = ways_to_less(tiny_settings(tmp_path, **given))
    assert all(each in text for each in named)
    assert not any(each in text for each in not_named)
