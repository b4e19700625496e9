"""Modes by name: what they stand for in the manifest, and which of them run."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest
import torch
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.manifest_modes import EAGER_LR
from bootstrap.manifest_rounds import (
    NO_MOMENTUM,
    OF_GRADIENTS,
    OUTER_DEFAULTS,
    SCALES,
    Mode,
    OuterRule,
)
from diloco import optimizers
from node.modes import check_runs, doubts
from protocols.errors import OperatorError


def of(**tables: Any) -> Manifest:
    return Manifest.model_validate(tables)


def test_every_mode_runs_by_its_name_alone() -> None:
    for mode in get_args(Mode):
        check_runs(of(mode=mode, model={"n_layers": 2}))


GRADIENTS = {"mode": "allreduce"}
REFUSED = {
    "adamw on pseudo-gradients": ({"outer": {"optimizer": "adamw"}}, "it is for gradients"),
    "nesterov on gradients": (
        GRADIENTS | {"outer": {"optimizer": "nesterov"}},
        "gradients are for adamw",
    ),
    "inner steps between gradients": (GRADIENTS | {"rounds": {"inner_steps": 4}}, "each gradient"),
    "muon on gradients": (GRADIENTS | {"inner": {"optimizer": "muon"}}, "by AdamW"),
    "sparse gradients": (GRADIENTS | {"rounds": {"codec": "top3"}}, "how often one is sent"),
    "one bit without a warm-up": (
        GRADIENTS | {"outer": {"optimizer": "onebit-adam"}, "rounds": {"codec": "int1"}},
        "one codec for gradients and one for momentum",
    ),
    "one bit that is frozen at once": (
        GRADIENTS | {"outer": {"optimizer": "onebit-adam", "warmup_rounds": 0}},
        "learnt in those rounds",
    ),
    "one bit of three codecs": (
        GRADIENTS
        | {"outer": {"optimizer": "onebit-adam"}, "rounds": {"codecs": ["bf16", "int4", "int1"]}},
        "one codec for gradients and one for momentum",
    ),
    "coarse gradients before one bit": (
        GRADIENTS | {"outer": {"optimizer": "onebit-adam"}, "rounds": {"codecs": ["int2", "int1"]}},
        "one codec for gradients and one for momentum",
    ),
    "coarse factors": (
        GRADIENTS | {"outer": {"optimizer": "powersgd"}, "rounds": {"codec": "int2"}},
        "a coarse codec loses of factors",
    ),
    "gradients of a script": (
        GRADIENTS | {"script": {"layout": "0" * 64, "parameters": 10}},
        "takes its own optimizer steps",
    ),
    "a share of the coordinates": ({"rounds": {"share": 0.1}}, "mode sparta"),
    "fragments of coordinates": (
        {"mode": "sparta", "rounds": {"inner_steps": 4, "fragments": 2}},
        "averages a few coordinates",
    ),
    "coordinates of which much is lost": (
        {"mode": "sparta", "rounds": {"codec": "int2"}},
        "the codec int4 or finer",
    ),
    "momentum of coordinates": (
        {"mode": "sparta", "outer": {"optimizer": "nesterov"}},
        "outer.optimizer is sgd",
    ),
    "eager fragments": ({"mode": "eager", "rounds": {"fragments": 2, "overlap_steps": 0}}, "guess"),
    "eager and sparse": ({"mode": "eager", "outer": {"optimizer": "sparseloco"}}, "guess"),
    "eager arrivals": ({"mode": "eager", "outer": {"optimizer": "delayed-nesterov"}}, "guess"),
    "a long overlap": ({"rounds": {"overlap_steps": 40}}, "mode eager"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_modes_of_every_step_say_what_they_cannot_have(case: str) -> None:
    tables, why = REFUSED[case]
    with pytest.raises(ValidationError, match=why):
        of(**tables)


SPARSE = {"outer": {"optimizer": "sparseloco"}}


@pytest.mark.parametrize("mode", get_args(Mode))
def test_nothing_is_doubted_of_what_a_mode_stands_for(mode: str) -> None:
    assert doubts(Manifest(mode=mode)) == []


@pytest.mark.parametrize(
    ("outer", "rates"),
    [
        ({}, (0.4, 0.4)),
        ({"optimizer": "sgd"}, (0.4, 0.4)),
        ({"optimizer": "heavyball"}, (0.4, 0.4)),
        ({"optimizer": "adam"}, (0.01, 0.01)),
        ({"optimizer": "yogi"}, (0.01, 0.01)),
        ({"lr": 0.2}, (0.2, 0.2)),
        ({"lr": 0.2, "lr_start": 0.1}, (0.2, 0.1)),
        ({"optimizer": "adam", "lr": 0.02}, (0.02, 0.02)),
    ],
)
def test_eager_islands_step_by_the_rate_that_fits_their_rule(
    outer: dict[str, Any], rates: tuple[float, float]
) -> None:
    """From the first round on: 0.4 was found for rules that step by a mean itself."""
    found = of(mode="eager", outer=outer).outer
    assert (found.lr, found.lr_start) == rates


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"outer": {"lr": 1.5}}, "beyond 1.36 outer steps overshoot"),
        ({"outer": {"optimizer": "sgd", "lr": 2.1}}, "beyond 2.00 outer steps overshoot"),
        ({"outer": {"optimizer": "heavyball", "lr": 4.0}}, "beyond 3.80 outer steps overshoot"),
        ({"mode": "eager", "outer": {"lr": 0.7}}, "more than 0.4 makes their errors grow"),
        ({"mode": "allreduce", "outer": {"lr": 0.001}}, r"^outer.lr 0.001 with .* table inner"),
        (
            {"mode": "allreduce", "outer": {"optimizer": "powersgd", "beta2": 0.5, "epsilon": 0.1}},
            "^outer.beta2 0.5 and outer.epsilon 0.1 with",
        ),
        ({"mode": "allreduce", "outer": {"momentum": 0.5}}, "^outer.momentum 0.5 with"),
        ({"mode": "async", "merge": {"rule": "median"}}, "alone in a round is merged whatever"),
        ({**SPARSE, "merge": {"trust": "open"}}, "codec top12 with merge.trust open: .* is lost"),
        ({**SPARSE, "merge": {"rule": "median"}}, "codec top12 with merge.rule median: .* is lost"),
        ({"rounds": {"total_rounds": 1000}}, "94 % of the run has 0.1 of inner.lr"),
        ({"rounds": {"total_rounds": 1000}}, "can set inner.total_steps=50000"),
        ({"rounds": {"total_rounds": 47}}, "over before the learning rate has fallen"),
        ({"mode": "gossip", "rounds": {"total_rounds": 200}}, "70 % of the run"),
    ],
)
def test_what_is_likely_to_disappoint_is_told_with_the_reason(
    tables: dict[str, Any], reason: str
) -> None:
    (doubt,) = doubts(Manifest.model_validate(tables))
    assert re.search(reason, doubt)


@pytest.mark.parametrize(
    "merge", [{}, {"rule": "clip"}, {"rule": "mean"}, {"trust": "open", "rule": "mean"}]
)
def test_sparse_codes_are_not_doubted_where_all_that_is_lost_comes_later(
    merge: dict[str, Any],
) -> None:
    assert doubts(of(**SPARSE, merge=merge)) == []


@pytest.mark.parametrize(
    "tables",
    [
        {"rounds": {"total_rounds": 70}},  # near enough
        {"rounds": {"total_rounds": 1000}, "inner": {"total_steps": 50_000}},
        {"rounds": {"total_rounds": 1000}, "inner": {"schedule": "constant"}},
        {"rounds": {"total_rounds": 1000}, "inner": {"min_lr_ratio": 1}},
        {"rounds": {"total_rounds": 1000}, "script": {"layout": "0" * 64, "parameters": 10}},
        {"rounds": {"total_rounds": 1000, "most_steps": 90}},  # nobody knows how many steps
        {"rounds": {"total_rounds": 1000}, "mode": "async"},
        {"rounds": {"total_rounds": 1000}, "mode": "fedavg"},
    ],
)
def test_a_schedule_that_fits_or_may_fit_is_not_doubted(tables: dict[str, Any]) -> None:
    assert doubts(Manifest.model_validate(tables)) == []


@pytest.mark.parametrize(
    "tables",
    [
        {"model": {"d_model": 4096, "vocab_size": 600_000, "n_layers": 1}},
        {"script": {"layout": "0" * 64, "parameters": 2**31 + 1, "dense": 0}},
    ],
)
def test_a_model_that_sparta_cannot_draw_from_is_refused_at_entry(tables: dict[str, Any]) -> None:
    with pytest.raises(OperatorError, match="more than the 2,147,483,648") as caught:
        check_runs(of(mode="sparta", **tables))
    assert caught.value.code == "E204"
    check_runs(of(**tables))
    check_runs(of(mode="sparta"))


def test_signs_follow_gradients_after_a_share_of_the_rounds() -> None:
    made = of(**GRADIENTS, outer={"optimizer": "onebit-adam"}, rounds={"total_rounds": 200})
    assert (made.rounds.allowed_codecs, made.outer.warmup_rounds) == (("bf16", "int1"), 30)
    assert made.rounds.feeds_back
    assert of(**GRADIENTS, inner={"total_steps": 70}).rounds.total_rounds == 70


def test_a_mode_alone_is_a_whole_description() -> None:
    assert of().mode == "diloco"
    alone = of(mode="async")
    assert alone.rounds.one_is_enough
    assert not of().rounds.one_is_enough
    assert alone.outer.optimizer == "delayed-nesterov"
    assert alone.merge.weights == "rate"
    assert of(mode="server").rounds.staleness == 0
    assert of(mode="server", rounds={"staleness": 2}).outer.optimizer == "delayed-nesterov"
    assert of(mode="fedavg").outer.lr == of(mode="fedavg").outer.lr_start == 1.0
    assert of(mode="btm").rounds.total_rounds == 1
    assert of(mode="btm").merge.rule == "mean"  # a plain weighted average
    assert of(mode="btm", merge={"trust": "open"}).merge.rule == "auto"
    assert of(mode="btm", merge={"rule": "clip"}).merge.rule == "clip"


def test_what_is_said_is_kept() -> None:
    changed = of(mode="async", rounds={"quorum": 0.7}, outer={"optimizer": "sgd", "lr": 0.5})
    assert changed.rounds.quorum == 0.7
    assert (changed.outer.lr, changed.outer.lr_start, changed.outer.momentum) == (0.5, 0.5, 0.0)
    assert Manifest.parse(changed.canonical()) == changed


def test_strangers_may_meet_where_a_round_has_several_of_them() -> None:
    assert of(mode="async", rounds={"quorum": 0.5}, merge={"trust": "open"}).mode == "async"
    assert of(mode="server", merge={"trust": "open"}).rounds.staleness == 0
    assert of(mode="async", rounds={"staleness": 0}, merge={"trust": "open"}).rounds.one_is_enough


def test_branches_are_not_merged_by_their_claims_among_strangers() -> None:
    assert of(mode="btm").merge.rule == "mean"
    assert of(mode="btm", merge={"trust": "open"}).merge.rule == "auto"


def test_arrivals_are_taken_for_their_share() -> None:
    small = {"optimizer": "sgd", "lr": 0.125}
    assert of(mode="async", outer=small).outer.highest_lr == 0.125
    mean = {"optimizer": "delayed-nesterov", "momentum": 0.0}
    assert of(mode="async", outer=mean).outer.momentum == 0.0
    whole = {"optimizer": "adam"}
    in_lock_step = of(mode="async", rounds={"staleness": 0}, outer=whole)
    assert in_lock_step.rounds.one_is_enough
    assert of(mode="server", outer=whole).outer.optimizer == "adam"
    assert of(mode="gossip", rounds={"quorum": 0.001}).mode == "gossip"  # no rounds of several


def test_fragments_are_what_streaming_means() -> None:
    assert of(rounds={"fragments": 2}).mode == "streaming"
    assert of(rounds={"fragments": "2"}).mode == "streaming"  # text, as from --set
    assert of(mode="streaming").rounds.fragments == 2  # no more than layers
    assert of(mode="async", rounds={"fragments": 2}).mode == "async"


@pytest.mark.parametrize(
    "tables",
    [
        {"mode": "async"},
        {"mode": "async", "rounds": {"staleness": 2}},
        {"mode": "server", "rounds": {"staleness": "2"}},
        {"rounds": {"quorum": "0.001"}, "outer": {"optimizer": "delayed-nesterov"}},
    ],
)
def test_nothing_is_kept_of_work_that_is_alone_in_a_round(tables: dict[str, Any]) -> None:
    rounds = tables.get("rounds", {}) | {"fragments": 2}
    mode = {"mode": tables.get("mode", "streaming")}
    made = of(**tables | mode | {"rounds": rounds})
    assert made.rounds.alpha == 0
    assert Manifest.parse(made.canonical()) == made
    with pytest.raises(ValidationError, match=r"rounds\.alpha 0\.25 .* sent again"):
        of(**tables | mode | {"rounds": rounds | {"alpha": 0.25}})


def test_a_share_is_kept_where_rounds_merge_several() -> None:
    assert of(mode="async", rounds={"alpha": 0.25}).rounds.alpha == 0.25  # merged whole: unused
    assert of(mode="streaming").rounds.alpha == 0.5
    assert of(mode="async", rounds={"quorum": 0.5, "fragments": 2}).rounds.alpha == 0.5
    assert of(mode="server", rounds={"fragments": 2}).rounds.alpha == 0.5
    lock_step = of(mode="async", rounds={"staleness": 0, "fragments": 2, "alpha": 0.5})
    assert lock_step.rounds.alpha == 0.5


NESTEROV = ("nesterov", "delayed-nesterov")  # they alone are warmed up where nothing is said


@pytest.mark.parametrize("name", sorted({*get_args(OuterRule), *optimizers.RULES}))
def test_every_outer_optimizer_is_known_to_the_manifest_and_has_rates_of_its_own(name: str) -> None:
    """One that is forgotten would have Nesterov's, and no word is said."""
    assert name in get_args(OuterRule)
    assert name in optimizers.RULES
    assert name in OUTER_DEFAULTS
    assert bool(OUTER_DEFAULTS[name]) == (name not in NESTEROV)


@pytest.mark.parametrize("name", sorted(set(get_args(OuterRule)) - set(OF_GRADIENTS)))
def test_defaults_of_outer_optimizers_are_those_of_their_rules(name: str) -> None:
    rule = optimizers.named(name)
    outer = of(outer={"optimizer": name}).outer
    assert (outer.lr, outer.momentum) == (rule.lr, rule.momentum)
    start = (1.0, 0.5) if name in NESTEROV else (rule.lr, rule.momentum)
    assert (outer.lr_start, outer.momentum_start) == start
    assert (outer.beta2, outer.epsilon) == (optimizers.BETA2, optimizers.EPSILON)


@pytest.mark.parametrize("name", sorted(set(get_args(OuterRule)) - set(OF_GRADIENTS)))
def test_what_an_outer_optimizer_is_said_to_be_follows_from_its_rule(name: str) -> None:
    rule, merged = optimizers.named(name), torch.full((4,), 2.0)

    def moved(merged: torch.Tensor) -> float:
        params = torch.zeros(4)
        rates = optimizers.Rates(0.1, 0.0, share=1.0)
        rule.take(rule.init(params).vectors, merged, params, rates)
        return params.abs().max().item()

    assert (name in SCALES) == (moved(100 * merged) < 2 * moved(merged))
    assert (name in NO_MOMENTUM) == (not rule.vectors)


def test_eager_has_its_own_rate_where_a_rule_steps_by_the_mean_itself() -> None:
    refused = {"delayed-nesterov", "sparseloco"}
    for name in set(get_args(OuterRule)) - set(OF_GRADIENTS) - refused:
        made = of(mode="eager", outer={"optimizer": name}).outer
        assert made.lr == (optimizers.named(name).lr if name in SCALES else EAGER_LR), name


def test_adaptive_rules_may_be_warmed_up_by_their_rate_alone() -> None:
    for name in SCALES:
        made = of(outer={"optimizer": name, "momentum": 0.8, "lr_start": 0.001}).outer
        assert (made.momentum_start, made.lr_start, made.warmup_rounds) == (0.8, 0.001, 10)
        at_once = {"optimizer": name, "momentum_start": 0.5, "warmup_rounds": 0}
        assert of(outer=at_once).outer.momentum == 0.9


def test_sparseloco_brings_a_sparse_codec() -> None:
    assert of(outer={"optimizer": "sparseloco"}).rounds.codec == "top12"


@pytest.mark.parametrize(
    ("tables", "reason"),
    [
        ({"mode": "streaming", "rounds": {"fragments": 1}}, "is mode diloco"),
        ({"mode": "diloco", "rounds": {"fragments": 2}}, "is mode streaming"),
        ({"mode": "diloco", "rounds": {"clients": 0.5}}, "are mode fedavg"),
        ({"mode": "server", "rounds": {"owners": "members"}}, "without servers it is diloco"),
        ({"mode": "btm", "rounds": {"total_rounds": 2}}, "merges once"),
        ({"mode": "btm", "outer": {"optimizer": "nesterov"}}, "merges once"),
        ({"mode": "btm", "rounds": {"codec": "int1"}}, "never sent"),
        ({"mode": "btm", "rounds": {"staleness": 2}}, "no later round"),
        ({"mode": "btm", "rounds": {"staleness": -1}}, "no later round"),
        ({"mode": "server", "rounds": {"codec": "int2"}}, "server loses"),
        ({"mode": "async", "merge": {"trust": "open"}}, "nothing to be compared"),
        (
            {"mode": "server", "rounds": {"staleness": 2}, "merge": {"trust": "open"}},
            "nothing to be compared",
        ),
        ({"mode": "async", "outer": {"optimizer": "nesterov"}}, "delayed-nesterov"),
        ({"mode": "async", "outer": {"optimizer": "heavyball"}}, "delayed-nesterov"),
        ({"mode": "async", "outer": {"optimizer": "adam"}}, "delayed-nesterov"),
        (
            {"mode": "server", "rounds": {"staleness": 2}, "outer": {"optimizer": "yogi"}},
            "delayed-nesterov",
        ),
        ({"rounds": {"quorum": 0.001}}, "full outer step"),  # async by another name
        ({"mode": "async", "outer": {"optimizer": "sgd"}}, "not by its mean"),
        (
            {"mode": "async", "outer": {"optimizer": "sgd", "lr": 0.1, "lr_start": 1.0}},
            "not by its mean",
        ),
        ({"outer": {"optimizer": "sgd", "momentum": 0.5}}, "sgd has no momentum"),
        ({"outer": {"optimizer": "adam", "momentum_start": 0.5}}, "one β₁ from the first round on"),
        (
            {"outer": {"optimizer": "yogi", "momentum": 0.5, "momentum_start": 0.9}},
            "one β₁ from the first round on",
        ),
        ({"outer": {"optimizer": "sparseloco"}, "rounds": {"codec": "int4"}}, "sparse codes"),
        ({"outer": {"optimizer": "adam"}, "rounds": {"codec": "top3"}}, "second moments"),
        ({"outer": {"optimizer": "yogi"}, "rounds": {"codec": "top12"}}, "second moments"),
        ({"rounds": {"codec": "top3"}}, "as if it were new"),
        ({"outer": {"optimizer": "heavyball"}, "rounds": {"codec": "top12"}}, "as if it were new"),
        ({"outer": {"optimizer": "sparseloco", "momentum": 0.5}}, "sparseloco has no momentum"),
        ({"outer": {"optimizer": "sparseloco"}, "rounds": {"feedback": 0}}, "has to be sent later"),
        ({"rounds": {"codec": "int2", "feedback": 0}}, "has to be sent later"),
        ({"outer": {"optimizer": "lion"}}, "nesterov"),
        ({"mode": "diloko"}, "diloco"),
    ],
)
def test_what_contradicts_itself_is_refused(tables: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        of(**tables)
