"""The tables of the manifest that say how a swarm trains together: outer rule, rounds, merge.

What a mode sets of them is in :mod:`bootstrap.manifest_modes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from protocols.bounds import MAX_FRAGMENTS, NO_BOUND

Mode = Literal[
    "diloco",
    "streaming",
    "eager",
    "gossip",
    "push-sum",
    "async",
    "server",
    "fedavg",
    "allreduce",
    "sparta",
    "btm",
]
OuterRule = Literal[
    "sgd",
    "nesterov",
    "heavyball",
    "adam",
    "yogi",
    "sparseloco",
    "delayed-nesterov",
    "adamw",
    "onebit-adam",
    "powersgd",
]
Codec = Literal["fp32", "bf16", "fp16", "int8", "int4", "int2", "int1", "top12", "top3"]
CodecChoice = Literal[Codec, "auto"]
FINEST_FIRST: tuple[str, ...] = get_args(Codec)
COARSE = ("int2", "int1", "top12", "top3")  # lose so much that it has to be sent later
SPARSE = ("top12", "top3")
MOST_COUNT = 2**63 - 1  # of steps and rounds: the largest signed 64-bit integer
TOTAL_STEPS = 3000  # inner steps, until the rate has fallen, where nothing says how many
ONE = 1e-3  # quorum: one island is enough, in any swarm

# defaults of each outer optimizer (diloco.optimizers has the sources): η, and μ or β₁; where there
# are none, those of the fields of Outer, which are Nesterov's, hold
OUTER_DEFAULTS: dict[str, dict[str, Any]] = {
    "nesterov": {},
    "delayed-nesterov": {},
    "sgd": {"lr": 1.0, "momentum": 0.0},
    "sparseloco": {"lr": 1.0, "momentum": 0.0},
    "heavyball": {"lr": 1.0, "momentum": 0.9},
    "adam": {"lr": 0.01, "momentum": 0.9},
    "yogi": {"lr": 0.01, "momentum": 0.9},
    "adamw": {"lr": 1.0, "momentum": 0.0, "warmup_rounds": 0},  # [inner] has its rates
    "onebit-adam": {"lr": 1.0, "momentum": 0.0},
    "powersgd": {"lr": 1.0, "momentum": 0.0, "warmup_rounds": 0},
}
# what the others are to those who choose rates and refuse combinations; a new rule is in none of
# these if it steps by D itself and has momentum, as Nesterov's does
OF_GRADIENTS = ("adamw", "onebit-adam", "powersgd")  # each round is of one gradient
SCALES = ("adam", "yogi")  # divides D by what it usually is, so its η is one of its own
NO_MOMENTUM = ("sgd", "sparseloco")
# what η and μ of a round follow from
SCHEDULED = {"lr", "momentum", "lr_start", "momentum_start", "warmup_rounds"}


class Section(BaseModel):
    """A frozen table of the manifest; unknown keys are refused.

    The line below a field is what users read of it (``node config explain``, docs/settings.md).
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True
    )


class Outer(Section):
    """The outer optimizer: what is done with the merged pseudo-gradient (:mod:`diloco.optimizers`).

    ``lr`` and ``momentum`` (β₁ of adam and yogi) are reached over ``warmup_rounds`` from
    ``lr_start`` and ``momentum_start``. Only the Nesterov rules are warmed up by default.
    adamw, onebit-adam and powersgd see gradients, and have the rates and the decay of the table
    ``inner``; of onebit-adam ``warmup_rounds`` are those before its second moments are frozen.
    """

    optimizer: OuterRule = "nesterov"
    """How the merged pseudo-gradient is applied; each rule has default rates of its own."""
    lr: float = Field(default=0.7, gt=0, le=10)
    """Outer learning rate η, once warmed up."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Outer momentum μ, once warmed up; β₁ of adam and yogi."""
    lr_start: float = Field(default=1.0, gt=0, le=10)
    """η in the first round; where a rule has no warm-up of its own, and in mode eager, it is lr by
    default."""
    momentum_start: float = Field(default=0.5, ge=0, lt=1)
    """μ in the first round; likewise momentum by default, and always with adam and yogi."""
    warmup_rounds: int = Field(default=10, ge=0, le=MOST_COUNT)
    """Rounds from the first rates to the last; of onebit-adam those before its second moments
    are frozen."""
    beta2: float = Field(default=0.99, ge=0, lt=1)
    """β₂ of adam and yogi."""
    epsilon: float = Field(default=1e-3, gt=0, le=1)
    """Of adam and yogi, added to the root of the second moment: τ of their paper."""
    rank: int = Field(default=4, ge=1, le=256)
    """Columns of the factors of powersgd."""

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        known = OUTER_DEFAULTS.get(str(given.get("optimizer"))) if is_table(given) else None
        if not known:
            return given
        whole = {**known, **given}
        return {"lr_start": whole["lr"], "momentum_start": whole["momentum"], **whole}

    @property
    def schedule(self) -> dict[str, Any]:
        """What η and μ of a round follow from (:func:`diloco.outer.outer_rates`)."""
        return self.model_dump(include=SCHEDULED)

    @property
    def highest_lr(self) -> float:
        """η where it is largest: at the end of its warm-up, or at the start."""
        return max(self.lr, self.lr_start) if self.warmup_rounds else self.lr

    @property
    def moving(self) -> bool:
        """Whether it has momentum, by which merged work also moves later rounds."""
        return bool(self.momentum or self.momentum_start)

    @model_validator(mode="after")
    def _plain(self) -> Outer:
        if self.optimizer in NO_MOMENTUM and self.moving:
            raise ValueError(
                f"outer.optimizer {self.optimizer} has no momentum: leave outer.momentum and "
                "outer.momentum_start at 0, or use heavyball or nesterov"
            )
        return self


class Rounds(Section):
    """When and how the swarm meets."""

    inner_steps: int = Field(default=50, ge=1, le=10_000_000)
    """H: inner steps of the fastest island from one round to the next."""
    most_steps: int = Field(default=0, ge=0, le=10_000_000)
    """0: always inner_steps. Else H lies between inner_steps and this, such that waiting for bytes
    takes at most the share `exposed` of a round."""
    overlap_steps: int = Field(default=0, ge=0, le=MOST_COUNT)
    """Inner steps taken between an island's snapshot and the merge, while bytes are on their way;
    for models that are merged whole. As many as inner_steps (mode eager) are all of H, also where
    most_steps lets it grow."""
    fragments: int = Field(default=1, ge=1, le=MAX_FRAGMENTS)
    """1: the model is merged whole. Else in so many fragments that take turns (streaming)."""
    tau: int = Field(default=0, ge=0, le=MOST_COUNT)
    """Inner steps that a fragment's result may take, at most a quarter of inner_steps; 0: as many
    as the measured links ask for."""
    alpha: float = Field(default=0.5, ge=0, lt=1)
    """What an island keeps of its difference from a merged fragment; 0 where a round begins as soon
    as one island is ready."""
    total_rounds: int = Field(default=60, ge=1, le=MOST_COUNT)
    """Rounds until the run is over."""
    codec: CodecChoice = "int4"
    """How pseudo-gradients are compressed; auto: one of `codecs`, chosen for each round."""
    codecs: tuple[Codec, ...] = Field(default=("int4", "int2"), max_length=len(FINEST_FIRST))
    """For codec auto: those to choose from by the measured links, the finest first."""
    exposed: float = Field(default=0.05, gt=0, lt=1)
    """Share of a round that may be waiting for bytes, where codec or H are chosen by it."""
    feedback: float = Field(default=0.95, ge=0, le=1)
    """How much of what a coarse codec lost is added to what is sent next."""
    groups: Literal["none", "region", "grid"] = "none"
    """Whether parts pass through one member of each site (region), or of each row of a grid."""
    max_group: int = Field(default=64, ge=4, le=512)
    """More members than that stand in a grid."""
    quorum: float = Field(default=0.5, gt=0, le=1)
    """Share of the live islands that must be ready before a round begins."""
    grace_fraction: float = Field(default=0.1, ge=0, le=10)
    """How long a round with a quorum waits for the others, as a share of a round's time."""
    min_grace_s: float = Field(default=1.0, ge=0)
    """The least that this bound comes to, in seconds; also how long a trainer waits for a merge,
    1 s at least, before it trains on."""
    staleness: int = Field(default=NO_BOUND, ge=NO_BOUND, le=MOST_COUNT)
    """Rounds that a live island may miss before the others wait for it: 0 is bulk-synchronous,
    more stale-synchronous; -1: no bound, quorum and grace alone decide (asynchronous)."""
    dynamic_steps: bool = True
    """Whether slower islands take fewer inner steps, so that all are done at about one time."""
    clients: float = Field(default=1.0, gt=0, le=1)
    """Share of the islands that train and contribute in a round, drawn anew for each."""
    share: float = Field(default=1.0, gt=0, le=1)
    """Share of the coordinates that a round merges, the same on all islands (mode sparta)."""
    owners: Literal["members", "servers"] = "members"
    """Who merges the parts: all members, or nodes of --role server while one is there."""
    align: bool = False
    """Whether work that comes whole rounds late is turned towards the outer momentum."""
    max_staleness: int = Field(default=2, ge=0, le=MOST_COUNT)
    """Local progress is dropped after missing more rounds than this that nobody keeps; in pairs an
    answer to a letter may be this many own rounds late."""
    replay_rounds: int = Field(default=5, ge=1, le=64)
    """Rounds that members keep for those that missed some: more where 64 MB hold them, fewer where
    they take more than the outer parameters and the momentum do."""
    eval_every: int = Field(default=1, ge=0, le=MOST_COUNT)
    """Rounds from one evaluation on the shared validation shard to the next; 0: never."""

    @property
    def allowed_codecs(self) -> tuple[str, ...]:
        """Those that a round of this run may have, the finest first."""
        return self.codecs if self.codec == "auto" else (self.codec,)

    def steps_for(self, wanted: int) -> int:
        """H of all islands, where ``wanted`` is the most that anybody's links ask for."""
        return min(self.most_steps, max(self.inner_steps, wanted)) or self.inner_steps

    @property
    def overlaps_all(self) -> bool:
        """Whether a transfer has the time of all H inner steps, however many these become."""
        return self.overlap_steps == self.inner_steps

    @property
    def feeds_back(self) -> bool:
        """Whether islands keep what a codec lost, which takes one more vector of memory."""
        return any(name in COARSE for name in self.allowed_codecs)

    @property
    def sparse(self) -> str | None:
        """A codec that sends a few elements of many, where the run may have one."""
        return next((name for name in self.allowed_codecs if name in SPARSE), None)

    @property
    def one_is_enough(self) -> bool:
        """Whether rounds begin as soon as one island is ready: then islands have no common beat."""
        return self.quorum <= ONE

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, given: Any) -> Any:
        # what one island keeps of work that is alone in a round would be merged over and over
        return {"alpha": 0.0, **given} if is_table(given) and _one_is_enough(given) else given

    @model_validator(mode="after")
    def _codecs(self) -> Rounds:
        if not self.codecs or len(set(self.codecs)) != len(self.codecs):
            raise ValueError("rounds.codecs must name at least one codec, and none twice")
        ladder = sorted(self.codecs, key=FINEST_FIRST.index)
        if list(self.codecs) != ladder:
            raise ValueError("rounds.codecs must go from fine to coarse: " + ", ".join(ladder))
        coarse = [name for name in self.allowed_codecs if name in COARSE]
        if coarse and not self.feedback:
            raise ValueError(
                f"rounds.feedback = 0 with codec {coarse[0]}: what it loses has to be sent later, "
                "or training goes astray; set rounds.feedback, 0.95 say, or use int4"
            )
        return self

    @model_validator(mode="after")
    def _overlap(self) -> Rounds:
        if self.overlap_steps > self.inner_steps:
            raise ValueError("rounds.overlap_steps exceeds rounds.inner_steps")
        return self

    @model_validator(mode="after")
    def _streaming(self) -> Rounds:
        if self.fragments > self.inner_steps:
            raise ValueError("rounds.fragments exceeds rounds.inner_steps: each needs a turn")
        if 0 < self.most_steps < self.inner_steps:
            raise ValueError("rounds.most_steps is less than rounds.inner_steps")
        if self.tau > self.inner_steps // 4:
            raise ValueError("rounds.tau exceeds a quarter of rounds.inner_steps")
        if self.fragments > 1 and self.overlap_steps:
            raise ValueError(
                "rounds.overlap_steps is for whole models: with rounds.fragments set it to 0, "
                "and rounds.tau to as many steps if they are not to follow from the links"
            )
        return self


class Merge(Section):
    """How contributions become one.

    ``friendly``: members mean well, and one whose training blew up must not drag the others along:
    the mean, each clipped to the median norm. ``open``: strangers are let in, some of whom lie:
    the geometric median of five or more, CenteredClip of three or four.
    """

    trust: Literal["friendly", "open"] = "friendly"
    """friendly: all mean well, and one whose training blew up is clipped; open: strangers are let
    in, and rules that bear liars are used."""
    rule: Literal[
        "auto", "mean", "clip", "median", "trimmed", "geometric-median", "centered-clip"
    ] = "auto"
    """A rule to use in the place of the one that `trust` stands for."""
    weights: Literal["tokens", "rate"] = "tokens"
    """What a contribution counts for: its tokens, or tokens² / steps (2604.21428)."""


def _one_is_enough(rounds: Mapping[str, Any]) -> bool:
    """As :attr:`Rounds.one_is_enough`, of a table that is not validated yet."""
    try:
        return float(rounds.get("quorum", 1.0)) <= ONE
    except (TypeError, ValueError, OverflowError):
        return False  # refused as what it is


def is_table(value: Any) -> bool:
    """Whether it is what TOML calls a table."""
    return isinstance(value, Mapping)
