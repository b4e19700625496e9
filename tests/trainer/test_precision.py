"""Which types layouts in bf16 compute in, with torch's fake process group as the other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from ranks_kit import fake_ranks, forked
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from benchmarks.layout_cases import FOREIGN_EP, Case, manifest_of
from node.trainer import model as ours
from node.trainer.computing import Computing
from node.trainer.context import attention_over
from node.trainer.dims import ParallelDims
from node.trainer.engine import Engine
from node.trainer.foreign_experts import routers_of
from node.trainer.hf import ForeignDecoder
from node.trainer.model import Attend, Decoder, build, causal_attention
from node.trainer.model_moe import Router
from node.trainer.parallel import Ranks

HALF = torch.bfloat16
CPU = torch.device("cpu")
LAYOUTS = [
    ParallelDims(),
    ParallelDims(dp_replicate=2),
    ParallelDims(dp_shard=2),
    ParallelDims(tp=2),
    ParallelDims(cp=2),
    ParallelDims(cp=2, attention="ring"),
]


@contextmanager
def engine_of(
    dims: ParallelDims, model: str = "dense", *, mesh: bool = False, **computing: Any
) -> Iterator[Engine]:
    """That of rank 0 in bf16; ``mesh``: a single rank has one too, of one rank."""
    manifest = manifest_of(Case("", dims, model))
    if dims.size == 1 and not mesh:
        yield Engine(manifest, Ranks.alone(CPU), Computing(HALF, **computing))
        return
    with fake_ranks(dims.size):
        axes = dims.axes
        made = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        ranks = Ranks(0, dims.size, CPU, made, dims)
        yield Engine(manifest, ranks, Computing(HALF, **computing))


def batch(rows: range) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (len(rows), 33), generator=torch.Generator().manual_seed(0))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def routers(model: Decoder) -> list[torch.nn.Module]:
    if isinstance(model, ForeignDecoder):
        return routers_of(model)
    return [module for module in model.modules() if isinstance(module, Router)]


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "FSDP"])
@pytest.mark.parametrize("model", ["moe", *FOREIGN_EP])
def test_a_router_computes_in_fp32(model: str, sharded: bool) -> None:
    """With the weights that it has: which experts are taken does not follow from the layout."""
    seen: list[tuple[str, Tensor, Tensor]] = []
    exact = dict(build(manifest_of(Case("", model=model)).model, 0).named_parameters())
    with engine_of(ParallelDims(), model, mesh=sharded, offload=sharded) as engine:
        (part,) = engine.parts.values()
        names = {module: name for name, module in part.named_modules()}
        for router in routers(part):

            def look(router: Any, args: Any, out: Any) -> None:
                logits = out if isinstance(out, Tensor) else out[0]
                seen.append((names[router], args[0].detach(), logits.detach()))

            router.register_forward_hook(look)
        engine.gradients(batch, 8)
        gradients = [router.weight.grad for router in routers(part)]
    assert seen
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in gradients)
    for name, x, logits in seen:
        weight, bias = exact[f"{name}.weight"], exact.get(f"{name}.bias")
        wanted = F.linear(x.float().flatten(0, -2), weight, bias)
        assert logits.dtype == torch.float32
        assert torch.equal(logits.flatten(0, -2), wanted)


WANTED = {
    "in": {HALF},
    "rope": {torch.float32},
    "attended": {HALF},
    "out": {HALF},
    "forward": {True},
    "backward": {False},  # under autocast it would round what forward has kept in fp32
}


def look(engine: Engine) -> dict[str, set[Any]]:
    """What is seen while it computes."""
    seen: dict[str, set[Any]] = {what: set() for what in WANTED}

    def layer_done(layer: Any, args: Any, out: Tensor) -> None:
        seen["in"].add(args[0].dtype)
        seen["rope"].add(args[1].dtype)
        seen["out"].add(out.dtype)
        seen["forward"].add(torch.is_autocast_enabled("cpu"))
        out.register_hook(graded)

    def attending(attend: Attend, *args: Tensor) -> Tensor:
        seen["attended"].update(x.dtype for x in args)
        return attend(*args)

    def graded(gradient: Tensor) -> None:
        seen["backward"].add(torch.is_autocast_enabled("cpu"))

    for part in engine.parts.values():
        for layer in part.layers.values():
            layer.register_forward_hook(layer_done)
            layer.self_attn.attend = partial(attending, layer.self_attn.attend)
    return seen


@pytest.mark.parametrize("dims", LAYOUTS, ids=lambda dims: f"{dims} {dims.attention}")
def test_hidden_states_have_the_computing_type_in_every_layout(dims: ParallelDims) -> None:
    with engine_of(dims) as engine:
        seen = look(engine)
        engine.gradients(batch, 8)
        gradients = {p.grad.dtype for p in engine.models.parameters() if p.grad is not None}
    assert seen == WANTED
    assert gradients == {torch.float32}


def _stage(rank: int, directory: Path) -> None:
    dims = ParallelDims(pp=2)
    ranks = Ranks.join(rank, dims, CPU, f"file://{directory}/store")
    engine = Engine(manifest_of(Case("", dims)), ranks, Computing(HALF))
    with torch.no_grad():
        for parameter in engine.models.parameters():
            parameter.uniform_(-0.1, 0.1)
    seen = look(engine)
    engine.gradients(batch, 8)
    assert seen == WANTED, seen


def test_so_they_have_in_a_pipeline(tmp_path: Path) -> None:
    """Of real ranks: its stages tell each other what they are going to send."""
    forked(_stage, 2, tmp_path)


def test_what_backward_begins_with_is_not_gathered_again() -> None:
    with engine_of(ParallelDims(dp_shard=2)) as engine:
        (part,) = engine.parts.values()
        loss = part(batch(range(4))[0]).float().mean()
        gathered = {name for name, p in part.named_parameters() if not isinstance(p, DTensor)}
        assert gathered == {"embed_tokens.weight", "norm.weight"}  # and the head, which is tied
        loss.backward()
        assert all(isinstance(p, DTensor) for p in part.parameters())
        engine.evaluate(torch.zeros(2, 33, dtype=torch.int64))
        assert all(isinstance(p, DTensor) for p in part.parameters())


def test_a_ring_rounds_what_it_takes_and_what_it_gives_alone() -> None:
    random = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.randn(2, heads, 32, 8, generator=random) for heads in (4, 2, 2))
    rounded = [x.to(HALF).requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    with fake_ranks(1):
        attend = attention_over(init_device_mesh("cpu", (1,)), "ring")
        with torch.autocast("cpu", HALF):
            found = attend(*rounded)
        found.float().square().sum().backward()
    wanted = causal_attention(*exact)
    wanted.square().sum().backward()
    assert found.dtype == HALF
    weights_rounded = 2.0**-8 * wanted.abs().max()
    assert (found - wanted).abs().max() < weights_rounded
    for ours_, theirs in zip(rounded, exact, strict=True):
        assert ours_.grad is not None
        assert theirs.grad is not None
        assert (ours_.grad - theirs.grad).abs().max() < 0.02 * theirs.grad.abs().max()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("masked", [False, True])
def test_key_heads_are_repeated_where_no_fused_kernel_takes_them_in_groups(
    device: str, dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``meta`` takes the place of a GPU."""
    taken: list[tuple[int, bool]] = []
    fused = F.scaled_dot_product_attention

    def looking(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        taken.append((k.shape[1], given["enable_gqa"]))
        return fused(q, k, v, **given)

    monkeypatch.setattr(ours.F, "scaled_dot_product_attention", looking)
    q, k, v = (torch.zeros(2, heads, 16, 8, dtype=dtype, device=device) for heads in (4, 2, 2))
    mask = torch.ones(2, 1, 16, 16, dtype=torch.bool, device=device).tril() if masked else None
    assert causal_attention(q, k, v, mask).shape == q.shape
    grouped = device == "cpu" or (dtype == HALF and not masked)
    assert taken == [(2, True) if grouped else (4, False)]
