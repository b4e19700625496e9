"""Models of transformers whose experts are dealt out to ranks, by the plan that the library has.

The plan for expert parallelism (``base_model_ep_plan``) names the modules that hold experts, and in
them the parameters that have one slice an expert. Such a module is a function of hidden states
[N, D], the K experts of each token and their weights, [N, K] both. Here its rows go to the ranks
that have their experts and come back (:mod:`node.trainer.experts`); there the library's own
function is called with the experts of that rank, one to a row. That this is the same is tried with
a few rows, since no plan says so. The router stays where the tokens are. It is in no plan either,
but stands beside its experts under one of two names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from bootstrap.manifest import Model
from node.trainer.experts import exchange, place
from node.trainer.foreign import expression, matching, with_local
from node.trainer.foreign_context import close
from node.trainer.foreign_storage import lent
from node.trainer.hf import PREFIX, ForeignDecoder, family

HOLDS, SLICED = "ep_dispatch_experts", "grouped_gemm"  # the plan's words
ROUTERS = ("gate", "router")
PROBED = 8  # rows

Forward = Callable[[Tensor, Tensor, Tensor], Tensor]


def experts_of(model: ForeignDecoder) -> list[nn.Module]:
    """The modules that hold experts, by the family's plan; those of this stage."""
    patterns = [pattern for pattern, word in _plan(model).items() if word == HOLDS]
    return [module for pattern in patterns for module in matching(model, pattern)]


def routers_of(model: ForeignDecoder) -> list[nn.Module]:
    """The modules that choose among experts, where they are found; those of this stage."""
    names = {module: name for name, module in model.named_modules()}
    found: list[nn.Module] = []
    for experts in experts_of(model):
        beside = model.get_submodule(names[experts].rpartition(".")[0])
        found += [module for name, module in beside.named_children() if name in ROUTERS]
    return found


def route_in_fp32(router: nn.Module, device: torch.device) -> None:
    """Have a router compute in fp32 also under autocast, in place.

    As ours does, and for its reason (:func:`node.trainer.model_moe.logits`).
    """
    router.forward = partial(_exactly, router.forward, device.type)


def _exactly(forward: Callable[..., Any], device: str, *args: Any, **given: Any) -> Any:
    with torch.autocast(device, enabled=False):
        return forward(*map(_exact, args), **{name: _exact(x) for name, x in given.items()})


def _exact(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def check_ep(config: Model, size: int) -> None:
    """Raises ValueError that names the flag where a family's experts cannot be dealt out."""
    with torch.device("meta"):
        model = ForeignDecoder(config)
    plan, found = _plan(model), experts_of(model)
    if not plan:
        raise _refused(config, size, "transformers has no plan for it (base_model_ep_plan)")
    if not found:
        raise _refused(config, size, "this configuration has no layer with experts")
    if unknown := sorted(set(plan.values()) - {HOLDS, SLICED}):
        raise _refused(config, size, f"its plan says {unknown[0]}, which is not known here")
    sliced = {
        id(parameter)
        for pattern, word in plan.items()
        if word == SLICED
        for name, parameter in model.named_parameters()
        if expression(pattern).fullmatch(name)
    }
    for module in found:
        count = getattr(module, "num_experts", None)
        for name, parameter in module.named_parameters():
            if id(parameter) not in sliced or "." in name or parameter.shape[0] != count:
                raise _refused(config, size, f"{name} does not have one slice an expert")
        if count is None or count % size:
            raise ValueError(f"--ep {size} does not divide num_experts {count}")


def deal_out(model: ForeignDecoder, mesh: DeviceMesh) -> None:
    """Leave this rank its experts of a model, whole or a stage, in place.

    :func:`check_ep` has accepted the family, and :func:`try_experts` the model.
    """
    for experts in experts_of(model):
        for name, parameter in list(experts.named_parameters()):
            place(experts, name, parameter, mesh, [Shard(0)])
        whole = experts.num_experts
        assert isinstance(whole, int)
        experts.num_experts = whole // mesh.size()  # type: ignore[assignment]
        experts.forward = _elsewhere(experts, whole, mesh.get_group())


def _elsewhere(experts: nn.Module, count: int, group: dist.ProcessGroup) -> Forward:
    """What the forward of ``count`` experts does, [N, D] -> [N, D], by the ranks that have them."""
    run = partial(_by_row, experts.forward)

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        counts = chosen.flatten().bincount(minlength=count)
        rows = x[order // chosen.shape[1]]
        out = with_local(experts, partial(exchange, run, group, rows, counts))
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        each = out[places].view(*chosen.shape, -1) * weights[..., None]  # [N, K, D]
        return each.sum(dim=1).to(x.dtype)

    return forward


def _by_row(forward: Forward, x: Tensor, counts: Tensor) -> Tensor:
    """Rows [n, D] sorted by expert, ``counts`` of them for each, through those experts."""
    if not len(x):  # the library's kernels want rows, and the experts their gradient of zeros
        none, first = x.new_zeros(1, x.shape[1]), torch.zeros_like(counts)
        first[0] = 1
        return torch.cat((x, _by_row(forward, none, first)[:0]))
    chosen = torch.arange(len(counts), device=x.device).repeat_interleave(counts)
    return forward(x, chosen[:, None], x.new_ones(len(x), 1))


def try_experts(model: ForeignDecoder, size: int) -> None:
    """Raises ValueError where experts, of a model of the CPU, are not a sum of what each makes.

    To be called before anything else is cut, by every rank.
    """
    seen: list[tuple[Forward, tuple[Any, ...], Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda module, args, out: seen.append((module, args, out)))
        for module in experts_of(model)
    ]
    generator = torch.Generator().manual_seed(0)
    if model.first:
        x = torch.randint(model.config.vocab_size, (1, PROBED), generator=generator)
    else:
        x = torch.randn(1, PROBED, model.width, generator=generator)
    with lent(model), torch.no_grad():
        model(x)
        for hook in hooks:
            hook.remove()
        for experts, args, out in seen:
            if len(args) != 3 or [getattr(one, "ndim", 0) for one in args] != [2, 2, 2]:
                raise _refused(model.config, size, "its experts are not called row by row")
            x, chosen, weights = args
            rows, alone = x.repeat_interleave(chosen.shape[1], dim=0), chosen.flatten()[:, None]
            each = experts(rows, alone, x.new_ones(len(rows), 1)).view(*chosen.shape, -1)
            total = (each * weights[..., None]).sum(dim=1)
            if not close(total, out):
                raise _refused(model.config, size, "a token's experts are not just added up")


def _plan(model: ForeignDecoder) -> dict[str, str]:
    inner = f"{PREFIX}{model.lm.base_model_prefix}."
    plan = getattr(model.lm.config, "base_model_ep_plan", None) or {}
    return {inner + key: str(how) for key, how in plan.items()}


def _refused(config: Model, size: int, why: str) -> ValueError:
    return ValueError(
        f"--ep {size}: the experts of {family(config)} cannot be dealt out: {why}; "
        "lay it out by --dp-shard, --dp-replicate, --cp and --pp"
    )
