"""``node simulate``: how far it is, its plot, and what it says besides."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from simulate_kit import simulated

from bootstrap import manifest_modes
from bootstrap.manifest_gossip import PAIRED
from bootstrap.manifest_rounds import OF_GRADIENTS, Merge, OuterRule
from node.commands.simulating import _summary
from node.simulate.run import codecs_of
from node.simulate.scenario import Mode, Scenario
from node.simulate.world import Point, Result, simulate


@pytest.mark.parametrize("mode", ["diloco", "gossip", "async"])
def test_whoever_watches_sees_it_go_on_to_its_end(mode: str) -> None:
    seen = list[float]()
    codec = "int8" if mode == "gossip" else "int4"
    scenario = {"mode": mode, "codec": codec, "islands": 2, "rounds": 3, "hidden": 8, "batch": 4}
    simulate(Scenario.model_validate(scenario), seen.append)
    assert seen == sorted(seen)
    assert 0 < seen[0] < 0.05
    assert seen[-1] == 1.0


@pytest.mark.parametrize("kind", ["png", "svg"])
def test_the_loss_is_drawn(tmp_path: Path, kind: str) -> None:
    file = tmp_path / f"found.{kind}"
    arguments = ["--islands", "2", "--rounds", "2", "--inner-steps", "4"]
    result = simulated(*arguments, "--set", "hidden=8", "--plot", str(file))
    assert result.exit_code == 0, result.output
    begins = {"png": b"\x89PNG", "svg": b"<?xml"}[kind]
    assert file.read_bytes().startswith(begins)


def test_a_picture_names_the_codecs_that_a_run_has() -> None:
    assert codecs_of(Scenario(mode="onebit-adam")) == ("bf16", "int1")
    assert codecs_of(Scenario(codec="auto", codecs=("int4", "int2"))) == ("int4", "int2")
    assert codecs_of(Scenario()) == ("int4",)


def test_a_result_names_the_codecs_that_were_sent() -> None:
    one = Scenario(mode="onebit-adam")
    assert one.codec == "int4", "which the mode does not read"
    assert Result(one, 1, [Point(0, 0, 0, 0)], {}, 0.0).to_json()["codecs"] == ("bf16", "int1")


def test_two_results_can_be_told_apart_by_their_last_lines() -> None:
    one = Scenario.model_validate(
        {"islands": 5, "attackers": 1, "rule": "geometric-median", "attack": 2.5}
    )
    said = _summary(Result(one, 1234, [Point(0, 0, 0, 0)], {}, 0.0)).splitlines()[-1]
    assert said.startswith("5 islands, diloco, int4, 1,234 parameters, attackers=1, attack=2.5, ")
    assert "rule=geometric-median: 0 s simulated" in said
    narrow = _summary(Result(Scenario(bandwidth=12500), 1234, [Point(0, 0, 0, 0)], {}, 0.0))
    assert "bandwidth=0.1Mbit: " in narrow
    plain = _summary(Result(Scenario(), 1234, [Point(0, 0, 0, 0)], {}, 0.0))
    assert plain.splitlines()[-1].startswith("4 islands, diloco, int4, 1,234 parameters: ")


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_needs_nothing_else_to_be_simulated(mode: str) -> None:
    one = Scenario.model_validate({"mode": mode})
    if mode in PAIRED:
        assert one.codec == manifest_modes.OF_PAIRS["codec"]


def test_the_command_says_what_is_likely_to_disappoint() -> None:
    arguments = ["--islands", "2", "--rounds", "1", "--inner-steps", "2"]
    result = simulated(*arguments, "--set", "hidden=8", "--set", "outer_lr=2")
    assert result.exit_code == 0, result.output
    assert "outer steps overshoot" in result.stderr
    assert "overshoot" not in result.stdout


@pytest.mark.parametrize("mode", get_args(Mode))
def test_every_mode_is_simulated_as_it_is_typed(mode: str) -> None:
    given = ["--mode", mode, "--islands", "2", "--rounds", "2", "--inner-steps", "2"]
    done = simulated(*given, "--set", "hidden=8", "--set", "batch=4")
    assert done.exit_code == 0, done.output
    assert f"2 islands, {mode}, " in done.output


def test_what_a_run_may_have_may_be_simulated() -> None:
    """Apart from ``auto``, whose two meanings have names here, and what modes set by themselves."""

    def choices(name: str) -> set[str]:
        return set(get_args(Scenario.model_fields[name].annotation))

    rules = set(get_args(Merge.model_fields["rule"].annotation))
    assert choices("rule") == rules - {"auto"} | {"open"}
    assert choices("outer") == set(get_args(OuterRule)) - set(OF_GRADIENTS) - {"delayed-nesterov"}
