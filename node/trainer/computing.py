"""How a rank computes a layer, whatever the layout: precision, recomputation, compilation."""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from node.errors import operator_error
from node.trainer.model_moe import MixtureOfExperts

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Computing:
    """What the operator chose."""

    dtype: torch.dtype = torch.float32  # of activations and of parameters on their way
    recompute: Recompute = "none"  # activations in backward
    offload: bool = False  # parameters and moments stay in the host's memory
    compile: bool = False

    def prepare(self, block: nn.Module, dealt: Sequence[nn.Module] = ()) -> None:
        """Set up one layer as chosen, in place; call it before FSDP puts its hooks around it.

        ``dealt``: modules whose experts are with other ranks.
        All layers of a kind share what was compiled: it takes as long for two as for eighty.
        """
        mixed = [  # an expert's number of rows differs from call to call
            one for one in block.modules() if isinstance(one, MixtureOfExperts) or one in dealt
        ]
        compiled = self.compile and not (self.recompute == "selective" and mixed)
        for module in mixed if compiled else ():
            module.forward = torch.compiler.disable(module.forward)
        if self.recompute == "selective":
            biased = any(getattr(module, "has_bias", False) for module in block.modules())
            if compiled:  # with the layer: what is to be kept lies inside of what is compiled
                how = _again_but_common_products if biased else _again_but_products
                block.forward = MethodType(how, block)
            else:
                saved = SAVED - {OF_EXPERTS} if biased else SAVED
                block.forward = partial(_again_but, saved, block.forward)
        if compiled:  # the call of the layer stays as it is, with hooks that cannot be compiled
            block.forward = torch.compile(block.forward)
            block.register_forward_pre_hook(_waited_for)
        # around what is compiled: torch 2.13 does not compile a checkpoint whose matrices are cut,
        # nor any of one that has experts
        if self.recompute == "full":
            block.forward = partial(_again, block.forward)


def _waited_for(block: nn.Module, args: Any) -> Any:
    """Wait for inputs still on their way: torch 2.13 gets gradients through those wrong."""
    return tuple(x.clone() if isinstance(x, AsyncCollectiveTensor) else x for x in args)


OF_EXPERTS = torch.ops.aten._grouped_mm.default
SAVED = {  # what costs the most to compute again
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,  # with a bias
    OF_EXPERTS,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.all_gather_into_tensor.default,
    torch.ops._c10d_functional.all_to_all_single.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def _again(forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """A layer's forward, with all its activations made again in backward."""
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **given)


def _again_but(saved: Set[Any], forward: Callable[..., Any], *args: Any, **given: Any) -> Any:
    """The same, with what some operators return kept."""
    return _again(forward, *args, context_fn=partial(_keeping, saved), **given)


def _keeping(saved: Set[Any]) -> tuple[_Selective, _Selective]:
    """Contexts of forward and of backward.

    Those that torch makes count the calls of every operator, and raise where backward has more of
    one than forward had. An FSDP unit inside of a layer has: it gathers its parameters only where
    they are not there yet, and the profiler is told of the first unit in backward as of a root.
    So here each call that is kept has contexts of its own, and the others are not counted.
    """
    kept = defaultdict[Any, deque[_Context]](deque)  # by operator, in the order of calls

    def keep(func: Any) -> _Context:
        now, later = create_selective_checkpoint_contexts([func])
        kept[func].append(later)
        return now

    return _Selective(saved, keep), _Selective(saved, lambda func: kept[func].popleft())


_Context = AbstractContextManager[None]


class _Selective(TorchDispatchMode):
    """Calls the operators that are ``saved`` in contexts of their own."""

    def __init__(self, saved: Set[Any], context_of: Callable[[Any], _Context]) -> None:
        super().__init__()
        self.saved, self.context_of = saved, context_of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in self.saved:
            return func(*args, **(kwargs or {}))
        with self.context_of(func):
            return func(*args, **(kwargs or {}))


def _again_but_products(block: nn.Module, *args: Any, **given: Any) -> Any:
    """The same for the compiler, with products kept and what other ranks sent."""
    contexts = partial(create_selective_checkpoint_contexts, _policy)
    return _again(partial(type(block).forward, block), *args, context_fn=contexts, **given)


def _again_but_common_products(block: nn.Module, *args: Any, **given: Any) -> Any:
    """The same, but for products of experts: the library adds their biases to these in place."""
    contexts = partial(create_selective_checkpoint_contexts, _policy_for_biases)
    return _again(partial(type(block).forward, block), *args, context_fn=contexts, **given)


def _policy_for_biases(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operator == OF_EXPERTS:
        return CheckpointPolicy.PREFER_RECOMPUTE
    return _policy(context, operator, *args, **kwargs)


def _policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def has_bf16(device: torch.device) -> bool:
    """Whether the device is a GPU with bf16 kernels; those older than Ampere emulate it, slowly."""
    return device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)


def check_compiler(device: torch.device, cache: Path) -> None:
    """Raises OperatorError E411 where nothing can be compiled for the device.

    What is compiled is kept in ``cache``, for the other ranks and the next start, unless the
    environment names another place for it.
    """
    from torch._inductor import exc
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch.utils._triton import has_triton

    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache))
    try:
        get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        raise operator_error(
            "E411", why="there is no C++ compiler here: g++, or what CXX says"
        ) from error
    if device.type == "cuda" and not has_triton():
        raise operator_error("E411", why="for a GPU torch needs the library triton")


@contextmanager
def eagerly() -> Iterator[None]:
    """Compile nothing inside: for what is computed seldom and in other shapes."""
    with torch.compiler.set_stance("force_eager"):
        yield
