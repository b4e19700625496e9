"""``node simulate``: every mode learns, and a scenario has one result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from simulate_kit import SMALL, run, simulated
from suites import slow

from bootstrap.manifest_gossip import PAIRED
from diloco import optimizers
from gossip.membership.spread import Spread
from gossip.pairs.rounded import Rounded
from node.commands.simulating import _noted
from node.simulate.learner import Learner, initial, rate_factor, validation_loss
from node.simulate.meetings import Meetings
from node.simulate.scenario import MODES, Scenario
from node.simulate.world import decide, simulate

STREAMED: dict[str, Any] = SMALL | {"mode": "streaming"}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_learns_and_its_bytes_are_counted(mode: str) -> None:
    result = run(mode)
    first, last = result.points[0], result.points[-1]
    assert last.loss < first.loss - 0.5
    assert last.bytes > 0.2
    assert last.time >= 4 * 8 * 0.1
    # all have done their steps; who is sampled in FedAvg does half of them
    assert last.steps >= 4 * 8 * (0.5 if mode == "fedavg" else 0.9)


@pytest.mark.parametrize("inner", ["adamw", "muon"])
def test_the_model_of_the_nodes_learns_with_a_schedule(inner: str) -> None:
    llama = {"model": "llama", "layers": 1, "context": 16, "schedule": "cosine"}
    result = run("diloco", inner=inner, rounds=3, batch=4, **llama)
    assert result.points[-1].loss < result.points[0].loss - 0.5


def test_the_learning_rate_rises_then_falls_to_nothing() -> None:
    one = Scenario(schedule="cosine", warmup=0.1, rounds=10, inner_steps=10)
    factors = [rate_factor(one, share) for share in (0.0, 0.05, 0.1, 0.55, 1.0)]
    assert factors == pytest.approx([0.1, 0.6, 1.0, 0.5, 0.0])
    assert rate_factor(Scenario(), 0.5) == 1.0


def test_all_modes_start_from_the_same_steps_of_one_island() -> None:
    one = Scenario.model_validate(SMALL | {"start_steps": 30})
    other = Scenario.model_validate(SMALL | {"start_steps": 30, "mode": "btm", "inner_lr": 1e-3})
    assert torch.equal(initial(one), initial(other))
    fewer = one.model_copy(update={"islands": one.islands - 1, "start_islands": one.islands})
    assert fewer.start().batch == one.start().batch
    plain = one.model_copy(update={"start_steps": 0})
    assert validation_loss(one, initial(one)) < validation_loss(plain, initial(plain)) - 0.5


def test_one_scenario_gives_one_result() -> None:
    one, other = run("gossip"), run("gossip")
    assert one.points == other.points
    assert run("gossip", seed=1).points != one.points


def test_a_certified_round_comes_to_what_the_plain_rule_does() -> None:
    """DiLoCo on the wire's code against its five lines, in one loop."""
    one = Scenario.model_validate(SMALL | {"rule": "mean", "codec": "fp32", "warmup_rounds": 0})
    found = simulate(one)
    assert found.notes["rounds"] == one.rounds
    base, rule = initial(one), optimizers.named("nesterov")
    state, learners = rule.init(base), [Learner(one, n, n) for n in range(one.islands)]
    for round_ in range(one.rounds):
        for learner in learners:
            learner.load(base)
            learner.train(one.inner_steps, round_ / one.rounds)
        merged = torch.stack([base - learner.params() for learner in learners]).mean(0)
        rule.update(state, merged, base, lr=rule.lr, momentum=rule.momentum)
    assert found.loss == pytest.approx(validation_loss(one, base), abs=1e-3)


def test_h_is_chosen_where_it_is_left_open_and_the_inputs_are_noted() -> None:
    fast, one = decide(Scenario.model_validate(SMALL | {"inner_steps": 0}))
    assert (fast.inner_steps, one["inner_steps"]) == (20, 20.0)
    slow, one = decide(Scenario.model_validate(SMALL | {"inner_steps": 0, "bandwidth": 5000}))
    assert slow.inner_steps > 20
    assert one["exposed"] <= 0.05
    assert one["transfer_s"] > 1.0
    assert decide(fast) == (fast, {})


def test_h_in_pairs_follows_from_whole_letters() -> None:
    """Not from the parts of an all-reduce; a round has one for each neighbour."""

    def transfer_s(**changes: Any) -> float:
        asks = SMALL | {"inner_steps": 0, "codec": "int8", "latency": 1.0, "bandwidth": 5e4}
        return decide(Scenario.model_validate(asks | changes))[1]["transfer_s"]

    letter_s = transfer_s(mode="push-sum") - 1.0
    assert letter_s > 0
    share = 1 - 1 / SMALL["islands"]
    assert transfer_s(mode="diloco") == pytest.approx(2 * (share * letter_s + 1))
    assert transfer_s(mode="gossip") == pytest.approx(letter_s + 1)
    assert transfer_s(mode="gossip", neighbours=2) == pytest.approx(2 * (letter_s + 1))
    assert transfer_s(mode="push-sum", neighbours=2) == pytest.approx(2 * letter_s + 1)


def test_coarser_codecs_send_less() -> None:
    sent = {name: run("diloco", codec=name).points[-1].bytes for name in ("fp32", "int8", "int2")}
    assert sent["fp32"] > 3 * sent["int8"] > 6 * sent["int2"]


def test_a_fragment_may_be_late_by_its_delay_only_up_to_a_quarter() -> None:
    assert run("streaming", fragments=3, delay=2).loss < 5.0
    with pytest.raises(ValidationError, match="quarter"):
        run("streaming", fragments=3, delay=5)


def test_fragments_send_a_part_at_a_time_and_go_with_other_modes_too() -> None:
    whole, parts = run("async"), run("async", fragments=3)
    assert parts.loss < parts.points[0].loss - 0.5
    assert parts.points[-1].bytes == pytest.approx(whole.points[-1].bytes, rel=0.5)
    common, cut = Scenario.model_validate(SMALL), Scenario.model_validate(STREAMED)
    assert not torch.equal(initial(common), initial(cut))  # another order of the same model
    assert validation_loss(common, initial(common)) == validation_loss(cut, initial(cut))


@pytest.mark.parametrize(
    ("mode", "fragments"),
    [("gossip", 1), ("push-sum", 3), *slow(("gossip", 3), ("push-sum", 1))],
)
def test_inner_steps_and_codecs_of_pairs_follow_from_the_links(mode: str, fragments: int) -> None:
    given: dict[str, Any] = {"codec": "auto", "codecs": ("fp32", "bf16", "int8"), "latency": 0.005}
    wide, narrow = (
        run(mode, fragments=fragments, most_steps=48, rounds=20, bandwidth=bandwidth, **given).notes
        for bandwidth in (12.5e6, 2.5e4)
    )
    assert wide["last_inner_steps"] == SMALL["inner_steps"]
    assert narrow["last_inner_steps"] > 2 * SMALL["inner_steps"]
    assert {name for name in wide if name.startswith("letters_")} == {"letters_fp32"}
    coarse = narrow.get("letters_bf16", 0) + narrow.get("letters_int8", 0)
    assert coarse > narrow.get("letters_fp32", 0)


def test_disagreement_is_told_of_all_rounds_however_little_the_last_ones_moved() -> None:
    """Rates that fall to nothing made the mean of ratios that of the last round's noise."""
    meetings = Meetings(1)
    for number, progress in enumerate((4.0, 4.0, 4.0, 1e-9)):
        spread = Spread({"a": 2.0, "b": 2.0}, norm=1.0)
        meetings.count(Rounded(0, number, 0.0, 1.0, (), spread, None, 1, progress, 0.0))
    notes = meetings.notes([torch.ones(2), torch.ones(2)])
    assert notes["disagreement_by_progress"] == pytest.approx(2.0)


@pytest.mark.parametrize("mode", ["gossip", *slow("push-sum")])
def test_pairs_that_exchange_in_fragments_keep_together_as_those_that_exchange_all(
    mode: str,
) -> None:
    apart = {1: 0.0, 3: 0.0}
    for seed in range(3):  # of one, who met whom last decides
        whole, parts = (run(mode, islands=4, rounds=12, fragments=n, seed=seed) for n in apart)
        assert parts.loss < parts.points[0].loss - 0.5
        assert parts.points[-1].bytes == pytest.approx(whole.points[-1].bytes, rel=0.3)
        apart[1] += whole.notes["disagreement"]
        apart[3] += parts.notes["disagreement"]
    assert apart[3] < 2 * apart[1]


@pytest.mark.parametrize("mode", MODES)
def test_a_scenario_is_the_same_once_it_is_written_with_all_its_settings(mode: str) -> None:
    """Results have them all, also those that their mode does not read."""
    codec = {"codec": "int8"} if mode in PAIRED else {}
    one = Scenario.model_validate({"mode": mode} | codec)
    assert Scenario.model_validate(one.model_dump()) == one
    assert Scenario.model_validate(json.loads(json.dumps(one.model_dump(mode="json")))) == one


def test_a_sample_of_less_than_one_client_is_one() -> None:
    """A run takes its inner steps, and no more."""
    few = run("fedavg", sample=1e-4)
    assert few.points[-1].steps == pytest.approx(4 * 8, rel=0.1)


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    arguments = ["--islands", "2", "--rounds", "2", "--inner-steps", "5"]
    arguments += ["--mode", "streaming", "--bandwidth", "10Mbit", "--json", str(found)]
    arguments += ["--set", "hidden=16", "--set", "delay=1"]
    result = simulated(*arguments)
    assert result.exit_code == 0, result.output
    assert "2 islands, streaming" in result.output
    written = json.loads(found.read_text())
    assert written["scenario"]["bandwidth"] == 1.25e6
    assert len(written["curve"]) >= 2


def test_figures_are_written_for_people() -> None:
    found = {"control_bytes": 1_673_330.0, "rounds": 3933.5, "exposed": 0.05, "replaced": 2}
    told = [_noted(key, value) for key, value in found.items()]
    assert told == ["1.67 MB", "3,934", "0.05", "2"]
