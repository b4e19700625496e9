"""The manifest: what a run is. Its hash is the run id, its creator signs it, joiners obey it.

Everything that must be equal on all islands stands here and nothing else does: how an island
lays out its own GPUs, which device it has, or where it keeps files is its own business.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Codec = Literal["fp32", "bf16", "int8", "int4"]


class Section(BaseModel):
    """A frozen table of the manifest; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Model(Section):
    """A Llama-style decoder (RMSNorm, RoPE, SwiGLU, grouped-query attention)."""

    vocab_size: int = Field(256, ge=2, le=1_000_000)
    d_model: int = Field(96, ge=8, le=65_536)
    n_layers: int = Field(3, ge=1, le=1024)
    n_heads: int = Field(4, ge=1, le=1024)
    n_kv_heads: int = Field(2, ge=1, le=1024)
    d_ff: int = Field(256, ge=8, le=1_000_000)
    max_seq_len: int = Field(128, ge=8, le=1_048_576)
    rope_theta: float = Field(10_000.0, gt=0)
    norm_eps: float = Field(1e-5, gt=0)
    tied_embeddings: bool = True

    @model_validator(mode="after")
    def _heads(self) -> Model:
        if self.d_model % self.n_heads:
            raise ValueError(f"model.d_model {self.d_model} is no multiple of n_heads {self.n_heads}")
        if (self.d_model // self.n_heads) % 2:
            raise ValueError("model.d_model / n_heads must be even (RoPE rotates pairs)")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"model.n_heads {self.n_heads} is no multiple of n_kv_heads {self.n_kv_heads}"
            )
        return self


class Data(Section):
    """Where tokens come from, in words every island can act on by itself."""

    recipe: Literal["docstrings", "text"] = "docstrings"
    path: str = ""  # for "text": each island's own files; contents may differ between islands
    tokenizer: Literal["bytes"] = "bytes"
    seq_len: int = Field(128, ge=8, le=1_048_576)
    batch_size: int = Field(16, ge=1, le=65_536)  # sequences per inner step and island
    seed: int = Field(0, ge=0, le=2**63 - 1)


class Inner(Section):
    """The inner optimizer: AdamW with warm-up and a schedule over inner steps."""

    lr: float = Field(3e-3, gt=0, le=10)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.1, ge=0, le=1)
    clip_norm: float = Field(1.0, gt=0)
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    warmup_steps: int = Field(20, ge=0)
    total_steps: int = Field(2000, ge=1)
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    decay_fraction: float = Field(0.2, gt=0, le=1)  # of total_steps, for "wsd"


class Outer(Section):
    """The outer optimizer (DiLoCo, 2311.08105): SGD with Nesterov momentum on pseudo-gradients.

    ``lr`` and ``momentum`` are reached over ``warmup_rounds`` from ``lr_start`` and
    ``momentum_start``.
    """

    lr: float = Field(0.7, gt=0, le=10)
    momentum: float = Field(0.9, ge=0, lt=1)
    lr_start: float = Field(1.0, gt=0, le=10)
    momentum_start: float = Field(0.5, ge=0, lt=1)
    warmup_rounds: int = Field(30, ge=0)


class Rounds(Section):
    """When and how the swarm meets."""

    inner_steps: int = Field(100, ge=1, le=100_000)  # H of the fastest island
    overlap_steps: int = Field(0, ge=0)  # inner steps taken between snapshot and merge
    total_rounds: int = Field(100, ge=1)
    codec: Codec = "int4"
    quorum: float = Field(0.5, gt=0, le=1)  # share of live islands that must be ready
    grace_fraction: float = Field(0.1, ge=0, le=10)  # of a round, then go without the late
    min_grace_s: float = Field(0.25, ge=0)
    max_staleness: int = Field(2, ge=0)  # rounds; older local progress is dropped
    replay_rounds: int = Field(5, ge=1, le=64)  # kept for those who missed some
    eval_every: int = Field(1, ge=0)  # rounds; 0: never

    @model_validator(mode="after")
    def _overlap(self) -> Rounds:
        if self.overlap_steps > self.inner_steps // 4:
            raise ValueError("rounds.overlap_steps exceeds a quarter of rounds.inner_steps")
        return self


class Evaluation(Section):
    """The shared validation shard, served and checked by content hash."""

    digest: str = Field("", pattern=r"^([0-9a-f]{64})?$")  # BLAKE3 of the shard's bytes
    sequences: int = Field(64, ge=1, le=65_536)


class Manifest(Section):
    """The whole run. See :func:`Manifest.run_id`."""

    format: Literal[1] = 1
    name: str = Field("tiny-docs", pattern=r"^[a-z0-9][a-z0-9-]{0,40}$")
    seed: int = Field(0, ge=0, le=2**63 - 1)
    model: Model = Model()
    data: Data = Data()
    inner: Inner = Inner()
    outer: Outer = Outer()
    rounds: Rounds = Rounds()
    evaluation: Evaluation = Evaluation()

    @model_validator(mode="after")
    def _lengths(self) -> Manifest:
        if self.data.seq_len > self.model.max_seq_len:
            raise ValueError(
                f"data.seq_len {self.data.seq_len} exceeds model.max_seq_len {self.model.max_seq_len}"
            )
        return self
