"""The manifest of a run of gossip: what it stands for, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from node.modes import check_runs
from protocols.errors import OperatorError


def test_a_mode_alone_is_a_whole_description() -> None:
    manifest = Manifest.model_validate({"mode": "gossip"})
    assert (manifest.rounds.codec, manifest.gossip.rule) == ("bf16", "noloco")
    assert (manifest.outer.optimizer, manifest.outer.lr, manifest.outer.momentum) == (
        "heavyball",
        0.7,
        0.5,
    )
    check_runs(manifest)
    assert Manifest.parse(manifest.canonical()) == manifest


@pytest.mark.parametrize(
    "given", [{"mode": "push-sum"}, {"mode": "gossip", "gossip": {"rule": "average"}}]
)
def test_other_rules_take_the_mean_as_it_is(given: dict[str, Any]) -> None:
    manifest = Manifest.model_validate(given)
    assert (manifest.outer.optimizer, manifest.outer.lr) == ("sgd", 1.0)
    check_runs(manifest)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"rounds": {"codec": "int4"}}, "no state in common"),
        ({"rounds": {"codec": "auto", "codecs": ["bf16", "int4"]}}, "codec int4: islands"),
        ({"merge": {"trust": "open"}}, "a peer lies"),
        ({"rounds": {"groups": "region"}}, "groups"),
        ({"outer": {"optimizer": "nesterov"}}, "heavyball"),
        ({"gossip": {"rule": "push-sum"}}, "leave gossip.rule away"),
    ],
)
def test_what_has_no_meaning_in_pairs_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Manifest.model_validate({"mode": "gossip"} | given)


@pytest.mark.parametrize("mode", ["gossip", "push-sum"])
def test_codec_and_inner_steps_may_follow_from_the_links(mode: str) -> None:
    rounds = {"codec": "auto", "most_steps": 400}
    manifest = Manifest.model_validate({"mode": mode, "rounds": rounds})
    assert manifest.rounds.allowed_codecs == ("bf16", "int8")
    check_runs(manifest)
    every = {"codec": "auto", "codecs": ["fp32", "bf16", "fp16", "int8"]}
    Manifest.model_validate({"mode": mode, "rounds": every})


def test_pairs_may_meet_over_each_fragment() -> None:
    manifest = Manifest.model_validate({"mode": "gossip", "rounds": {"fragments": 2}})
    check_runs(manifest)


def test_coefficients_under_which_islands_drift_apart_are_refused() -> None:
    manifest = Manifest.model_validate({"mode": "gossip", "outer": {"lr": 0.4, "momentum": 0.5}})
    with pytest.raises(OperatorError, match="drift apart"):
        check_runs(manifest)
