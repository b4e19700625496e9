"""How layers are computed: made again in backward, compiled once for all of them, or refused."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ranks_kit import fake_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from bootstrap.manifest import Model
from node.trainer.computing import Computing, check_compiler, has_bf16
from node.trainer.context import attention_over
from node.trainer.dims import ParallelDims
from node.trainer.model import Decoder, build
from node.trainer.parallel import Ranks
from node.trainer.parallelize import lay_out
from protocols.errors import OperatorError

CONFIG = Model(d_model=16, n_layers=4, n_heads=2, n_kv_heads=1, d_ff=24, max_seq_len=16)
TOKENS = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(0))


def gradients(model: Decoder) -> dict[str, Tensor]:
    model.zero_grad()
    model(TOKENS).square().mean().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def prepared(computing: Computing, config: Model = CONFIG) -> Decoder:
    model = build(config, 0)
    for block in model.layers.values():
        computing.prepare(block)
    return model


@pytest.mark.parametrize("how", ["full", "selective"])
def test_what_is_made_again_is_the_same(how: Any) -> None:
    wanted, found = gradients(build(CONFIG, 0)), gradients(prepared(Computing(recompute=how)))
    assert wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


class Counted(TorchDispatchMode):
    """How often operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("how", "again"), [("none", 0), ("selective", 0), ("full", 4)])
def test_what_other_ranks_sent_is_kept(how: Any, again: int) -> None:
    """Queries, keys, values, and what attention makes of them: four exchanges a layer."""
    with fake_ranks(2):
        config = CONFIG.model_copy(update={"n_kv_heads": 2, "n_layers": 2})
        model = prepared(Computing(recompute=how), config)
        mesh = init_device_mesh("cpu", (2,))
        for block in model.layers.values():
            block.self_attn.attend = attention_over(mesh, "ulysses")
        loss = model(TOKENS).square().mean()
        with Counted() as counted:
            loss.backward()
    exchange = torch.ops._c10d_functional.all_to_all_single.default
    assert counted.calls[exchange] == config.n_layers * (4 + again)


@pytest.mark.parametrize("bias", [False, True])
def test_products_are_kept(bias: bool) -> None:
    block = nn.Sequential(nn.Linear(8, 8, bias), nn.GELU())
    Computing(recompute="selective").prepare(block)
    made = block(torch.randn(3, 8)).sum()
    with Counted() as counted:
        made.backward()
    assert counted.calls[torch.ops.aten.addmm.default] == 0
    assert counted.calls[torch.ops.aten.mm.default] == 1  # the gradient of the weight


class Fetching(nn.Module):
    """Fetches what it computes with where it is not there: in forward it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.there = True

    def forward(self, x: Tensor) -> Tensor:
        if not self.there:
            torch.empty(8, 8).copy_(self.weight.detach())
        self.there = False
        return F.linear(x, self.weight)


def test_what_is_fetched_again_for_backward_alone_does_no_harm() -> None:
    """As FSDP does for a unit inside a layer, where forwards come before others' backward."""
    block = nn.Sequential(Fetching(), nn.GELU())
    Computing(recompute="selective").prepare(block)
    made = block(torch.randn(3, 8)).sum()
    with Counted() as counted:
        made.backward()
    assert counted.calls[torch.ops.aten.copy_.default] == 1
    assert counted.calls[torch.ops.aten.mm.default] == 1  # the gradient of the weight


def test_what_is_kept_and_then_changed_in_place_is_noticed() -> None:
    block = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.GELU())
    Computing(recompute="selective").prepare(block)
    with pytest.raises(RuntimeError, match="has been mutated"):
        block(torch.randn(3, 8)).sum().backward()


def test_experts_that_one_rank_keeps_in_the_host_s_memory_are_made_again() -> None:
    """There FSDP tells the profiler of one thing more in backward than in forward."""
    found = []
    for how in ("none", "selective"):
        with fake_ranks(1):
            axes = ParallelDims().axes
            mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
            model = build(CONFIG.model_copy(update={"experts": 4, "n_layers": 2}), 0)
            ranks = Ranks(0, 1, torch.device("cpu"), mesh)
            computing = Computing(torch.bfloat16, recompute=how, offload=True)
            lay_out(model, ranks, computing, seq_len=12)
            found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    for name, wanted in found[0].items():
        assert torch.equal(found[1][name].to_local(), wanted.to_local())  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("default")  # torch warns of itself while it compiles
@pytest.mark.parametrize("how", ["none", "full"])
def test_layers_of_a_kind_are_compiled_once(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So compile time does not grow with depth. (Dynamo alone here: no C++ in the fast tests.)"""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    wanted, model = gradients(build(CONFIG, 0)), prepared(Computing(recompute=how, compile=True))
    found = gradients(model)
    assert counter.frame_count == 1
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])
    gradients(model)
    assert counter.frame_count == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("how", ["full", "selective"])
def test_layers_whose_matrices_are_cut_are_compiled_and_made_again(
    how: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all that torch does but machine code. What the other rank would send is made up."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    found = []
    for compiled in (False, True):
        with fake_ranks(2):
            dims = ParallelDims(tp=2)
            mesh = init_device_mesh(
                "cpu", tuple(dims.axes.values()), mesh_dim_names=tuple(dims.axes)
            )
            model = build(CONFIG.model_copy(update={"n_layers": 2, "n_kv_heads": 2}), 0)
            ranks = Ranks(0, 2, torch.device("cpu"), mesh, dims)
            lay_out(model, ranks, Computing(recompute=how, compile=compiled), seq_len=12)
            found.append(gradients(model))
    assert found[0].keys() == found[1].keys()
    torch._dynamo.reset()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("how", "graphs"), [("none", 2), ("full", 2), ("selective", 0)])
def test_what_is_around_experts_is_compiled(
    how: Any, graphs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before them, and what behind; but not where single operators are kept."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
    config = CONFIG.model_copy(update={"experts": 4})
    wanted = gradients(build(config, 0))
    found = gradients(prepared(Computing(recompute=how, compile=True), config))
    assert counter.frame_count == graphs
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name])
    torch._dynamo.reset()


def test_without_a_compiler_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", ("/no/such/compiler",))
    with pytest.raises(OperatorError, match=r"there is no C\+\+ compiler") as caught:
        check_compiler(torch.device("cpu"), tmp_path)
    assert caught.value.code == "E411"
    assert "--compile" in caught.value.fix


@pytest.mark.parametrize("major", [7, 8])
def test_a_gpu_that_only_imitates_bf16_does_not_take_it_by_itself(
    monkeypatch: pytest.MonkeyPatch, major: int
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(major=major))
    assert has_bf16(torch.device("cuda", 0)) == (major == 8)
    assert not has_bf16(torch.device("cpu"))
