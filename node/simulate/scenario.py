"""What is simulated: a frozen table of settings, from flags or a TOML file.

>>> Scenario(mode="gossip", islands=8, bandwidth="20Mbit")
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)

from bootstrap import manifest_rounds
from bootstrap.manifest_gossip import PAIRED
from bootstrap.manifest_modes import OF_PAIRS
from bootstrap.manifest_rounds import FINEST_FIRST, Codec, CodecChoice
from bootstrap.validation import bad_config, explain, read_toml
from node.setting_values import speed
from protocols.errors import OperatorError

Mode = Literal[manifest_rounds.Mode, "powersgd", "onebit-adam"]
MODES: tuple[str, ...] = get_args(Mode)
IN_FRAGMENTS = ("streaming", "async", "server", "fedavg", *PAIRED)  # modes that may be
# modes that merge gradients: a run's mode allreduce, with that outer optimizer
GRADIENTS = {"allreduce": "adamw", "powersgd": "powersgd", "onebit-adam": "onebit-adam"}
# modes whose inner steps from one merge to the next are fixed
FIXED_STEPS = ("btm", "sparta", *GRADIENTS)
# modes whose outer step has an optimizer to choose
WITH_OUTER = ("diloco", "streaming", "eager", "async", "server", "fedavg")
_BUT_ONEBIT = tuple(mode for mode in MODES if mode != "onebit-adam")
# settings that some modes alone read
READ_IN: dict[str, tuple[str, ...]] = {
    "codec": _BUT_ONEBIT,
    "codecs": _BUT_ONEBIT,
    "feedback": (*WITH_OUTER[:4], "allreduce"),
    "dynamic_steps": tuple(mode for mode in MODES if mode not in GRADIENTS),
    "outer": WITH_OUTER,
    "align": WITH_OUTER,
    "outer_lr": (*WITH_OUTER, "gossip"),
    "outer_momentum": (*WITH_OUTER, "gossip"),
    "warmup_rounds": WITH_OUTER,
    "delay": ("streaming",),
    "alpha": ("streaming",),
    "pairs": ("gossip",),
    "neighbours": PAIRED,
    "control": PAIRED,
    "extra": PAIRED,
    "disagreement": PAIRED,
    "quorum": ("diloco",),
    "bound": ("async", "server"),
    "sample": ("fedavg",),
    "share": ("sparta",),
    "rank": ("powersgd",),
}
STREAMED = 2  # fragments of mode streaming, where nothing else is said
PARTS = 3  # that the "bytes" model is of, as many as have parameters
START_LR = 8e-3  # of what a "llama" starts from
HEADS, KEY_HEADS = 4, 2  # of the "llama" model
MAX_SERVERS = 256


def _bytes_a_second(value: object) -> object:
    """A speed with its unit, or a number of bytes a second; raises ValueError for other text.

    Who types 20 without a unit may have meant either.
    """
    found = speed(value)
    if isinstance(value, str) and found and not any(map(str.isalpha, value.partition("/")[0])):
        raise ValueError(f"{value!r} is no number with a unit, as in 20Mbit or 2.5MB")
    return found


def _listed(value: object) -> object:
    """A list, also as a command gets it: names with commas between them, as in TOML or bare."""
    if isinstance(value, str):
        bare = value.strip().removeprefix("[").removesuffix("]")
        return tuple(one.strip(" '\"") for one in bare.split(","))
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is no list, as in int4,int2")
    return value


class Scenario(BaseModel):
    """One simulated run; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    mode: Mode = "diloco"
    islands: int = Field(default=4, ge=1, le=256)
    rounds: int = Field(default=20, ge=1, le=100_000)
    inner_steps: int = Field(default=20, ge=0, le=100_000)  # 0: from what the link would expose
    seed: int = Field(default=0, ge=0, le=10**12)
    # the network
    latency: float = Field(default=0.05, ge=0)  # seconds one way
    bandwidth: Annotated[float, BeforeValidator(_bytes_a_second)] = Field(default=12.5e6, gt=0)
    narrow: int = Field(default=0, ge=0)  # islands whose links carry a part of that
    narrow_factor: float = Field(default=10.0, ge=1)
    loss: float = Field(default=0.0, ge=0, lt=0.9)  # of packets
    step_s: float = Field(default=0.1, ge=1e-4, le=3600)  # virtual seconds an inner step takes
    # who misbehaves, and how
    stragglers: int = Field(default=0, ge=0)
    straggler_factor: float = Field(default=4.0, ge=1)
    churn: float = Field(default=0.0, ge=0, le=10)  # share of the islands replaced per 10 rounds
    attackers: int = Field(default=0, ge=0)
    attack: float = 3.0  # they send −attack · Δ
    # the algorithm
    codec: CodecChoice = "int4"
    # of "auto": a round's, or in pairs each letter's own; of certified rounds int4 and int2
    codecs: Annotated[tuple[Codec, ...], BeforeValidator(_listed)] = Field(
        default=("bf16", "int8"), min_length=1, max_length=len(FINEST_FIRST)
    )
    most_steps: int = Field(default=0, ge=0, le=100_000)  # > 0: H from what exchanges take
    exposed: float = Field(default=0.05, gt=0, lt=1)  # share of a round, for both
    feedback: float = Field(default=0.95, ge=0, le=1)
    inner: Literal["adamw", "muon"] = "adamw"
    inner_lr: float = Field(default=3e-3, gt=0)
    schedule: Literal["constant", "cosine"] = "constant"  # of the inner learning rate
    warmup: float = Field(default=0.04, ge=0, lt=1)  # share of the run, of "cosine"
    outer: Literal["nesterov", "sgd", "heavyball", "adam", "yogi", "sparseloco"] = "nesterov"
    outer_lr: float | None = Field(default=None, gt=0, le=10)
    outer_momentum: float | None = Field(default=None, ge=0, lt=1)
    warmup_rounds: int = Field(default=10, ge=0)
    rule: Literal[
        "mean", "clip", "median", "trimmed", "geometric-median", "centered-clip", "open"
    ] = "clip"
    fragments: int = Field(default=0, ge=0)  # 0: the model is merged whole, but in streaming
    delay: int = Field(default=0, ge=0)  # τ of streaming; 0: from the links, as they are measured
    alpha: float = Field(default=0.5, ge=0, le=1)  # of streaming
    pairs: Literal["noloco", "average"] = "noloco"
    neighbours: int = Field(default=1, ge=1)  # exchanges in a round; of push-sum: receivers
    quorum: float = Field(default=0.5, gt=0, le=1)  # of diloco: 1 waits for everybody
    control: bool = False  # exchanges of gossip follow from disagreement: up to ``extra`` more
    extra: int = Field(default=2, ge=0, le=8)
    disagreement: float = Field(default=3.0, gt=0)  # allowed, times what inner steps moved
    bound: int = Field(default=-1, ge=-1)  # of staleness, in rounds; -1: none. Of server: 0
    dynamic_steps: bool = True  # fewer inner steps for slower islands
    align: bool = False  # turn stale work towards the momentum
    # servers of modes server and fedavg; 0: one
    owners: int = Field(default=0, ge=0, le=MAX_SERVERS)
    sample: float = Field(default=0.5, gt=0, le=1)  # of the clients, for fedavg
    share: float = Field(default=0.005, gt=0, le=1)  # of the coordinates a step, for sparta
    rank: int = Field(default=4, ge=1, le=256)  # of powersgd
    # "bytes": the model of diloco/loop.py; "llama": the one that `node start` trains, over bytes
    model: Literal["bytes", "llama"] = "bytes"
    hidden: int = Field(default=384, ge=8, le=8192)  # width of the model
    layers: int = Field(default=2, ge=1, le=64)  # of "llama"
    context: int = Field(default=48, ge=8, le=4096)  # bytes that "llama" looks at
    # inner steps taken before the run began, each on as much text as one step of all islands
    start_steps: int = Field(default=0, ge=0)
    start_islands: int = Field(default=0, ge=0, le=256)  # whose text that is; 0: as many as it has
    batch: int = Field(default=64, ge=1, le=65_536)  # predicted bytes, or sequences of "llama"
    eval_every: int = Field(default=1, ge=1)  # rounds

    @property
    def allowed_codecs(self) -> tuple[str, ...]:
        """Those that its exchanges may have."""
        return self.codecs if self.codec == "auto" else (self.codec,)

    @property
    def at_will(self) -> bool:
        """Whether islands bring their work when they have it, and nobody is waited for."""
        return self.mode == "async" or (self.mode == "server" and self.bound != 0)

    @property
    def outer_rule(self) -> str:
        """The outer optimizer by its name in a manifest: at will, Nesterov's is the delayed one."""
        return "delayed-nesterov" if self.at_will and self.outer == "nesterov" else self.outer

    @property
    def by_steps(self) -> bool:
        """Whether the run is over when its inner steps are taken, however many rounds that makes.

        Where transfers overlap with inner steps a round has more of these than H, and where H
        follows from the links nobody knows how many; where nobody waits for anybody there are no
        common rounds.
        """
        return self.at_will or self.most_steps > 0 or self.mode in ("streaming", "eager", *PAIRED)

    @property
    def each_step(self) -> bool:
        """Whether all exchange something after every inner step."""
        return self.mode in GRADIENTS or self.mode == "sparta"

    @property
    def pieces(self) -> int:
        """Fragments that the model is merged in."""
        return self.fragments or (STREAMED if self.mode == "streaming" else 1)

    @property
    def parts(self) -> int:
        """Layers of the model, each of which is in one fragment."""
        return self.layers if self.model == "llama" else PARTS

    @property
    def noloco(self) -> tuple[float, float]:
        """NoLoCo's β and α: the outer learning rate and momentum."""
        from diloco.mixing import ALPHA, BETA

        beta = BETA if self.outer_lr is None else self.outer_lr
        return beta, ALPHA if self.outer_momentum is None else self.outer_momentum

    def start(self) -> Scenario:
        """What the parameters that all islands start from are made by: equal for all algorithms."""
        kept = ("seed", "islands", "model", "hidden", "layers", "context", "start_steps")
        return Scenario(
            **{name: getattr(self, name) for name in kept},
            batch=self.batch * (self.start_islands or self.islands),
            inner_lr=START_LR if self.model == "llama" else 3e-3,
            schedule="cosine",
            rounds=max(1, self.start_steps),
            inner_steps=1,
        )

    @model_validator(mode="before")
    @classmethod
    def _of_mode(cls, given: Any) -> Any:
        """What a mode stands for, as in a run's manifest, where nothing else is said."""
        if not isinstance(given, Mapping):
            return given
        wanted: dict[str, Any] = {}
        if given.get("mode") == "server":
            wanted["bound"] = 0
        if given.get("mode") in PAIRED:
            wanted["codec"] = OF_PAIRS["codec"]
        if given.get("codec") == "auto" and given.get("mode") not in PAIRED:
            wanted["codecs"] = manifest_rounds.Rounds.model_fields["codecs"].default
        return wanted | dict(given)

    @model_validator(mode="after")
    def _combination(self) -> Scenario:
        self._check_fragments()
        self._check_rounds()
        if self.mode in PAIRED:
            self._check_pairs()
        self._check_islands()
        return self

    def _check_fragments(self) -> None:
        """Whether the model can be merged in so many."""
        if self.model == "llama" and self.hidden % (2 * HEADS):
            raise ValueError(f"hidden {self.hidden} of a llama is no multiple of {2 * HEADS}")
        if self.pieces > 1 and self.mode not in IN_FRAGMENTS:
            raise ValueError(
                f"fragments {self.pieces} with mode {self.mode}, which merges the model whole; "
                f"use mode {' or '.join(IN_FRAGMENTS)}"
            )
        if self.pieces > self.parts:
            raise ValueError(
                f"fragments {self.pieces} of model {self.model}, which has {self.parts} layers: "
                "some would be empty; take fewer"
            )

    def _check_rounds(self) -> None:
        """Whether rounds of the mode can be so long, and have servers."""
        if self.most_steps and self.mode in FIXED_STEPS:
            raise ValueError(
                f"most_steps {self.most_steps} with mode {self.mode}: the inner steps between its "
                "merges do not follow from the links; leave it away"
            )
        if self.owners and self.mode not in ("server", "fedavg"):
            raise ValueError(
                f"owners {self.owners} with mode {self.mode}, where every island owns a part; "
                "use mode server"
            )

    def _check_pairs(self) -> None:
        """Whether islands that meet in pairs can do so."""
        from diloco import mixing

        if self.rule not in ("clip", "mean"):
            raise ValueError(
                f"rule {self.rule} with mode {self.mode}: rules other than the mean are simulated "
                "with modes of certified rounds alone; use diloco"
            )
        if self.mode == "gossip" and self.pairs == "noloco":
            beta, alpha = self.noloco
            mixing.check_noloco(alpha, beta, beta)
        averages = self.mode == "gossip" and self.pairs == "average"
        if averages and (self.outer_lr, self.outer_momentum) != (None, None):
            raise ValueError(
                "outer_lr or outer_momentum with pairs average, which has no outer step; use pairs "
                "noloco"
            )

    def _check_islands(self) -> None:
        """Whether there are as many as are replaced, slow, or attack."""
        if self.churn and self.islands < 2:
            raise ValueError("churn of one island: who comes has nobody to get the state from")
        if self.stragglers + self.attackers > self.islands:
            raise ValueError("more stragglers and attackers than islands")
        if self.stragglers + self.narrow > self.islands:
            raise ValueError("more stragglers and narrow links than islands")

    @model_validator(mode="after")
    def _is_read(self) -> Scenario:
        """Refuse settings that would change nothing and yet stand in the result."""
        for name, modes in READ_IN.items():
            value = getattr(self, name)
            if self.mode in modes or value == type(self).model_fields[name].default:
                continue
            few = len(modes) <= len(WITH_OUTER)
            others = f", or use mode {' or '.join(modes)}" if few else ""
            raise ValueError(
                f"{name} {value} with mode {self.mode}, which does not read it; leave it "
                f"away{others}"
            )
        return self

    @model_validator(mode="after")
    def _is_a_run(self) -> Scenario:
        """What a run's manifest refuses is refused here, in its words."""
        from node.simulate.run import manifest_of

        # where H is chosen later, one that lets everything else be
        steps = self.inner_steps or self.most_steps or max(1, 4 * self.delay, self.pieces)
        try:
            manifest_of(self.model_copy(update={"inner_steps": steps}), self.rounds)
        except OperatorError as error:
            raise ValueError(error.why) from error
        return self


class Diverged(OperatorError):
    """E204: arithmetic has ended, there is nothing to send or to learn from any more."""

    def __init__(self, what: str) -> None:
        super().__init__(
            "E204",
            "the simulated run diverged",
            f"{what} is no longer a finite number",
            "lower inner_lr, outer_lr or attack, or take another merge rule with --set rule=",
            exit_code=2,
        )


def load(path: Path | None, changes: Mapping[str, Any]) -> Scenario:
    """The scenario in a TOML file, or the usual one, with changes. Raises OperatorError E204."""
    values = {**(read_toml(path) if path is not None else {}), **changes}
    try:
        return Scenario.model_validate(values)
    except ValidationError as error:
        why = "\n       ".join(explain(error, Scenario))
        raise bad_config("bad scenario", why, "correct what is named above") from error
