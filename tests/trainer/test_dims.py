"""Layouts: what is said once, what divides what, and what is picked for a machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from bootstrap.manifest import Data, Manifest, Model
from node.config import resolve
from node.island.settings import IslandSettings
from node.trainer.context import positions
from node.trainer.dims import ParallelDims, choose
from node.trainer.model_moe import balance_loss
from node.trainer.pipeline import rank_of_stage
from node.trainer.settings import TrainerSettings
from protocols.errors import OperatorError

MODEL = Model(d_model=64, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=176)
MOE = Model(d_model=64, n_layers=4, n_heads=8, n_kv_heads=4, d_ff=176, experts=8)
DATA = Data(seq_len=128, batch_size=8)
GIB = 2**30


@pytest.mark.parametrize(
    ("sizes", "model", "message"),
    [
        ({"tp": 3}, MODEL, "--tp 3 does not divide n_heads 8"),
        ({"tp": 8}, MODEL, "--tp 8 does not divide n_kv_heads 4"),
        ({"pp": 8}, MODEL, "--pp 8 with --schedule 1f1b makes 8 stages, the model has 4 layers"),
        ({"pp": 4, "schedule": "zbv"}, MODEL, "makes 8 stages"),
        (
            {"pp": 2, "dp_shard": 2, "schedule": "zbv"},
            MODEL,
            "--schedule zbv does not go with pp=2",
        ),
        ({"cp": 8}, MODEL, "--attention ulysses does not divide n_kv_heads 4; use --attention"),
        ({"cp": 3, "attention": "ring"}, MODEL, "--cp 3 does not divide seq_len 128 into 6"),
        ({"dp_shard": 16}, MODEL, "more than the 8 sequences of an inner step"),
        ({"pp": 2, "dp_shard": 8}, MODEL, "--pp 2 times 8 data ranks does not divide the 8"),
        ({"ep": 2, "dp_shard": 2}, MODEL, "--ep 2: the run's model has no experts"),
        ({"ep": 4, "dp_shard": 2}, MOE, "--ep 4 does not divide --dp-shard 2"),
        ({"ep": 3, "dp_shard": 3}, MOE, "--ep 3 does not divide experts 8"),
    ],
)
def test_what_does_not_fit_is_named_by_its_flag(
    sizes: dict[str, Any], model: Model, message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        ParallelDims(**sizes).check(model, DATA)


def test_documents_that_are_apart_go_with_every_axis() -> None:
    apart = MODEL.model_copy(update={"attention": "document"})
    for sizes in ({"tp": 2, "dp_shard": 2}, {"cp": 2}, {"cp": 2, "attention": "ring"}, {"pp": 2}):
        ParallelDims(**sizes).check(apart, DATA)


def test_a_layout_has_a_name_that_makes_it_again() -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=4, ep=2, pp=2)
    assert str(dims) == "pp=2,ddp=2,fsdp=4,ep=2"
    assert dims.size == 16
    assert (dims.data, dims.reduced, dims.stages) == (8, 8, 2)
    assert list(dims.axes.values()) == [2, 2, 2, 2, 1, 1]
    again, why = IslandSettings(layout=str(dims)).dims(
        16, 1, GIB, 0, MOE, Data(seq_len=128, batch_size=16)
    )
    assert (again, why) == (dims, "")
    assert str(ParallelDims()) == "single"


@pytest.mark.parametrize(
    ("given", "devices", "ranks"),
    [
        ({}, 0, 1),
        ({}, 8, 8),
        ({"nproc": 4}, 0, 4),
        ({"layout": "fsdp=2,tp=2"}, 0, 4),
        ({"layout": "single"}, 8, 1),
        ({"tp": 2}, 0, 2),
        ({"tp": 2}, 8, 8),  # fsdp takes the rest
        ({"dp_shard": 4, "ep": 2}, 0, 4),
        ({"layout": "auto", "nproc": 4}, 0, 4),
    ],
)
def test_how_many_ranks_there_are(given: dict[str, Any], devices: int, ranks: int) -> None:
    assert IslandSettings(**given).ranks_wanted(devices) == ranks


def test_ranks_that_the_layout_leaves_idle() -> None:
    with pytest.raises(ValueError, match=r"4 ranks \(fsdp=2,tp=2\) does not fill 8 ranks"):
        IslandSettings(layout="fsdp=2,tp=2").ranks_wanted(8)
    with pytest.raises(ValueError, match=r"does not fill 3 ranks \(--nproc 3\)"):
        IslandSettings(nproc=3, tp=2).ranks_wanted(0)


@pytest.mark.parametrize("layout", ["tp", "tp=0", "tp=two", "fsdp=2,zp=2", "tp=2,tp=2", "Auto"])
def test_a_layout_that_is_none(layout: str) -> None:
    with pytest.raises(ValidationError, match="layout"):
        IslandSettings(layout=layout)


def test_a_size_is_said_once() -> None:
    with pytest.raises(ValidationError, match="--layout tp=2 leaves no room for --pp"):
        IslandSettings(layout="tp=2", pp=2)


def test_the_section_of_a_file(tmp_path: Path) -> None:
    """``[island]`` groups keys that are settings like all others."""
    file = tmp_path / "node.toml"
    file.write_text('name = "a"\n[island]\ntp = 2\nrecompute = "full"\n')
    config = resolve({"tp": "4"}, {"ATOLL_PP": "2"}, file)
    assert (config.tp, config.pp, config.recompute, config.name) == (4, 2, "full", "a")
    assert (config.source("tp"), config.source("pp")) == ("--tp", "ATOLL_PP")
    assert config.source("recompute") == str(file)
    file.write_text("[island]\nrecompile = true\n")
    with pytest.raises(OperatorError, match=r"unknown setting island\.recompile") as caught:
        resolve({}, {}, file)
    assert "did you mean compile?" in caught.value.why


def test_the_rest_is_sharded() -> None:
    dims, _ = IslandSettings(tp=2, zero=2).dims(8, 1, GIB, 0, MODEL, DATA)
    assert (dims.tp, dims.dp_shard, dims.zero) == (2, 4, 2)


@pytest.mark.parametrize(
    ("ranks", "hosts", "parameters", "expected"),
    [
        (1, 1, 10**6, "single"),
        (4, 1, 10**6, "ddp=4"),
        (4, 1, 10**9, "fsdp=4"),
        (8, 2, 10**9, "ddp=2,fsdp=4"),  # within a host
        (8, 2, 2 * 10**9, "fsdp=8"),
        (16, 1, 10**6, "ddp=8,tp=2"),  # 8 sequences a step
        (16, 1, 10**9, "fsdp=8,tp=2"),
    ],
)
def test_auto_picks_by_memory_and_batch(
    ranks: int, hosts: int, parameters: int, expected: str
) -> None:
    dims, why = choose(ranks, hosts, parameters, 8 * GIB, MODEL, DATA)
    assert str(dims) == expected
    assert dims.size == ranks
    assert why.startswith(expected)
    assert "8.0 GiB a device" in why
    dims.check(MODEL, DATA)


def test_auto_tells_of_what_does_not_fit_a_device_and_takes_shards_where_it_is_offloaded() -> None:
    def auto(ranks: int, *, offload: bool) -> tuple[ParallelDims, str]:
        settings = IslandSettings(layout="auto", offload=offload)
        return settings.dims(ranks, 1, 8 * GIB, 10**10, MODEL, DATA)

    with pytest.raises(ValueError, match=r"does not fit \(149.0 GiB .*; on GPUs --offload keeps"):
        auto(2, offload=False)
    dims, why = auto(2, offload=True)
    assert str(dims) == "fsdp=2"
    assert "in the host's memory" in why
    assert "too much: on GPUs --offload keeps" in auto(1, offload=False)[1]
    assert "too much" not in auto(1, offload=True)[1]


def test_auto_goes_with_the_other_flags() -> None:
    few = Model(d_model=56, n_layers=4, n_heads=7, n_kv_heads=7, d_ff=70)
    two = Data(seq_len=128, batch_size=2)
    dims, _ = IslandSettings(layout="auto", zero=1).dims(4, 1, 8 * GIB, 10**6, few, two)
    assert (dims.cp, dims.attention, dims.zero) == (2, "ring", 1)


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [(8, 8, ("ddp=2,cp=4", "ulysses")), (1, 4, ("ddp=2,cp=2", "ring"))],
)
def test_auto_asks_a_model_of_transformers_for_its_key_heads(
    heads: int, ranks: int, expected: tuple[str, str]
) -> None:
    """They are in its own configuration, and not in the manifest's fields of our model."""
    pytest.importorskip("transformers")
    from hf_kit import MIXTRAL

    from node.trainer.hf import model_of

    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": heads}
    model, data = model_of(MIXTRAL | sizes), Data(seq_len=64, batch_size=2)
    settings = IslandSettings(layout="auto", nproc=ranks)
    dims, _ = settings.dims(ranks, 1, 8 * GIB, 10**6, model, data)  # it has no plan for tp
    assert (str(dims), dims.attention) == expected


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        ("offload", {"offload": True}),
        ("compile", {"compile": True}),
        ("recompute", {"recompute": "full"}),
    ],
)
def test_a_backward_that_is_split_is_refused_with_what_hooks_into_it(
    flag: str, given: dict[str, Any]
) -> None:
    split = IslandSettings.model_validate({"pp": 2, "schedule": "zbv"} | given)
    with pytest.raises(ValueError, match=f"--{flag} does not go with .* zbv.*; use --schedule"):
        split.dims(2, 1, 8 * GIB, 10**6, MODEL, DATA)
    whole = split.model_copy(update={"schedule": "1f1b"})
    assert whole.dims(2, 1, 8 * GIB, 10**6, MODEL, DATA)[0].pp == 2


def test_auto_gives_experts_their_own_axis() -> None:
    dims, _ = choose(4, 1, 10**6, 8 * GIB, MOE, DATA)
    assert (dims.dp_shard, dims.ep) == (4, 4)


def test_auto_says_when_nothing_fits() -> None:
    with pytest.raises(ValueError, match="--layout auto finds none for 4 ranks"):
        choose(4, 1, 10**12, 8 * GIB, MODEL, DATA)


@pytest.mark.parametrize("kind", ["ulysses", "ring"])
def test_each_token_is_somewhere_once(kind: Any) -> None:
    parts = [positions(24, rank, 4, kind).tolist() for rank in range(4)]
    assert sorted(token for part in parts for token in part) == list(range(24))
    assert {len(part) for part in parts} == {6}
    if kind == "ring":  # as many pairs of query and key for each
        assert len({sum(part) for part in parts}) == 1


def test_stages_of_a_v() -> None:
    dims = ParallelDims(pp=3, schedule="zbv")
    assert [rank_of_stage(dims, stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [rank_of_stage(ParallelDims(pp=3, schedule="interleaved"), s) for s in range(6)] == [
        0, 1, 2, 0, 1, 2,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("dims", "micro_batch", "halved"),
    [
        (ParallelDims(), 0, 8),
        (ParallelDims(dp_shard=4), 0, 2),
        (ParallelDims(dp_shard=4), 16, 2),  # more than a rank has
        (ParallelDims(dp_shard=4, tp=2), 2, 1),
        (ParallelDims(dp_shard=16), 0, 1),
        (None, 0, 4),  # two ranks, sharded
        (ParallelDims(pp=2), 0, 2),  # four micro-batches without being asked
        (ParallelDims(pp=2), 16, 2),
        (ParallelDims(pp=2, dp_shard=2), 1, 1),
    ],
)
def test_what_is_left_of_a_micro_batch_when_memory_runs_out(
    dims: ParallelDims | None, micro_batch: int, halved: int
) -> None:
    settings = TrainerSettings(
        manifest=Manifest(data=Data(batch_size=16)),
        tokens="tokens",
        ranks=2 if dims is None else dims.size,
        dims=dims,
        micro_batch=micro_batch,
    )
    assert settings.halved == halved


def test_balance_is_one_where_all_experts_work_alike() -> None:
    import torch

    scores = torch.full((1, 4, 4), 0.25)
    even = torch.tensor([[[0, 1], [2, 3], [0, 1], [2, 3]]])
    torch.testing.assert_close(balance_loss(scores, even), torch.ones(1))
    skewed = torch.tensor([0.7, 0.1, 0.1, 0.1]).expand(1, 4, 4)
    assert balance_loss(skewed, torch.zeros(1, 4, 1, dtype=torch.int64)) > 2
