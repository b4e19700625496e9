"""What keeps the experts of models of transformers equally busy.

The library has a loss for that, which it adds to its own; here that one is not asked for, as ranks
and micro-batches would each get another. In its place each layer has that of our own experts, over
single sequences (:mod:`node.trainer.model_moe`), as strong as the library's: its coefficient, from
``config.json``, is for a mean over the layers, in which a token counts once for each of its
experts. Which modules choose, and where in what they return the logits are, is said by the library
in a table of what can be recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from bootstrap.manifest import Model
from node.trainer.experts import mean_over
from node.trainer.foreign_storage import lent
from node.trainer.hf import ForeignDecoder, family, unfit
from node.trainer.model_moe import Attach, Whole, balance_loss, here_alone
from node.trainer.parallel import Ranks
from protocols.errors import OperatorError

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # the library's words
WITHOUT = f"set {' or '.join(COEFFICIENTS)} to 0 in its config.json to do without"
LOOKED_AT = 16  # tokens of the forward that shows what is returned


@dataclass(frozen=True)
class Balance:
    """How the balance loss of one layer is made."""

    weight: float  # of the mean over sequences
    top_k: int
    experts: int


def balance_of(model: ForeignDecoder) -> Balance | None:
    """What a whole model asks for; None where it has no such loss, or no experts.

    A new model gets it also where ``output_router_logits`` is off: published configurations have
    it off, as it also makes the model return logits. Routers that come with weights are trained
    already, by their authors' loss: they get it only where the option is on, as in the library.

    Raises OperatorError E606 where what chooses returns logits in no known form, or cannot be
    looked at before the first step, when this island would take part already.
    """
    choosing = _choosing(model)
    balance = _asked_for(model, choosing)
    if balance is not None:
        with lent(model):
            if not _look(model, choosing, balance):
                _look_alone(model, choosing, balance)
    return balance


def check_balance(config: Model) -> None:
    """Raise E606 for a model that :func:`balance_of` is known to refuse, before a run has it.

    Nothing is allocated: its tensors have shapes and no values. Where a model cannot compute
    without values, nothing is raised.
    """
    with FakeTensorMode():
        try:
            model = ForeignDecoder(config)
        except OperatorError:  # it may want values; whether it can be built is asked elsewhere
            return
        choosing = _choosing(model)
        balance = _asked_for(model, choosing)
        if balance is not None:
            _look(model, choosing, balance)


def _asked_for(model: ForeignDecoder, choosing: dict[nn.Module, int]) -> Balance | None:
    lm = model.lm
    coefficient = next((getattr(lm, name) for name in COEFFICIENTS if hasattr(lm, name)), None)
    if not coefficient or not choosing:
        return None
    if model.config.initial and not model.balance_asked:
        return None
    weight = coefficient * lm.num_experts_per_tok / len(choosing)
    return Balance(weight, lm.num_experts_per_tok, lm.num_experts)


class _SeenAllError(Exception):
    """Ends a forward: nothing more is to be seen in it."""


@torch.no_grad()
def _look(model: ForeignDecoder, choosing: dict[nn.Module, int], balance: Balance) -> bool:
    """Raise E606 unless the loss can be hung on what one module of each kind returns.

    By a forward of a few tokens, as nothing else tells what a module returns; it ends once one
    of each kind was seen. Returns false where the forward fails.
    """
    kinds = {type(module) for module in choosing}

    def look(module: nn.Module, _: object, out: Any) -> None:
        _see(out, choosing[module], balance, family(model.config))
        kinds.discard(type(module))
        if not kinds:
            raise _SeenAllError

    hooks = [module.register_forward_hook(look) for module in choosing]
    try:
        model(torch.zeros(1, min(LOOKED_AT, model.config.max_seq_len), dtype=torch.int64))
    except _SeenAllError:
        return True
    except OperatorError:
        raise
    except Exception:  # noqa: BLE001 - a family's kernels may be for a GPU alone, and this is the
        return False  # CPU
    finally:
        for hook in hooks:
            hook.remove()
    return True


@torch.no_grad()
def _look_alone(model: ForeignDecoder, choosing: dict[nn.Module, int], balance: Balance) -> None:
    """As :func:`_look`, without a forward of the model: routers are called with made-up states."""
    states = torch.zeros(LOOKED_AT, model.width)
    of_family = family(model.config)
    for module, index in {type(one): (one, index) for one, index in choosing.items()}.values():
        refused = unfit(
            f"what the routers of {of_family} return can only be seen on a GPU, when this island "
            f"would take part already: {WITHOUT}"
        )
        for given in (states, states[None]):  # some take [N, D], some [B, N, D]
            try:
                _see(module(given), index, balance, of_family)
                break
            except OperatorError as error:
                refused = error
            except Exception:  # noqa: BLE001 - whatever it raises: it is refused below
                continue
        else:
            raise refused


def _see(out: Any, index: int, balance: Balance, of_family: str) -> None:
    """Raise E606 where there are no logits in what a module has returned."""
    if isinstance(out, tuple):
        _find(out, index, balance, of_family)
    else:
        _find((out,), 0, balance, of_family)


def keep_busy(
    model: ForeignDecoder, balance: Balance, ranks: Ranks, batch: int, seq_len: int
) -> Callable[[bool], None]:
    """Hang the loss on what chooses among experts, in a model or a stage, in place.

    ``batch`` and ``seq_len`` are the island's. Returns a function, to be told whether
    the next sequences are of the batch.
    """
    dims = ranks.dims
    whole = partial(mean_over, ranks.axis("cp").get_group()) if dims.cp > 1 else here_alone
    # averaged over the data ranks, and over cp the mean of parts; over tp each rank has all tokens
    weight = balance.weight * dims.data / batch
    hangs = []
    for module, index in _choosing(model).items():
        hang = _Hang(family(model.config), index, balance, weight, seq_len // dims.cp, whole)
        module.forward = partial(_and_hang, module.forward, hang)
        hangs.append(hang)

    def counts(they: bool) -> None:
        for hang in hangs:
            hang.counts = they

    return counts


@dataclass
class _Hang:
    """The loss of one layer, for what the module that chooses returns."""

    family: str
    index: int  # of the logits
    balance: Balance
    weight: float  # of one sequence
    tokens: int  # of a sequence, on this rank
    whole: Whole
    counts: bool = True  # what goes through is of the batch

    def __call__(self, out: Any) -> Any:
        """``out`` with the loss hung on the experts' weights, or on the logits if alone."""
        parts = out if isinstance(out, tuple) else (out,)
        index = self.index if isinstance(out, tuple) else 0
        logits, place = _find(parts, index, self.balance, self.family)
        scores = logits.float().softmax(dim=-1).view(-1, self.tokens, self.balance.experts)
        chosen = scores.topk(self.balance.top_k, dim=-1).indices
        weight = self.weight if self.counts else 0.0
        loss = balance_loss(scores, chosen, self.whole).sum() * weight
        # FSDP hangs on what a router returns, and wants no view
        carried = Attach.apply(parts[place], loss).clone()
        if not isinstance(out, tuple):
            return carried
        return tuple(carried if at == place else one for at, one in enumerate(parts))


def _find(
    parts: tuple[Any, ...], index: int, balance: Balance, of_family: str
) -> tuple[Tensor, int]:
    """The logits, and where the loss goes. Raises OperatorError E606 for an unknown form."""
    logits = parts[index] if index < len(parts) else None
    others = [
        at
        for at, one in enumerate(parts)
        if at != index and isinstance(one, Tensor) and one.is_floating_point()
    ]
    known = isinstance(logits, Tensor) and logits.shape[1:] == (balance.experts,)
    if not known or not (others or len(parts) == 1):
        raise unfit(
            f"what keeps the experts of {of_family} equally busy is not known here: {WITHOUT}"
        )
    assert isinstance(logits, Tensor)
    return logits, others[0] if others else index


def _and_hang(forward: Callable[..., Any], hang: _Hang, *args: Any, **given: Any) -> Any:
    out = forward(*args, **given)
    return hang(out) if torch.is_grad_enabled() else out


def _choosing(model: ForeignDecoder) -> dict[nn.Module, int]:
    """The modules that return the logits of experts, and where in what they return these are."""
    base = model.lm.base_model
    specs = (getattr(base, "_can_record_outputs", None) or {}).get("router_logits", ())
    found: dict[nn.Module, int] = {}
    for name, module in base.named_modules():
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            wanted: Any = getattr(spec, "target_class", spec)  # older tables have classes alone
            where = getattr(spec, "layer_name", None)
            if isinstance(module, wanted) and (where is None or f".{where}." in f".{name}."):
                found[module] = getattr(spec, "index", 1)
    return {
        module: index
        for module, index in found.items()
        if not any(inner is not module and inner in found for inner in module.modules())
    }
