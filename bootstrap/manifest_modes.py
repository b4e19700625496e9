"""Modes: names for ways to meet (docs/modes.md), and what each sets of the manifest's tables.

A mode sets the defaults of the knobs in :mod:`bootstrap.manifest_rounds`, so that
``mode = "async"`` alone is a whole description; the manifest holds all knobs as they came
out, and each may be set to something else. Nothing but the knobs is looked at later, except where
a mode is another way of training altogether (gossip, eager, allreduce).
"""

from __future__ import annotations

from typing import Any

from bootstrap.manifest_rounds import (
    COARSE,
    MOST_COUNT,
    OF_GRADIENTS,
    ONE,
    SCALES,
    TOTAL_STEPS,
    Merge,
    Outer,
    Rounds,
    Section,
    is_table,
)

_ALONE = {"quorum": ONE, "grace_fraction": 0.0, "min_grace_s": 0.0}

# "auto" goes without fp32: bf16 loses less of parameters than islands differ by
OF_PAIRS = {"codec": "bf16", "codecs": ("bf16", "int8"), "max_staleness": 4}

# what a mode stands for, where the manifest says nothing else
MODE_DEFAULTS: dict[str, dict[str, dict[str, Any]]] = {
    "async": {
        "rounds": {**_ALONE, "eval_every": 10},  # every arrival is a round
        "outer": {"optimizer": "delayed-nesterov"},
        "merge": {"weights": "rate"},
    },
    "server": {"rounds": {"owners": "servers", "staleness": 0}},
    "gossip": {  # NoLoCo: η = β, μ = α of its paper
        "rounds": OF_PAIRS,
        "outer": {"optimizer": "heavyball", "lr": 0.7, "momentum": 0.5, "warmup_rounds": 0},
    },
    "push-sum": {
        "rounds": OF_PAIRS,
        "outer": {"optimizer": "sgd", "warmup_rounds": 0},
        "gossip": {"rule": "push-sum"},
    },
    "fedavg": {"rounds": {"clients": 0.5}, "outer": {"optimizer": "sgd"}},
    "btm": {
        "rounds": {"total_rounds": 1, "inner_steps": 1000, "staleness": 0},
        "outer": {"optimizer": "sgd"},
    },
}
FROZEN_SHARE = 0.15  # of the rounds of 1-bit Adam, before its second moments are frozen
EAGER_LR = 0.4  # diloco/eager.py says why
SPARTA: dict[str, dict[str, Any]] = {
    "rounds": {"inner_steps": 1, "share": 0.005, "codec": "bf16", "eval_every": 100},
    "outer": {"optimizer": "sgd"},
}
# knobs of rounds that belong to a mode, for callers with defaults of their own
MODE_ROUNDS: dict[str, dict[str, Any]] = {
    **{mode: tables.get("rounds", {}) for mode, tables in MODE_DEFAULTS.items()},
    "sparta": SPARTA["rounds"],
    "allreduce": {"inner_steps": 1, "total_rounds": TOTAL_STEPS},
}
STREAMING_FRAGMENTS = 4  # or as many as there are layers


def with_defaults(given: Any) -> Any:
    """A manifest's plain tables with what their mode stands for, where they say nothing else."""
    if not is_table(given):
        return given
    tables = dict(given)
    fragments = _fragments(tables.get("rounds"))
    mode = tables.setdefault("mode", "streaming" if fragments > 1 else "diloco")
    wanted = MODE_DEFAULTS.get(mode, {}) if isinstance(mode, str) else {}
    if mode == "streaming":
        wanted = {"rounds": {"fragments": _streaming_fragments(tables.get("model"))}}
    rounds = _plain(tables.get("rounds"))
    if mode == "server" and str(rounds.get("staleness", 0)) != "0":  # lock-step is given up
        late = MODE_DEFAULTS["async"]
        wanted = {**late, "rounds": {**late["rounds"], "owners": "servers"}}
    if mode == "gossip" and str(_plain(tables.get("gossip")).get("rule")) == "average":
        wanted = {**wanted, "outer": MODE_DEFAULTS["push-sum"]["outer"]}
    outer = _plain(tables.get("outer"))
    if mode == "eager":  # a round's transfer has all the time of the next one's inner steps
        steps = _number(rounds.get("inner_steps"), Rounds.model_fields["inner_steps"].default)
        wanted = {"rounds": {"overlap_steps": steps}, "outer": _eager_rates(outer)}
    if mode == "btm" and _plain(tables.get("merge")).get("trust") != "open":
        # branches that saw more tokens went further: to clip them would turn their weights round
        wanted = {**wanted, "merge": {"rule": "mean"}}
    if mode == "sparta":
        total = _number(_plain(tables.get("inner")).get("total_steps"), TOTAL_STEPS)
        wanted = {**SPARTA, "rounds": {**SPARTA["rounds"], "total_rounds": total}}
    if mode == "allreduce":
        wanted = _of_gradients(rounds, outer, _plain(tables.get("inner")))
    if outer.get("optimizer") == "sparseloco":
        wanted = {**wanted, "rounds": {"codec": "top12", **wanted.get("rounds", {})}}
    for name, defaults in wanted.items():
        table = tables.get(name, {})
        if is_table(table) or isinstance(table, Section):  # else it is refused as what it is
            tables[name] = {**defaults, **_plain(table)}
    return tables


def _eager_rates(outer: dict[str, Any]) -> dict[str, Any]:
    """η of rules that step by a mean itself; those that scale it keep theirs."""
    if outer.get("optimizer") in SCALES:
        return {}
    lr = outer.get("lr", EAGER_LR)
    return {"lr": lr, "lr_start": lr}


def _of_gradients(
    rounds: dict[str, Any], outer: dict[str, Any], inner: dict[str, Any]
) -> dict[str, dict[str, Any]]:
    """Defaults of a round for each gradient: lock-step, and as many as the schedule has steps."""
    total = _number(rounds.get("total_rounds", inner.get("total_steps")), TOTAL_STEPS)
    wanted: dict[str, Any] = {
        "inner_steps": 1,
        "staleness": 0,
        "eval_every": 20,
        "dynamic_steps": False,
        "codec": "bf16",
        "total_rounds": total,
    }
    rule: dict[str, Any] = {"optimizer": "adamw"}
    if outer.get("optimizer") == "onebit-adam":
        wanted |= {"codec": "auto", "codecs": ("bf16", "int1"), "feedback": 1.0}
        rule["warmup_rounds"] = max(1, round(FROZEN_SHARE * total))
    if outer.get("optimizer") == "powersgd":
        wanted["feedback"] = 1.0
    return {"rounds": wanted, "outer": rule}


def check_gradients(mode: str, outer: Outer, rounds: Rounds, inner: str) -> None:
    """Raise ValueError where rounds of gradients, or others, have knobs they cannot have."""
    if mode != "allreduce":
        if outer.optimizer in OF_GRADIENTS:
            raise ValueError(
                f"outer.optimizer {outer.optimizer} with mode {mode}: it is for gradients, which "
                "islands send in mode allreduce; use outer.optimizer adam for pseudo-gradients"
            )
        return
    if outer.optimizer not in OF_GRADIENTS:
        raise ValueError(
            f"mode allreduce with outer.optimizer {outer.optimizer}: gradients are for "
            + " or ".join(OF_GRADIENTS)
        )
    if (rounds.inner_steps, rounds.most_steps, rounds.fragments, rounds.overlap_steps) != (
        1,
        0,
        1,
        0,
    ):
        raise ValueError(
            "mode allreduce is a round for each gradient: rounds.inner_steps and rounds.fragments "
            "are 1, rounds.most_steps and rounds.overlap_steps 0; for a larger batch set "
            "data.batch_size"
        )
    if inner != "adamw":
        raise ValueError(
            f"mode allreduce with inner.optimizer {inner}: the step is taken element by element, "
            "by AdamW"
        )
    if outer.optimizer == "onebit-adam" and not outer.warmup_rounds:
        raise ValueError(
            "outer.optimizer onebit-adam with outer.warmup_rounds 0: it divides by second moments "
            "that are learnt in those rounds"
        )
    if outer.optimizer == "onebit-adam" and (
        rounds.codec != "auto" or len(rounds.codecs) != 2 or rounds.codecs[0] in COARSE
    ):
        raise ValueError(
            "outer.optimizer onebit-adam has one codec for gradients and one for momentum: "
            'rounds.codec is auto, and rounds.codecs say ["bf16", "int1"]'
        )
    if outer.optimizer == "powersgd" and rounds.feeds_back:
        raise ValueError(
            f"outer.optimizer powersgd with codec {', '.join(rounds.allowed_codecs)}: what factors "
            "lose is kept and sent later, what a coarse codec loses of factors is not; use int4 or "
            "a finer codec"
        )
    if outer.optimizer == "adamw" and rounds.sparse:
        raise ValueError(
            f"codec {rounds.sparse} with outer.optimizer adamw: most elements are zero in a round, "
            "so its second moments say how often one is sent and not how large it is"
        )


def check_trust(rounds: Rounds, merge: Merge) -> None:
    """Raise ValueError where strangers are let in and nothing is there to judge them by."""
    if merge.trust == "open" and rounds.one_is_enough and rounds.staleness != 0:
        raise ValueError(
            f"merge.trust open with rounds.quorum {rounds.quorum:g}: a round begins as soon as one "
            "island is ready, and a contribution that is alone in it has nothing to be compared "
            "with; set rounds.quorum to 0.5, or use mode diloco among strangers"
        )


def check_mode(mode: str, outer: Outer, rounds: Rounds) -> None:
    """Raise ValueError where a mode's name and the knobs contradict each other."""
    _check_fragments(mode, rounds.fragments)
    if rounds.clients < 1 and mode != "fedavg":
        raise ValueError(
            f"rounds.clients {rounds.clients:g} with mode {mode}: rounds of a part of the islands "
            "are mode fedavg"
        )
    if rounds.align and not outer.moving:
        raise ValueError(
            f"rounds.align with outer.optimizer {outer.optimizer} and no momentum: there is no "
            "direction to turn late work to; leave rounds.align away, or use "
            "delayed-nesterov with outer.momentum above 0"
        )
    if mode == "server" and rounds.owners != "servers":
        raise ValueError("mode server with rounds.owners members: without servers it is diloco")
    if mode == "btm":
        _check_branches(outer, rounds)
    _check_coordinates(mode, outer, rounds)
    _check_guesses(mode, outer, rounds)
    if rounds.owners == "servers" and rounds.feeds_back:
        raise ValueError(
            f"rounds.owners servers with codec {', '.join(rounds.allowed_codecs)}: nobody could "
            "send later what a server loses where it encodes the sum; use int4 or a finer codec"
        )
    _check_sparse(outer, rounds)


def _check_fragments(mode: str, fragments: int) -> None:
    """A model is merged whole in mode diloco, and in fragments in mode streaming."""
    if mode == "streaming" and fragments == 1:
        raise ValueError(
            "mode streaming with rounds.fragments 1: a model that is merged whole is mode diloco"
        )
    if mode == "diloco" and fragments > 1:
        raise ValueError(
            f"mode diloco with rounds.fragments {fragments}: merging in fragments that take "
            "turns is mode streaming"
        )


def _check_branches(outer: Outer, rounds: Rounds) -> None:
    """Branches (mode btm) are merged once, and nothing can be sent later."""
    if (rounds.total_rounds, rounds.fragments, outer.optimizer) != (1, 1, "sgd"):
        raise ValueError(
            "mode btm merges once, by the weighted average: rounds.total_rounds and "
            "rounds.fragments are 1, and outer.optimizer is sgd"
        )
    if rounds.feeds_back:
        raise ValueError(
            f"mode btm with codec {', '.join(rounds.allowed_codecs)}: what the only merge loses is "
            "never sent; use int4 or a finer codec"
        )


def _check_coordinates(mode: str, outer: Outer, rounds: Rounds) -> None:
    """Only mode sparta merges a few coordinates in each round, and averages them."""
    if rounds.share < 1 and mode != "sparta":
        raise ValueError(
            f"rounds.share {rounds.share:g} with mode {mode}: rounds of a few coordinates are mode "
            "sparta"
        )
    if mode == "sparta" and (outer.optimizer != "sgd" or rounds.fragments > 1):
        raise ValueError(
            "mode sparta averages a few coordinates in each round: outer.optimizer is sgd, and "
            "rounds.fragments 1"
        )
    if mode == "sparta" and rounds.feeds_back:
        raise ValueError(
            f"mode sparta with codec {', '.join(rounds.allowed_codecs)}: what it loses of the few "
            "coordinates of a round is never sent; the codec int4 or finer is needed"
        )


def _check_guesses(mode: str, outer: Outer, rounds: Rounds) -> None:
    """Only mode eager trains on for long before a round has ended: on a guess of its mean."""
    if mode == "eager" and (
        rounds.fragments > 1 or rounds.sparse or outer.optimizer == "delayed-nesterov"
    ):
        raise ValueError(
            "mode eager with rounds.fragments, a sparse codec or outer.optimizer delayed-nesterov: "
            "islands guess what the whole model's next mean will be, from the last one"
        )
    if mode != "eager" and rounds.overlap_steps > rounds.inner_steps // 4:
        raise ValueError(
            "rounds.overlap_steps exceeds a quarter of rounds.inner_steps: islands that train on "
            "for longer are mode eager"
        )


def _check_sparse(outer: Outer, rounds: Rounds) -> None:
    """Sparse codes need an outer optimizer that takes zeros for what is not sent yet."""
    sparse = rounds.sparse
    if outer.optimizer == "sparseloco" and not sparse:
        raise ValueError(
            f"outer.optimizer sparseloco with codec {rounds.codec}: it is the rule of sparse "
            "codes; set rounds.codec to top12 or top3, or outer.optimizer to sgd"
        )
    if sparse and outer.optimizer in SCALES:
        raise ValueError(
            f"codec {sparse} with outer.optimizer {outer.optimizer}: most elements are zero in a "
            "round, so its second moments say how often one is sent and not how large it is; use "
            "outer.optimizer sparseloco"
        )
    if sparse and outer.moving:
        raise ValueError(
            f"codec {sparse} with outer.momentum: what comes late by feedback would be carried on "
            "as if it were new; set outer.optimizer to sparseloco, or use int2"
        )


def _plain(table: Any) -> dict[str, Any]:
    """What somebody set of a table that may be read already."""
    if isinstance(table, Section):
        return {name: getattr(table, name) for name in table.model_fields_set}
    return dict(table) if is_table(table) else {}


def _number(value: Any, default: int) -> int:
    """As validation will read it; what is no number, or too large a one, is refused there."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):  # the last of infinity
        return default
    return number if abs(number) <= MOST_COUNT else default


def _fragments(rounds: Any) -> int:
    return _number(_plain(rounds).get("fragments"), 1)


def _streaming_fragments(model: Any) -> int:
    layers = _number(_plain(model).get("n_layers"), 2)
    return max(1, min(STREAMING_FRAGMENTS, layers))
