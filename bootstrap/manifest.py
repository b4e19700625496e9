"""The manifest: what a run is. Its hash is the run id, its creator signs it, joiners obey it.

Everything that must be equal on all islands stands here and nothing else does: how an island
lays out its own GPUs, which device it has, or where it keeps files is its own business.

>>> manifest = load(Path("run.toml"))
>>> manifest.run_id.hex(), manifest.label
('8c41…', 'tiny-docs-8c41')

Its canonical form is in :mod:`bootstrap.manifest_form`. A manifest that is read, since its run is
under way, does not have to be one that this version would make (:mod:`bootstrap.manifest_rules`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from blake3 import blake3
from pydantic import Field, ValidationError, ValidationInfo, model_validator

from bootstrap.manifest_form import (
    READING,
    canonical_bytes,
    flat,
    is_read,
    not_canonical,
    unread,
    with_left_out,
)
from bootstrap.manifest_gossip import PAIRED, Gossip, check_gossip
from bootstrap.manifest_modes import check_gradients, check_mode, check_trust, with_defaults
from bootstrap.manifest_rounds import (
    COARSE,
    MOST_COUNT,
    TOTAL_STEPS,
    Merge,
    Mode,
    Outer,
    Rounds,
    Section,
)
from bootstrap.manifest_rules import check_new
from bootstrap.validation import check, read_toml
from protocols.errors import Malformed

MAX_MANIFEST_BYTES = 48 * 1024  # canonical, as in ManifestText
MAX_CONFIG_BYTES = 16 * 1024  # of a model of transformers
MAX_SHARD_BYTES = 256 * 1024 * 1024  # of the evaluation shard, which every island fetches
FILLED_IN = 256  # bytes of hashes and the like that a manifest gets as its run is made
MARK, MOST_MARKS = 4, 1024  # hex digits a frozen tensor; with more tensors there are no marks


class Model(Section):
    """A Llama-style decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention).

    Or a causal language model of the ``transformers`` library (``kind`` "hf"), which ``config``
    describes: its config.json. Then vocabulary, length and number of layers repeat what it says.
    """

    kind: Literal["llama", "hf"] = "llama"
    """The built-in family, or a causal language model of `transformers` (--hf-config)."""
    config: str = Field(default="", max_length=MAX_CONFIG_BYTES)
    """The config.json of such a model; filled in by --hf-config and --init-from."""
    initial: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """BLAKE3 of the parameters that the run starts from, where they are not made from the seed;
    filled in by --init-from."""
    vocab_size: int = Field(default=256, ge=2, le=1_000_000)
    """Tokens that there are."""
    d_model: int = Field(default=64, ge=8, le=65_536)
    """Width of the residual stream."""
    n_layers: int = Field(default=2, ge=1, le=1024)
    """Layers."""
    n_heads: int = Field(default=4, ge=1, le=1024)
    """Attention heads a layer; d_model over it must be even."""
    n_kv_heads: int = Field(default=2, ge=1, le=1024)
    """Heads of keys and values that they share; n_heads is a multiple of it."""
    d_ff: int = Field(default=176, ge=8, le=1_000_000)
    """Width of the feed-forward network, or of each expert."""
    max_seq_len: int = Field(default=128, ge=8, le=1_048_576)
    """The longest sequence, in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary embedding's frequencies."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """ε of RMSNorm."""
    tied_embeddings: bool = True
    """Whether the output layer shares the embedding's weights."""
    experts: int = Field(default=0, ge=0, le=4096)
    """Feed-forward networks a layer; 0: one, dense."""
    top_k: int = Field(default=2, ge=1, le=256)
    """Of the experts, for each token."""
    expert_balance: float = Field(default=0.01, ge=0, le=1)
    """Weight of the loss that spreads tokens over the experts."""
    document_end: int = Field(default=0, ge=0, le=2**32 - 1)
    """The token that ends a document."""
    attention: Literal["causal", "document"] = "causal"
    """document: a token sees its own document only, and a document's first one is no target."""

    @model_validator(mode="after")
    def _config(self) -> Model:
        if (self.kind == "hf") != bool(self.config):
            raise ValueError("model.config and model.kind = 'hf' come together: see --hf-config")
        return self

    @model_validator(mode="after")
    def _heads(self) -> Model:
        if self.d_model % self.n_heads:
            raise ValueError(
                f"model.d_model {self.d_model} is no multiple of n_heads {self.n_heads}"
            )
        if (self.d_model // self.n_heads) % 2:
            raise ValueError("model.d_model / n_heads must be even (RoPE rotates pairs)")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}"
            )
        if self.experts and self.top_k > self.experts:
            raise ValueError(f"model.top_k {self.top_k} exceeds experts {self.experts}")
        return self


class Data(Section):
    """Where tokens come from, in words every island can act on by itself."""

    recipe: Literal["docstrings", "text"] = "docstrings"
    """docstrings: what islands without --data read, those of Python's library; text: every island
    has to give its own with --data."""
    path: str = Field(default="", max_length=1024)
    """The creator's own text, where it gives no --data; others are not told of it."""
    tokenizer: str = Field(default="bytes", pattern=r"^(bytes|[0-9a-f]{64})$")
    """bytes, or the BLAKE3 of a tokenizer.json; filled in by --tokenizer."""
    seq_len: int = Field(default=128, ge=8, le=1_048_576)
    """Tokens of a sequence, at most model.max_seq_len."""
    batch_size: int = Field(default=8, ge=1, le=65_536)
    """Sequences of an inner step, on each island."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Of the order in which windows are read."""
    islands: int = Field(default=8, ge=1, le=100_000)
    """Up to so many islands read windows in a round that no other reads."""
    pool_windows: int = Field(default=0, ge=0, le=2**40)
    """Windows that are read at one time lie in one stretch of so many; 0: anywhere."""


class Inner(Section):
    """The inner optimizer, with warm-up and a schedule over inner steps.

    ``muon``: Muon for the matrices inside the layers, AdamW for everything else.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    """Muon is for the matrices inside the layers, with AdamW for everything else."""
    lr: float = Field(default=5e-3, gt=0, le=10)
    """Inner learning rate, once warmed up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.95,
    )
    """β₁ and β₂ of AdamW."""
    eps: float = Field(default=1e-8, gt=0)
    """ε of AdamW."""
    weight_decay: float = Field(default=0.1, ge=0, le=1)
    """Decoupled weight decay, of matrices alone."""
    clip_norm: float = Field(default=1.0, gt=0)
    """The norm that a step's gradient is clipped to."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """How the rate falls after its warm-up; wsd: it stays, and falls at the end."""
    warmup_steps: int = Field(default=20, ge=0, le=MOST_COUNT)
    """Inner steps until the rate is reached."""
    total_steps: int = Field(default=TOTAL_STEPS, ge=1, le=MOST_COUNT)
    """Inner steps until it has fallen. Of a run made with --set, --mode or --preset it follows
    rounds.inner_steps · total_rounds, if it is not set itself; in a --run file it does not."""
    min_lr_ratio: float = Field(default=0.1, ge=0, le=1)
    """What it falls to, as a share of lr."""
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    """Share of total_steps in which it falls, for wsd."""
    keep_moments: bool = True
    """Whether an island's moments outlast a round (clients of fedavg may forget them)."""


class Evaluation(Section):
    """The shared validation shard, served and checked by content hash."""

    digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """BLAKE3 of the shard's bytes; filled in by the run's creator."""
    sequences: int = Field(default=64, ge=1, le=65_536)
    """Sequences of it, and no more than 256 MiB of them."""


class Script(Section):
    """A run whose islands train with a script of their own (``node.join``).

    Then ``model``, ``data``, ``inner`` and ``evaluation`` mean nothing: model, data and inner
    optimizer are the scripts' business. Only names and shapes of the parameters must be the same.
    """

    layout: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """BLAKE3 of the names and shapes of the parameters; all of this table is filled in by
    `node.join`."""
    parameters: int = Field(default=0, ge=0, le=2**40)
    """How many there are."""
    dense: int = Field(default=0, ge=0, le=2**40)
    """Of them, in tensors of two or more dims."""
    frozen: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    """BLAKE3 of what is frozen beside them; where empty, it is not compared."""
    frozen_marks: str = Field(default="", pattern=r"^([0-9a-f]{4})*$", max_length=MARK * MOST_MARKS)
    """A mark of each frozen tensor."""

    @model_validator(mode="after")
    def _whole(self) -> Script:
        if (self.frozen and not self.layout) or (self.frozen_marks and not self.frozen):
            raise ValueError("script.frozen without layout, or frozen_marks without frozen")
        if bool(self.layout) != bool(self.parameters) or self.dense > self.parameters:
            raise ValueError("script.layout, parameters and dense describe no model together")
        return self


class Manifest(Section):
    """The whole run, named by :attr:`run_id`."""

    format: Literal[1] = 1
    """Of the manifest itself."""
    name: str = Field(default="tiny-docs", pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    """What people call the run: small letters, digits and hyphens. Its label has four digits of the
    run id behind it."""
    seed: int = Field(default=0, ge=0, le=2**63 - 1)
    """Of the first parameters, and of what islands draw in common."""
    mode: Mode = "diloco"
    """How the swarm meets: sets defaults of outer, rounds, merge and gossip (modes.md)."""
    model: Model = Model()
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    merge: Merge = Merge()
    gossip: Gossip = Gossip()
    evaluation: Evaluation = Evaluation()
    script: Script = Script()

    @model_validator(mode="after")
    def _groups(self) -> Manifest:
        if self.rounds.groups == "none":
            return self
        coarse = [name for name in self.rounds.allowed_codecs if name in COARSE]
        if coarse:
            raise ValueError(
                f"rounds.groups with codec {coarse[0]}: nobody could send later what is lost where "
                "a group's sum is encoded; use int4 or a finer codec"
            )
        if self.merge.trust != "friendly" or self.merge.rule not in ("auto", "mean", "clip"):
            raise ValueError(
                "rounds.groups with merge.trust open, or a rule that judges every contribution by "
                "itself: relays add them up before; set rounds.groups to none, or merge.rule to "
                "clip and merge.trust to friendly"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any, info: ValidationInfo) -> Any:
        return with_left_out(given) if is_read(info) else with_defaults(given)

    @model_validator(mode="after")
    def _mode(self) -> Manifest:
        check_mode(self.mode, self.outer, self.rounds)
        check_trust(self.rounds, self.merge)
        check_gradients(self.mode, self.outer, self.rounds, self.inner.optimizer)
        check_gossip(self.mode, self.gossip, self.outer, self.rounds, self.merge)
        return self

    @model_validator(mode="after")
    def _fragments(self) -> Manifest:
        count = self.rounds.fragments
        if count > max(1, self.model.n_layers):
            raise ValueError(
                f"rounds.fragments {count} exceeds model.n_layers {self.model.n_layers}: "
                "a fragment has at least one layer"
            )
        return self

    @model_validator(mode="after")
    def _script_whole(self) -> Manifest:
        if self.script.layout and self.mode == "allreduce":
            raise ValueError(
                "mode allreduce: a script takes its own optimizer steps, and in this mode the "
                "swarm takes them; use mode diloco, with rounds.inner_steps 1 if need be"
            )
        if self.script.layout and self.rounds.fragments > 1:
            raise ValueError(
                f"rounds.fragments {self.rounds.fragments}: a script's model is merged as a whole, "
                "since only the script knows its layers; leave rounds.fragments at 1"
            )
        return self

    @model_validator(mode="after")
    def _lengths(self) -> Manifest:
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} exceeds "
                f"model.max_seq_len {self.model.max_seq_len}"
            )
        return self

    @model_validator(mode="after")
    def _new(self, info: ValidationInfo) -> Manifest:
        if not is_read(info):
            check_new(self.mode, self.outer, self.rounds)
            self._check_size()
        return self

    def _check_size(self) -> None:
        """Raise ValueError where it could not be signed; fields count characters, not bytes."""
        config = len(self.model.config.encode())
        if config > MAX_CONFIG_BYTES:
            raise ValueError(f"model.config has {config} bytes, more than {MAX_CONFIG_BYTES}")
        whole, most = len(self.canonical()), MAX_MANIFEST_BYTES - FILLED_IN
        if whole > most:
            raise ValueError(
                f"the run's description has {whole} bytes in its signed form, more than {most}: "
                "make model.config shorter"
            )

    def canonical(self) -> bytes:
        """The bytes that are hashed, signed and sent; equal manifests have equal bytes."""
        return canonical_bytes(self.model_dump(mode="json"))

    @classmethod
    def parse(cls, data: bytes | memoryview) -> Manifest:
        """Read canonical bytes from a peer; raises :class:`Malformed` and nothing else.

        Only the canonical form is taken, so that the run id has one preimage: duplicate or
        missing keys, spaces and text in the place of numbers are refused. What another version of
        Atoll may have made is :class:`~protocols.errors.OtherVersion`.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise Malformed(f"manifest of {len(data)} bytes exceeds {MAX_MANIFEST_BYTES}")
        data = bytes(data)
        try:
            manifest = cls.model_validate_json(data, context=READING)  # bounds the depth itself
        except ValidationError as error:
            raise unread(error, cls) from error
        if (canonical := manifest.canonical()) != data:
            raise not_canonical(data, canonical)
        return manifest

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's, but without the cached id: a changed copy is another run."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("run_id", None)
        return copied

    @cached_property
    def run_id(self) -> bytes:
        """BLAKE3-256 of the canonical bytes: 32 bytes."""
        return blake3(self.canonical()).digest()

    @property
    def numbered(self) -> bool:
        """Whether batches have numbers through the run (:mod:`node.trainer.numbers`).

        Not with a script, which reads what it likes, nor in pairs, where nobody counts for all.
        """
        alone = self.rounds.one_is_enough and self.mode not in PAIRED
        return alone and not self.script.layout

    @property
    def label(self) -> str:
        """The run's name for people: ``tiny-docs-8c41``."""
        return f"{self.name}-{self.run_id.hex()[:4]}"


def load(path: Path) -> Manifest:
    """The manifest in a TOML file; keys left out have their defaults.

    Raises :class:`~protocols.errors.OperatorError` E204 for a file that cannot be read, an
    unknown key (naming the nearest known one) or a value out of bounds.
    """
    return check(Manifest, read_toml(path), str(path))


def difference(ours: Manifest, theirs: Manifest) -> list[str]:
    """Where two manifests differ, for E201: ``["model.n_layers 12 != 16"]``."""
    left, right = flat(ours.model_dump(mode="json")), flat(theirs.model_dump(mode="json"))
    return [f"{key} {left[key]} != {right[key]}" for key in left if left[key] != right[key]]
