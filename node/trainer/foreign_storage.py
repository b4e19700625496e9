"""Models of transformers without storage: no rank holds a whole model that it has a part of.

Of our own model shapes alone are built where there are several ranks (``meta``). The library's
have buffers beside their parameters, rotary frequencies for one, which are computed while a model
is built and are in no vector of ours. So parameters alone are left without storage, and buffers are
what they always are. What is tried with a few tokens before a model is taken needs values, which
are lent to it: all layers share those of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from bootstrap.manifest import Model
from node.trainer.hf import ForeignDecoder, build_foreign, kept_buffers
from protocols.errors import OperatorError


def build_unstored(config: Model) -> ForeignDecoder | None:
    """The model with parameters on ``meta`` and buffers on the CPU.

    None where its buffers cannot be had so, as they are made of parameters or drawn at random: it
    has to be built whole. Raises OperatorError E605 without the library.
    """
    try:
        with _parameters_on_meta():
            model, other = build_foreign(config, 0), build_foreign(config, 1)
    except OperatorError as error:
        if error.code == "E605":
            raise
        return None  # it may want values; if it cannot be built at all, that is told with them
    buffers, again = dict(model.named_buffers()), dict(other.named_buffers())
    if any(one.is_meta or not torch.equal(one, again[name]) for name, one in buffers.items()):
        return None
    return model


def fixed_buffers(config: Model) -> dict[str, Tensor]:
    """Buffers that the library has in files beside parameters, by its names.

    Those that are built alike in all islands: nothing trains them, and whoever loads a file without
    them has undefined values there.
    """
    with torch.device("meta"):
        if not any(kept_buffers(ForeignDecoder(config).lm)):
            return {}
    model = build_unstored(config)
    if model is not None:
        return dict(kept_buffers(model.lm))
    ones, others = (dict(kept_buffers(build_foreign(config, seed).lm)) for seed in (0, 1))
    return {name: one for name, one in ones.items() if torch.equal(one, others[name])}


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    def unstored(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Tensor | None:
        if parameter is None or parameter.is_meta:  # a tied one has been here
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    # its annotation says that hooks return nothing, and its documentation that they may
    handle = register_module_parameter_registration_hook(unstored)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def lent(model: ForeignDecoder) -> Iterator[None]:
    """Meanwhile the parameters of a model on ``meta``, whole or a stage, have values on the CPU.

    They are random, equal on all ranks, and the same in all layers: that takes the memory of the
    model's ends and one layer. Nothing is done for a model with storage.
    """
    unstored = [
        (f"{prefix}.{name}", module, name, parameter)
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_meta
    ]
    blocks = set(model.blocks)
    layers = tuple(f"{name}." for name, module in model.named_modules() if module in blocks)
    of_place: dict[tuple[str, torch.Size], nn.Parameter] = {}
    of_tensor: dict[Tensor, nn.Parameter] = {}
    new: dict[nn.Module, None] = {}  # in order
    try:
        for path, module, name, parameter in unstored:
            if parameter not in of_tensor:
                layer = next((one for one in layers if path.startswith(one)), "")
                place = (path.removeprefix(layer) if layer else f".{path}", parameter.shape)
                if place not in of_place:
                    of_place[place] = nn.Parameter(torch.empty_like(parameter, device="cpu"))
                    new[module] = None
                of_tensor[parameter] = of_place[place]
            module._parameters[name] = of_tensor[parameter]
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            for value in of_place.values():
                value.fill_(1.0)  # norms, where the library has nothing to say
            for module in new:
                model.lm._init_weights(module)
            for value in of_place.values():
                if value.ndim > 1:  # so large that what is looked for shows in any width
                    value.normal_(std=value.shape[-1] ** -0.5)
        yield
    finally:
        for _, module, name, parameter in unstored:
            module._parameters[name] = parameter


def give_storage(model: ForeignDecoder, device: torch.device) -> None:
    """Storage for what this rank has of parameters on ``meta``, in place; values are undefined.

    Tensors that are tied stay one.
    """
    made: dict[Tensor, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if parameter not in made:
                stored = torch.empty_like(parameter, device=device)
                made[parameter] = nn.Parameter(stored, parameter.requires_grad)
            module._parameters[name] = made[parameter]
    if made:
        model._apply(lambda tensor: tensor)  # FSDP takes note of what has come in the place
