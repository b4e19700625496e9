"""What stages of a pipeline are told about what comes and goes; torch 2.11 holds them to it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from ranks_kit import fake_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion

from bootstrap.manifest import Model
from node.trainer import pipeline
from node.trainer.dims import ParallelDims
from node.trainer.model import Decoder
from node.trainer.parallel import Ranks

CPU = torch.device("cpu")
ROWS, TOKENS, WIDTH, VOCABULARY = 4, 16, 8, 256


@pytest.fixture(autouse=True)
def _four_ranks() -> Iterator[None]:
    with fake_ranks(4):
        yield


@pytest.mark.parametrize("number", [0, 1])
def test_where_tp_cuts_sequences_logits_are_still_of_all_tokens(
    monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    made: list[dict[str, Any]] = []
    stepped: list[torch.Tensor] = []

    class Stage:
        def __init__(self, *args: Any, **told: Any) -> None:
            made.append(told)

    class Schedule:
        def __init__(self, *args: Any, **told: Any) -> None:
            pass

        def step(self, *tokens: torch.Tensor, **given: Any) -> None:
            stepped.extend(tokens)

    monkeypatch.setattr(pipeline, "PipelineStage", Stage)
    monkeypatch.setattr(pipeline, "Schedule1F1B", Schedule)
    dims = ParallelDims(pp=2, tp=2)
    mesh = init_device_mesh("cpu", tuple(dims.axes.values()), mesh_dim_names=tuple(dims.axes))
    model = Model(
        d_model=WIDTH, n_layers=2, n_heads=2, n_kv_heads=1, d_ff=16, max_seq_len=TOKENS
    ).model_copy(update={"vocab_size": VOCABULARY})
    part = pipeline.cut(Decoder(model), number, 2)
    way = pipeline.Pipeline({number: part}, Ranks(0, 4, CPU, mesh, dims), TOKENS // 2)
    windows = torch.zeros(ROWS, TOKENS + 1, dtype=torch.int64)
    way.step(windows[:, :-1], windows[:, 1:], 2, lambda logits, targets: logits.sum())
    (told,) = made
    hidden, rows = (TOKENS // 2, WIDTH), ROWS // 2
    assert told["input_args"].shape == ((rows, TOKENS) if number == 0 else (rows, *hidden))
    assert told["output_args"].shape == (rows, *((TOKENS, VOCABULARY) if number else hidden))
    assert [tokens.is_contiguous() for tokens in stepped] == [True] * (number == 0)


@pytest.mark.parametrize(
    ("version", "device", "runs"),
    [("2.11.0", "cpu", False), ("2.11.0", "cuda", True), ("2.12.1+cpu", "cpu", True)],
)
def test_a_schedule_that_gloo_cannot_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, device: str, runs: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    check = partial(
        pipeline.check_schedule, ParallelDims(pp=2, schedule="zbv"), torch.device(device)
    )
    if runs:
        check()
    else:
        with pytest.raises(ValueError, match=r"zbv on CPUs needs torch 2\.12"):
            check()
