"""What is frozen in a script's model: the same on all islands, however each of them holds it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from ranks_kit import fake_ranks, forked
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.two_tensor import TwoTensor

from bootstrap.manifest import MOST_MARKS, Manifest
from node.entry.differing import differences
from node.entry.own_model import layout_of
from node.script import frozen
from node.script.fingerprint import NOT_COMPARED, NOTHING, Fingerprint
from node.script.frozen import combined, fingerprint_of
from node.script.joining import _manifest, join
from node.trainer.layout import Layout
from node.trainer.parallel import Ranks
from protocols.errors import Malformed, OperatorError

KINDS = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float64,
    torch.complex64,
    torch.uint8,
    torch.int8,
    torch.int32,
)
ALONE = Ranks.alone(torch.device("cpu"))


def adapted(**base: Tensor) -> nn.Module:
    """A base of these tensors, and an adapter that trains."""
    model = nn.Module()
    model.base = nn.Module()
    for name, tensor in base.items():
        model.base.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
    model.adapter = nn.Linear(2, 2)
    return model


def printed(**base: Tensor) -> Fingerprint:
    return fingerprint_of(adapted(**base), ALONE)


def numbered(*shape: int) -> Tensor:
    """Another value at each place."""
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape) - 3.0


@pytest.mark.parametrize("shape", [(), (1,), (7,), (1, 5), (5, 1), (3, 4), (2, 1, 3, 2)])
def test_a_tensor_differs_from_all_that_are_changed_at_one_place(shape: tuple[int, ...]) -> None:
    whole = numbered(*shape)
    found = {printed(w=whole).digest}
    for at in range(whole.numel()):
        changed = whole.clone()
        changed.view(-1)[at] += 0.5
        found.add(printed(w=changed).digest)
    assert len(found) == 1 + whole.numel()
    assert printed(w=whole.clone()).digest in found


def test_values_count_at_their_places() -> None:
    whole = numbered(4, 4)
    others = [whole.T, whole.flip(0), whole[:, [1, 0, 2, 3]], whole.view(2, 8), whole.view(16)]
    assert len({printed(w=tensor).digest for tensor in (whole, *others)}) == 1 + len(others)
    assert printed(w=whole.T.contiguous()).digest == printed(w=whole.T).digest
    assert printed(w=whole, v=whole).digest != printed(v=whole, w=whole).digest


def test_however_many_elements_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"w": numbered(5, 9), "v": numbered(31), "u": numbered(2, 3, 7)}
    at_once = printed(**tensors)
    for tile in (1, 2, 10, 1000):
        monkeypatch.setattr(frozen, "TILE", tile)
        assert printed(**tensors) == at_once


def test_the_type_counts_where_it_changes_values() -> None:
    fine = torch.linspace(-1, 1, 34)
    coarse = fine.bfloat16()
    assert printed(w=coarse).digest == printed(w=coarse.float()).digest != printed(w=fine).digest
    half = fine.half()
    assert printed(w=half).digest == printed(w=half.float()).digest != printed(w=coarse).digest
    tiny = fine.to(torch.float8_e4m3fn)
    assert printed(w=tiny).digest == printed(w=tiny.bfloat16()).digest != printed(w=half).digest
    codes = torch.arange(34, dtype=torch.uint8)
    assert printed(w=codes).digest == printed(w=codes.int()).digest != printed(w=fine).digest
    assert printed(w=fine.double()).digest == printed(w=fine.double().clone()).digest
    assert printed(w=torch.view_as_complex(fine.view(17, 2))).digest


def bits(dtype: torch.dtype, *numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int16).view(dtype)


@pytest.mark.parametrize(
    ("dtype", "nan"), [(torch.bfloat16, 0x7FC1), (torch.float16, 0x7E01), (torch.float16, 0x7C01)]
)
def test_bits_that_are_no_number_are_compared_too(dtype: torch.dtype, nan: int) -> None:
    """As where codes of four bits are kept as bf16 or fp16, so that FSDP can shard them."""
    first, other = bits(dtype, nan, 0x7C00, nan + 1), bits(dtype, nan, 0x7C00, nan + 2)
    assert printed(w=first).digest == printed(w=first.clone()).digest != printed(w=other).digest


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KINDS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_gpu_reads_the_same(dtype: torch.dtype) -> None:
    """All bits that there are, which a processor may widen as it likes where they are no number."""
    random = torch.randint(0, 256, (2**20 + 8,), dtype=torch.uint8)
    random[: 2 * 2**16] = torch.arange(2**16).to(torch.uint16).view(torch.uint8)
    tensors = {"w": random.view(dtype), "v": random.view(dtype)[:120].view(3, -1).T}
    there = {name: tensor.cuda() for name, tensor in tensors.items()}
    found = fingerprint_of(adapted(**there), Ranks.alone(torch.device("cuda", 0)))
    assert found == printed(**tensors)


def test_a_tensor_made_of_others_is_what_they_are() -> None:
    """Such as torchao's, of codes and scales."""
    one, other = numbered(2, 2), numbered(2, 2) + 1
    found = fingerprint_of(adapted(w=TwoTensor(one, other)), ALONE)
    assert found.labels == ["base.w.a (float32)", "base.w.b (float32)"]
    same = fingerprint_of(adapted(w=TwoTensor(one.clone(), other.clone())), ALONE)
    assert found == same != fingerprint_of(adapted(w=TwoTensor(one, one)), ALONE)


def test_only_weights_count() -> None:
    """Parameters that require no gradient and quantized weights; no statistics, no caches."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(requires_grad=False)
    model[2].register_buffer("qweight", torch.ones(2, 2, dtype=torch.int32))
    model[2].register_buffer("queue", torch.ones(2, 2))
    model[2].register_buffer("mask", torch.ones(2, 2, dtype=torch.bool), persistent=False)
    model[2].register_buffer("pointer", torch.ones(1, dtype=torch.int64))
    names = ["0.weight (float32)", "0.bias (float32)", "2.qweight (int32)"]
    before = fingerprint_of(model, ALONE)
    assert before.labels == names
    model(numbered(4, 2)).sum().backward()
    assert fingerprint_of(model, ALONE) == before
    assert fingerprint_of(nn.DataParallel(model), ALONE) == before
    assert fingerprint_of(nn.Linear(2, 2), ALONE).digest == NOTHING


def unreadable(kind: str) -> nn.Module:
    if kind == "meta":
        return adapted(w=torch.ones(2, 2, device="meta"))
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 2))
    model[0].weight.requires_grad = False
    return model


@pytest.mark.parametrize("kind", ["meta", "lazy"])
def test_what_cannot_be_read_is_refused_by_name(kind: str) -> None:
    with pytest.raises(OperatorError, match="cannot be compared") as caught:
        fingerprint_of(unreadable(kind), ALONE)
    assert caught.value.code == "E204"
    assert {"meta": "base.w", "lazy": "0.weight"}[kind] in caught.value.what
    assert "compare_frozen=False" in caught.value.fix


# --- several ranks ----------------------------------------------------------------------------


def as_rank(rank: int, size: int, make: Callable[[], nn.Module]) -> dict[str, frozen.Part]:
    """What one of so many ranks has, which are played one after the other."""
    _clear_sharding_prop_cache()  # type: ignore[no-untyped-call]  # of the rank before
    with fake_ranks(size, rank):
        return {name: frozen.read(tensor, rank) for name, tensor in frozen.comparable(make())}


def cut(whole: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


SHAPES = {"w": (7, 6), "v": (5,), "u": (2, 9, 3), "t": (8, 1)}
CUTS: list[tuple[tuple[int, ...], list[Placement]]] = [
    ((4,), [Shard(0)]),
    ((4,), [Replicate()]),
    ((2, 2), [Replicate(), Shard(0)]),
    ((2, 2), [Shard(0), Replicate()]),
    ((2, 2), [Shard(0), Shard(0)]),
]


@pytest.mark.parametrize(("mesh", "placements"), CUTS)
def test_shards_are_together_what_the_whole_is(
    mesh: tuple[int, ...], placements: list[Placement]
) -> None:
    wholes = {name: numbered(*shape) for name, shape in SHAPES.items()}

    def sharded() -> nn.Module:
        there = init_device_mesh("cpu", mesh)
        return adapted(**{name: cut(whole, there, placements) for name, whole in wholes.items()})

    assert combined([as_rank(rank, 4, sharded) for rank in range(4)]) == printed(**wholes)


@pytest.mark.parametrize("dims", [(0, 1), (1, 0), (1, 2), (0, 0), (1, 1)])
def test_shards_along_several_dims_are_together_what_the_whole_is(dims: tuple[int, int]) -> None:
    """Of tensor parallelism, under FSDP2 where that cuts the rows."""
    whole = numbered(8, 9, 5)

    def sharded() -> nn.Module:
        there = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        if dims[0]:
            return adapted(w=cut(whole, there, [Shard(dims[0]), Shard(dims[1])]))
        model = adapted(w=cut(whole, there["tp"], [Shard(dims[1])]))
        return fully_shard(model, mesh=there["dp"])

    parts = [as_rank(rank, 4, sharded) for rank in range(4)]
    assert combined(parts) == printed(w=whole)
    assert combined(parts[:3]) != printed(w=whole)


def test_a_stage_on_a_mesh_of_its_own_counts_once() -> None:
    whole = numbered(4, 2)

    def sharded() -> nn.Module:
        mesh = DeviceMesh("cpu", [0, 1] if dist.get_rank() < 2 else [2, 3])
        return adapted(w=cut(whole, mesh, [Shard(0)]))

    assert combined([as_rank(rank, 4, sharded) for rank in range(4)]) == printed(w=whole)


def _compares(rank: int, directory: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{directory}/s", rank=rank, world_size=2)
    ranks = Ranks.met(torch.device("cpu"))
    whole = numbered(5, 3)
    model = adapted(w=whole.clone(), v=whole + 10 * rank)  # of copies that of rank 0 counts
    model.base.register_parameter(f"of{rank}", nn.Parameter(whole[:rank], requires_grad=False))
    model.experts = adapted(weight=cut(whole, init_device_mesh("cpu", (2,)), [Shard(0)]))
    assert fingerprint_of(adapted(), ranks).digest == NOTHING
    found = fingerprint_of(model, ranks)
    names = ["base.w", "base.v", "base.of0", "experts.base.weight", "base.of1"]
    assert found.labels == [f"{name} (float32)" for name in names]
    alone = adapted(w=whole, v=whole, of0=whole[:0])
    alone.experts = adapted(weight=whole)
    assert fingerprint_of(alone, ALONE).marks == found.marks[:-4]
    with pytest.raises(OperatorError, match=r"base\.w cannot be compared"):
        fingerprint_of(unreadable("meta") if rank else adapted(v=whole), ranks)
    ranks.all_true(True)  # gloo ends a process whose peer has gone before


def test_ranks_that_meet_have_one_fingerprint(tmp_path: Path) -> None:
    forked(_compares, 2, tmp_path)


# --- what others have ---------------------------------------------------------------------------

SCRIPT = {"layout": "ab" * 32, "parameters": 8}


def of_run(there: Fingerprint) -> Manifest:
    layout = Layout.of_module(adapted().adapter)
    return _manifest({}, layout, there)


def test_the_first_that_differs_is_named() -> None:
    here = printed(v=numbered(2), w=numbered(3), x=numbered(4))
    assert here.difference(of_run(here).script) == ""
    other = printed(v=numbered(2), w=numbered(3).bfloat16() + 1, x=numbered(4) + 1)
    script = of_run(other).script
    assert here.difference(script) == "the first that differs is base.w (float32)"
    fewer = of_run(printed(v=numbered(2), w=numbered(3))).script
    assert here.difference(fewer) == "2 tensors are frozen in the swarm, 3 here"
    assert here.difference(of_run(printed()).script) == "nothing is frozen in the swarm"
    assert printed().difference(script) == "nothing is frozen here"


def test_where_there_are_many_none_is_named() -> None:
    many = {f"w{number}": numbered(1) for number in range(MOST_MARKS + 1)}
    here, other = printed(**many), printed(**many | {"w5": numbered(1) + 1})
    assert here.marks == ""
    assert here.difference(of_run(other).script) == "names, shapes or values differ"
    most = printed(**dict(list(many.items())[1:]))
    assert len(of_run(most).script.frozen_marks) == 4 * MOST_MARKS
    assert Manifest.parse(of_run(most).canonical()) == of_run(most)
    assert here.difference(of_run(most).script) == "names, shapes or values differ"


async def entering(manifest: Manifest, here: Fingerprint) -> None:
    """What a node does before it takes part in a run, whichever way it has come to know of it."""
    script = SimpleNamespace(layout=manifest.script.layout, frozen=here)

    async def offload(work: Callable[[], Any]) -> Any:
        return work()

    node: Any = SimpleNamespace(
        daemon=SimpleNamespace(script=script),
        config=SimpleNamespace(role="island"),
        offload=offload,
    )
    await layout_of(node, manifest)


async def test_another_base_is_refused() -> None:
    here, other = printed(w=numbered(3)), printed(w=numbered(3) + 1)
    await entering(of_run(here), here)
    with pytest.raises(OperatorError, match=r"differs is base\.w") as caught:
        await entering(of_run(other), here)
    assert caught.value.code == "E201"
    assert "compare_frozen=False" in caught.value.fix


async def test_who_is_not_to_be_compared_is_not() -> None:
    """The run's creator has said so, or this island; or the run is of before there was this."""
    here = printed(w=numbered(3))
    await entering(of_run(NOT_COMPARED), here)
    await entering(of_run(here), NOT_COMPARED)
    assert "frozen" not in json.loads(of_run(NOT_COMPARED).canonical())["script"]


def test_a_run_that_says_nothing_of_it_keeps_its_form() -> None:
    """Its checkpoints are read, and its id stays; and there is one way to say nothing."""
    plain = json.loads(of_run(NOT_COMPARED).canonical())
    assert set(plain["script"]) == {"layout", "parameters", "dense"}
    assert Manifest.parse(of_run(NOT_COMPARED).canonical()).script.frozen == ""
    plain["script"]["frozen"] = plain["script"]["frozen_marks"] = ""
    with pytest.raises(Malformed, match="canonical"):
        Manifest.parse(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "given",
    [
        {"frozen": "ab" * 32},
        SCRIPT | {"frozen_marks": "abcd"},
        SCRIPT | {"frozen": "ab" * 31},
        SCRIPT | {"frozen": "ab" * 32, "frozen_marks": "abcde"},
        SCRIPT | {"frozen": "ab" * 32, "frozen_marks": "abcd" * (MOST_MARKS + 1)},
    ],
)
def test_what_says_nothing_sensible_is_no_manifest(given: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Manifest.model_validate({"script": given})


def test_what_is_frozen_is_no_other_run() -> None:
    """So that it is compared where it can be said what differs, and where it is to be."""
    here, other = printed(w=numbered(3)), printed(w=numbered(3) + 1)
    assert not differences(of_run(here), of_run(other))
    assert not differences(of_run(here), of_run(NOT_COMPARED))


@pytest.mark.parametrize("compares", [True, False])
def test_the_node_is_told_unless_it_is_not_to_compare(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compares: bool
) -> None:
    told: list[Any] = []

    def start(*given: Any) -> None:
        told.extend(one for one in given if isinstance(one, Fingerprint))
        raise OperatorError("E999", "w", "w", "f")

    monkeypatch.setattr("node.script.joining._start_node", start)
    model = adapted(w=numbered(3))
    optimizer = torch.optim.SGD(model.adapter.parameters())
    with pytest.raises(OperatorError, match="E999"):
        join(model, optimizer, dir=tmp_path, compare_frozen=compares)
    assert told == [fingerprint_of(model, ALONE) if compares else NOT_COMPARED]
