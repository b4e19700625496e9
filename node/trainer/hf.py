"""Models of the ``transformers`` library: any causal language model that it has built in.

The manifest has the model's ``config.json``, so that all islands build the same one. The library is
an extra (``hf``). Nothing is downloaded and no code but the library's own
runs: a configuration that names code, kernels or quantization is refused, whoever it comes from.
Dropout is switched off, since an inner step is a function of its place and its data alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from bootstrap.manifest import MAX_CONFIG_BYTES, Model
from bootstrap.validation import explain
from node.data.tokenizer import need
from node.errors import operator_error
from node.trainer.json_floats import read, tagged
from node.trainer.model import Decoder, document_numbers, documents_apart
from protocols.errors import OperatorError, kind_and_reason

PREFIX = "lm."  # of the parameters' names
# keys of config.json that do not change what the model computes
LEFT_OUT = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
REFUSED = ("auto_map", "quantization_config", "custom_pipelines")
# it draws experts at random in each step of training: layers that are computed again in the
# backward pass would draw others, and no two ranks the same
DRAWS = ("phimoe",)
REFUSED_PARTS = ("attn_implementation", "experts_implementation")
KERNEL = "kernel"  # in keys of sizes, and of what the library is to compute with

NOISE = (  # ends of keys
    "pdrop",
    "dropout",
    "dropout_prob",
    "dropout_p",
    "dropout_rate",
    "drop_path_rate",
    "layerdrop",
    "jitter_noise",
    "jitter_eps",
)
# of BERT and XLM, and their kin, which look ahead where it is off
CAUSAL = ("is_decoder", "causal")
DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)

BALANCE = "output_router_logits"  # what switches the balance loss on in config.json
ADAPTER = "adapter_config.json"


class ForeignDecoder(Decoder):
    """A model of ``transformers`` in the place of ours: tokens [B, T] to logits [B, T, V].

    Raises OperatorError E606 for a configuration that cannot be built, E605 without the library.
    """

    def __init__(self, config: Model) -> None:
        nn.Module.__init__(self)
        self.config = config
        self.embed_tokens = self.norm = self.lm_head = None
        self.layers = nn.ModuleDict()  # they are inside ``lm``
        self.lm: Any = _build(config)
        self.balance_asked = _switched_off(self.lm)  # for the library's loss of experts' balance
        self.first = self.last = True  # stage of a pipeline
        self.mask_of = documents_apart
        names = {module: name for name, module in self.named_modules()}
        head, embedding = self.lm.get_output_embeddings(), self.lm.get_input_embeddings()
        self.head_name = names.get(head, "")
        self.embedding_name = names[embedding]
        self._tied = head is not None and head.weight is embedding.weight

    @property
    def width(self) -> int:
        """Elements of a token's hidden state."""
        return int(self.lm.config.get_text_config().hidden_size)

    @property
    def tied(self) -> str:
        """See :attr:`Decoder.tied`."""
        return f"{self.embedding_name}.weight" if self._tied else ""

    @property
    def head(self) -> nn.Module | None:
        """What makes logits, where it is on this stage."""
        return self.get_submodule(self.head_name) if self.head_name and self.last else None

    @property
    def embedding(self) -> nn.Module | None:
        """Of tokens, where it is on this stage."""
        return self.get_submodule(self.embedding_name) if self.first else None

    def tie(self) -> None:
        """The library ties its own weights."""

    @property
    def blocks(self) -> list[nn.Module]:
        """The layers, whatever the family calls them: the longest list of modules of one class.

        Of a stage, those that it has.
        """
        lists = [m for m in self.lm.modules() if isinstance(m, nn.ModuleList) and len(m)]
        lengths = [len(one) for one in lists]
        longest = list(lists[lengths.index(max(lengths))]) if lists else []
        return [block for block in longest if not isinstance(block, Passed)]

    def forward(
        self, x: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Tensor:
        """[B, T] tokens -> [B, T, V] logits; hidden states [B, T, D] between stages."""
        mask = None
        if self.config.attention == "document":
            if documents is None:
                documents = document_numbers(x, self.config.document_end)
            mask = self.mask_of(documents)
            if self.lm.config._attn_implementation == "eager":
                mask = _added(mask)
        model = self.lm if self.last else self.lm.base_model
        given = {"input_ids" if self.first else "inputs_embeds": x, "attention_mask": mask}
        if positions is not None:  # else they are counted from 0
            given["position_ids"] = positions[None]
        out = model(**given, use_cache=False, return_dict=True)
        made: Tensor = out.logits if self.last else out.last_hidden_state
        return made


def _added(mask: Tensor) -> Tensor:
    """A bool mask in the form of the library's eager attention, which adds it to the scores."""
    hidden = torch.finfo(torch.float32).min
    return torch.zeros(mask.shape, device=mask.device).masked_fill_(~mask, hidden)


class Passed(nn.Module):
    """In the place of what another stage has: what comes goes on as it is."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The first argument."""
        return hidden_states


def build_foreign(config: Model, seed: int) -> ForeignDecoder:
    """The model on the CPU in fp32 with the library's own initial values for this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ForeignDecoder(config)


def pretrained(config: Model, folder: Path) -> tuple[Any, set[str]]:
    """The library's model with the weights of a folder, read as the library reads them, in fp32.

    And the names of weights that the model has no place for.

    Files have a family's own names and pieces (an entry an expert), which the library knows how to
    put together. Of ``folder`` only safetensors are read. Raises OperatorError E606 where they do
    not fit, or have buffers that training would not carry.
    """
    transformers = need("transformers", "hf", "read a model of transformers")
    if (folder / ADAPTER).exists():  # the library would look for what it adapts
        raise unfit(f"{ADAPTER} tells of an adapter, not of a whole model")
    transformers.utils.logging.disable_progress_bar()  # the terminal has a panel of its own
    try:
        with _offline(), torch.random.fork_rng(devices=[]):
            lm, found = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=_parse(config.config),
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are reported below
                output_loading_info=True,
            )
    except Exception as error:  # whatever a family makes of files that do not fit
        raise unfit(kind_and_reason(error)) from error
    if found["mismatched_keys"]:
        name, theirs, ours = sorted(found["mismatched_keys"])[0]
        raise unfit(f"{name} has the shape {tuple(theirs)}, not {tuple(ours)}")
    buffers, missing = dict(kept_buffers(lm)), set(found["missing_keys"])
    if gone := sorted(missing - set(buffers)):
        raise unfit(f"the weight {gone[0]} is missing")
    fresh = dict(kept_buffers(build_foreign(config, 0).lm)) if buffers else {}
    for name in buffers.keys() - missing:  # what is in no file has no values yet
        if not _alike(buffers[name], fresh[name]):
            raise unfit(f"{name} is no parameter, and its values would be lost in training")
    return lm, set(found["unexpected_keys"])


def _alike(read: Tensor, fresh: Tensor) -> bool:
    """Whether a buffer has the values that it is built with, as a file of any type has them."""
    types = (torch.bfloat16, torch.float16) if fresh.is_floating_point() else ()
    return any(torch.equal(read.double(), fresh.to(t).double()) for t in (fresh.dtype, *types))


def kept_buffers(lm: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Buffers that the library writes to files beside parameters."""
    parameters = {name for name, _ in lm.named_parameters(remove_duplicate=False)}
    return ((name, x) for name, x in lm.state_dict().items() if name not in parameters)


def tp_plan(config: Model) -> dict[str, str]:
    """How the library would cut the model for tensor parallelism, by parameter name patterns.

    Values are its words: ``colwise``, ``rowwise``, ``colwise_gather_output`` and so on. Empty
    where the family has no plan.
    """
    with torch.device("meta"):
        lm = ForeignDecoder(config).lm
    plan = {
        f"{PREFIX}{key}": str(how) for key, how in (getattr(lm, "_tp_plan", None) or {}).items()
    }
    inner = f"{PREFIX}{lm.base_model_prefix}."
    for key, how in (getattr(lm.config, "base_model_tp_plan", None) or {}).items():
        plan.setdefault(inner + key, str(how))
    return plan


def pp_plan(config: Model) -> list[str]:
    """What the library says the inner model consists of, in order; empty without such a plan."""
    with torch.device("meta"):
        lm = ForeignDecoder(config).lm
    return list(getattr(lm.config, "base_model_pp_plan", None) or {})


def family(config: Model) -> str:
    """What the library calls the kind of model, ``llama`` for one."""
    return str(json.loads(config.config).get("model_type"))


def described(config: Model) -> dict[str, Any]:
    """The config.json of what was trained: whoever loads that looks ahead no more than we did."""
    parsed = _parse(config.config)
    made = {key: True for key in CAUSAL if getattr(parsed, key, None) is True}
    plain: dict[str, Any] = tagged(json.loads(config.config))
    return plain | made


def model_of(config: dict[str, Any], **others: Any) -> Model:
    """The manifest's table for a ``config.json``; ``others`` are fields of ours.

    Raises OperatorError E606 where it cannot be built.
    """
    kept = {key: value for key, value in config.items() if key not in LEFT_OUT}
    try:
        text = json.dumps(tagged(kept), sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise unfit(kind_and_reason(error)) from error
    if len(text.encode()) > MAX_CONFIG_BYTES:
        raise unfit(f"config.json has more than {MAX_CONFIG_BYTES} bytes")
    parsed = _parse(text)
    try:
        inner = parsed.get_text_config()
        return Model(
            **{
                "kind": "hf",
                "config": text,
                "vocab_size": inner.vocab_size,
                "n_layers": getattr(inner, "num_hidden_layers", 1),
                "max_seq_len": getattr(inner, "max_position_embeddings", 1_048_576),
                **others,
            }
        )
    except ValidationError as error:
        raise unfit("; ".join(explain(error, Model))) from error
    except (ValueError, AttributeError) as error:  # of several texts, or of none
        raise unfit(str(error)[:500]) from error


def _parse(text: str) -> Any:
    """The library's configuration object; E606, E605."""
    transformers = need("transformers", "hf", "build a model of transformers")
    try:
        plain = read(text)
        if not isinstance(plain, dict):
            raise ValueError("it is no JSON object")
        for key, value in _entries(plain):
            named = KERNEL in key and _may_name(value)
            if named or key in REFUSED or any(part in key for part in REFUSED_PARTS):
                raise ValueError(f"{key} is not taken: no code and no kernels but the library's")
        kind = plain.pop("model_type", None)
        if kind not in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            raise ValueError(f"model_type {kind!r} is no causal language model of the library")
        if kind in DRAWS:
            raise ValueError(f"{kind} chooses its experts at random while it is trained")
        config = transformers.AutoConfig.for_model(kind, **plain)
        _quiet(config, transformers.PretrainedConfig)
        for key in CAUSAL:
            if getattr(config, key, None) is False:
                setattr(config, key, True)
        config.use_cache = False
        return config
    except OperatorError:
        raise
    except Exception as error:  # the library checks its configurations in ways of its own
        raise unfit(kind_and_reason(error)) from error


def _build(config: Model) -> Any:
    transformers = need("transformers", "hf", "build a model of transformers")
    parsed = _parse(config.config)
    try:
        with _offline():
            family = transformers.AutoModelForCausalLM
            kind = family._model_mapping[type(parsed)]
            attention = "sdpa" if getattr(kind, "_supports_sdpa", False) else "eager"
            lm: nn.Module = family.from_config(
                parsed, attn_implementation=attention, dtype=torch.float32
            )
    except Exception as error:  # whatever a family makes of numbers that do not fit together
        raise unfit(kind_and_reason(error)) from error
    for module in lm.modules():  # of a family that has it without a key of its configuration
        if isinstance(module, DROPOUT):
            module.p = 0.0
    return lm.train()


def _switched_off(lm: Any) -> bool:
    """Whether the library would keep experts equally busy by a loss of its own, which it is not to.

    It is never added here (:mod:`node.trainer.foreign_balance` has ours), and it cannot take the
    mask that keeps documents apart.
    """
    inner = lm.config.get_text_config()
    asked = bool(getattr(inner, BALANCE, True))  # a family without the switch always has the loss
    for one in (lm.config, inner):
        if hasattr(one, BALANCE):
            setattr(one, BALANCE, False)
    return asked


def _entries(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, list):
        for inner in value:
            yield from _entries(inner)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key), inner
            yield from _entries(inner)


def _may_name(value: object) -> bool:
    """Whether a value is more than numbers, and so could say where code is to come from."""
    if isinstance(value, list):
        return any(map(_may_name, value))
    return not isinstance(value, bool | int | float | None)


def _quiet(config: Any, kind: type) -> None:
    """Switch off dropout and other noise, also in configurations (``kind``) that it consists of.

    And kernels, which versions of the library fetch for whoever uses them (``use_mamba_kernels``).
    """
    for key, value in (config.to_dict() | vars(config)).items():
        if isinstance(value, kind):
            _quiet(value, kind)
        elif value and (_is_noise(key, value) or _fetches(key, value)):
            setattr(config, key, type(value)(0))  # some look at the type


def _is_noise(key: str, value: object) -> bool:
    """Whether a key sets dropout or other noise: a run's steps have to be repeatable."""
    return key.endswith(NOISE) and isinstance(value, int | float) and not isinstance(value, bool)


def _fetches(key: str, value: object) -> bool:
    return value is True and key.startswith("use_") and KERNEL in key


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Keep the library off the network meanwhile."""
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("HF_HUB_OFFLINE", None)
        else:
            os.environ["HF_HUB_OFFLINE"] = before


def unfit(why: str) -> OperatorError:
    """E606: this configuration is no model for this run."""
    return operator_error("E606", why=why)
