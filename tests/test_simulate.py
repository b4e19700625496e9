"""``node simulate``: every mode learns, and faults cost what they should."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from typer.testing import CliRunner

from bootstrap.manifest_gossip import PAIRED
from diloco import optimizers
from gossip.membership.spread import Spread
from gossip.pairs.rounded import Rounded
from node.cli import app
from node.commands.simulating import _noted
from node.simulate.learner import Learner, initial, rate_factor, validation_loss
from node.simulate.meetings import Meetings
from node.simulate.scenario import IN_FRAGMENTS, MODES, Scenario, load
from node.simulate.world import Node, Result, World, decide, simulate
from node.trainer.pieces import OVERDUE
from protocols.errors import OperatorError

SMALL: dict[str, Any] = {
    "islands": 3,
    "rounds": 4,
    "inner_steps": 8,
    "hidden": 16,
    "batch": 16,
    "inner_lr": 1e-2,
}
STREAMED: dict[str, Any] = SMALL | {"mode": "streaming"}
CODECS = {"gossip": "int8", "push-sum": "bf16", "sparta": "bf16", "allreduce": "fp32"}


def run(mode: str, **changes: Any) -> Result:
    codec = {"codec": CODECS.get(mode, "int4")}
    return simulate(Scenario.model_validate(SMALL | {"mode": mode} | codec | changes))


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


def test_a_slow_island_holds_nobody_up_and_its_steps_count() -> None:
    waiting = run("diloco", stragglers=1, dynamic_steps=False, quorum=1.0)
    going = run("diloco", stragglers=1)
    assert going.points[-1].time < 0.5 * waiting.points[-1].time
    assert going.points[-1].steps > 4 * 8 * (2 + 1 / 5) / 3


@pytest.mark.parametrize(
    ("mode", "changes"),
    [("diloco", {"islands": 4, "stragglers": 1}), ("fedavg", {"islands": 4, "sample": 0.5})],
)
def test_tokens_are_equal_whoever_makes_a_round(mode: str, changes: dict[str, Any]) -> None:
    result = run(mode, rounds=20, **changes)
    under_way = SMALL["inner_steps"]
    assert 0 <= result.points[-1].steps - 20 * SMALL["inner_steps"] <= 1.5 * under_way


@pytest.mark.parametrize("dynamic", [True, False])
@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("diloco", {}),
        ("async", {}),
        ("server", {"bound": 0}),
        ("server", {"bound": 2}),
        ("fedavg", {}),
        ("streaming", {}),
        ("eager", {}),
        ("btm", {}),
        ("sparta", {"share": 0.25}),
        ("gossip", {}),
        ("gossip", {"pairs": "average"}),
        ("gossip", {"fragments": 2}),
        ("push-sum", {}),
    ],
)
def test_one_of_four_that_is_four_times_slower_contributes_all_it_learns(
    mode: str, changes: dict[str, Any], dynamic: bool
) -> None:
    one = {"islands": 4, "stragglers": 1, "rounds": 8, "dynamic_steps": dynamic}
    result = run(mode, **one, **changes)
    # all but what was under way when the run ended: a round's steps at most; and where the others'
    # beat is too quick for it, it is due with the work of two rounds
    beaten = not dynamic and mode in ("diloco", "fedavg", "streaming")
    # it has sent, and trains on; or the last round was drawn without it; or a fragment's turn was
    # not there yet when the steps were over
    more = (not dynamic and mode in ("server", "fedavg")) or result.scenario.pieces > 1
    assert result.notes["unmerged_steps"] <= (1 + OVERDUE * beaten + more) * SMALL["inner_steps"]
    assert result.loss < result.points[0].loss - 0.2


@pytest.mark.parametrize(
    ("mode", "changes", "left"),
    [
        ("allreduce", {}, 0),
        ("onebit-adam", {}, 0),
        ("powersgd", {}, 0),
    ],
)
def test_lock_step_waits_for_the_slowest_and_has_all_of_its_work(
    mode: str, changes: dict[str, Any], left: int
) -> None:
    """Nothing is lost, and it takes as long as the slowest needs: four times."""
    result = run(mode, islands=4, stragglers=1, latency=0.01, **changes)
    steps = SMALL["rounds"] * SMALL["inner_steps"]
    assert result.notes["unmerged_steps"] <= left
    assert result.points[-1].steps == steps  # of every island, the slow one too
    slowest = steps * Scenario().step_s * Scenario().straggler_factor
    assert slowest <= result.points[-1].time < 2 * slowest
    assert result.loss < result.points[0].loss - 0.2


def test_a_liar_ruins_the_mean_and_not_the_open_merge() -> None:
    open_, mean = (
        run("diloco", islands=5, attackers=1, attack=8.0, rule=rule) for rule in ("open", "mean")
    )
    assert open_.loss < mean.loss - 0.5


@pytest.mark.parametrize(
    ("mode", "changes"),
    [(mode, {}) for mode in MODES] + [(mode, {"fragments": 3}) for mode in IN_FRAGMENTS],
)
def test_islands_that_are_replaced_do_not_stop_it(mode: str, changes: dict[str, Any]) -> None:
    result = run(mode, islands=4, rounds=8, churn=1.5, **changes)
    assert result.notes["replaced"] >= 2
    assert result.loss < result.points[0].loss - 0.5


def test_who_is_replaced_in_a_run_that_merges_once_is_not_asked_whether_it_is_over() -> None:
    result = run("btm", islands=4, rounds=8, churn=0.5)
    assert result.notes["replaced"] == 1
    assert result.loss < result.points[0].loss - 1.5


def test_who_replaces_an_island_has_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    replace, shards = World.replace, list[list[int]]()

    def noted(world: World, gone: Node) -> Node:
        node = replace(world, gone)
        shards.append(sorted(one.shard for one in world.nodes.values()))
        return node

    monkeypatch.setattr(World, "replace", noted)
    run("diloco", islands=4, rounds=12, churn=1.5)
    assert len(shards) >= 5
    assert shards == [[0, 1, 2, 3]] * len(shards)


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


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("mode", PAIRED)
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


@pytest.mark.parametrize("mode", PAIRED)
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


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codec": "top12"}, "momentum"),
        ({"mode": "gossip", "codec": "int4"}, "neighbours exchange parameters"),
        ({"stragglers": 5}, "more stragglers"),
        ({"codec": "auto", "codecs": ("int4", "top12")}, "momentum"),
        ({"mode": "server", "codec": "auto"}, "nobody could send later"),
        ({"mode": "btm", "most_steps": 100}, "do not follow from the links"),
        ({"most_steps": 7}, "less than inner_steps"),
        ({"stragglers": 3, "narrow": 2, "islands": 4}, "narrow links"),
        ({"outer": "adam", "codec": "top12", "outer_momentum": 0.0}, "second moments"),
        ({"mode": "async", "codec": "top12"}, "momentum"),
        ({"mode": "async", "outer": "yogi"}, "delayed Nesterov"),
        ({"mode": "async", "outer": "sgd"}, "not by its mean"),
        ({"mode": "server", "bound": 2, "outer": "heavyball"}, "delayed Nesterov"),
        ({"mode": "sparta", "codec": "top3"}, "never sent"),
        ({"mode": "btm", "codec": "int1"}, "never sent"),
        ({"mode": "allreduce", "codec": "top12"}, "second moments"),
        ({"mode": "allreduce", "codec": "int1", "feedback": 0.0}, "error feedback"),
        ({"mode": "push-sum", "codec": "bf16", "rule": "open"}, "certified rounds alone"),
        ({"mode": "fedavg", "codec": "int2"}, "nobody could send later"),
        ({"mode": "async", "owners": 2}, "every island owns a part"),
        ({"outer_lr": 1e30}, "less than or equal to 10"),
        ({"mode": "streaming", "inner_steps": 2, "fragments": 3}, "3 fragments do not fit"),
        ({"mode": "streaming", "fragments": 1}, "is mode diloco"),
        ({"mode": "streaming", "fragments": 4}, "which has 3 layers"),
        ({"mode": "diloco", "fragments": 2}, "merges the model whole"),
        ({"model": "llama", "hidden": 50}, "multiple of 8"),
        ({"mode": "gossip", "codec": "int8", "churn": 1.0, "islands": 1}, "churn of one island"),
        ({"mode": "allreduce", "inner": "muon", "codec": "fp32"}, "AdamW takes the step"),
        ({"mode": "powersgd", "codec": "int2"}, "int4 or a finer one"),
        ({"mode": "onebit-adam", "codec": "int8"}, "codec int8 .* does not read it"),
        ({"mode": "onebit-adam", "codec": "auto"}, "codec auto .* does not read it"),
        ({"mode": "powersgd", "feedback": 0.5}, "does not read it; leave it away, or use mode"),
        ({"mode": "gossip", "codec": "int8", "outer": "adam"}, "outer adam .* or use mode diloco"),
        ({"mode": "sparta", "outer_lr": 0.5}, "outer_lr 0.5 .* does not read it"),
        ({"mode": "push-sum", "codec": "int8", "outer_momentum": 0.5}, "does not read it"),
        ({"mode": "gossip", "codec": "int8", "pairs": "average", "outer_lr": 0.5}, "no outer step"),
        ({"mode": "eager", "quorum": 1.0}, "quorum 1.0 .* or use mode diloco"),
        ({"neighbours": 2}, "neighbours 2 .* or use mode gossip or push-sum"),
        ({"seed": 10**15}, "seed"),
        ({"step_s": 1e-12}, "step_s"),
    ],
)
def test_scenarios_that_cannot_work_are_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        Scenario.model_validate(changes)


@pytest.mark.parametrize("mode", MODES)
def test_a_scenario_is_the_same_once_it_is_written_with_all_its_settings(mode: str) -> None:
    """Results have them all, also those that their mode does not read."""
    codec = {"codec": "int8"} if mode in PAIRED else {}
    one = Scenario.model_validate({"mode": mode} | codec)
    assert Scenario.model_validate(one.model_dump()) == one
    assert Scenario.model_validate(json.loads(json.dumps(one.model_dump(mode="json")))) == one


def told(caught: BaseException) -> OperatorError:
    """The operator's error inside of groups of tasks."""
    while isinstance(caught, BaseExceptionGroup):
        caught = caught.exceptions[0]
    assert isinstance(caught, OperatorError), caught
    return caught


@pytest.mark.parametrize(
    ("mode", "changes"),
    [
        ("diloco", {"inner_lr": 1e30}),
        ("diloco", {"attack": 1e30, "attackers": 1, "rule": "mean"}),
        ("gossip", {"inner_lr": 1e30}),
        ("server", {"inner_lr": 1e30}),
    ],
)
def test_a_run_that_diverges_says_so(mode: str, changes: dict[str, Any]) -> None:
    with pytest.raises((OperatorError, ExceptionGroup)) as caught:
        run(mode, **changes)
    assert "diverged" in told(caught.value).what


def test_a_rank_without_gain_is_refused() -> None:
    with pytest.raises((OperatorError, ExceptionGroup)) as caught:
        run("powersgd", rank=200)
    assert "rank 200 is too large" in told(caught.value).what


def test_a_swarm_that_stands_still_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.simulate.swarm.PATIENCE", -1e6)
    with pytest.raises((OperatorError, ExceptionGroup)) as caught:
        run("diloco")
    assert "0 of 4 rounds were committed" in told(caught.value).why


def test_islands_that_wait_for_one_another_end_a_long_run_soon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went on for five times as long as the whole run would have taken."""

    async def never(*_: object, **__: object) -> None:
        """Nobody is told that an island is ready."""

    monkeypatch.setattr("node.conductor.Conductor._on_snapshot", never)
    with pytest.raises((OperatorError, ExceptionGroup)) as caught:
        run("diloco", rounds=5000, eval_every=1000)
    why = told(caught.value).why
    assert "the islands wait for one another" in why
    (seconds,) = re.findall(r"in ([\d,]+) virtual seconds", why)
    assert int(seconds.replace(",", "")) < 1000 < 5000 * SMALL["inner_steps"] * 0.1


def test_a_sample_of_less_than_one_client_is_one() -> None:
    """A run takes its inner steps, and no more."""
    few = run("fedavg", sample=1e-4)
    assert few.points[-1].steps == pytest.approx(4 * 8, rel=0.1)


def test_where_nothing_can_be_written_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.simulate.world.simulate", lambda *_: pytest.fail("it has run"))
    for place in (tmp_path / "none" / "x.json", tmp_path):
        result = CliRunner().invoke(app, ["simulate", "--json", str(place)])
        assert isinstance(result.exception, OperatorError), result.output
        assert "--json" in result.exception.fix
    result = CliRunner().invoke(app, ["simulate", "--plot", str(tmp_path / "x.foo")])
    assert isinstance(result.exception, OperatorError), result.output
    assert result.exception.what == "no plot"


def test_a_scenario_file_is_read_and_its_mistakes_named(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('mode = "gossip"\ncodec = "int8"\nbandwidth = "20Mbit"\n')
    assert load(file, {}).bandwidth == 2.5e6
    file.write_text("island = 3\n")
    with pytest.raises(OperatorError, match="island"):
        load(file, {})


def test_the_command_writes_what_it_found(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    arguments = ["simulate", "--islands", "2", "--rounds", "2", "--inner-steps", "5"]
    arguments += ["--mode", "streaming", "--bandwidth", "10Mbit", "--json", str(found)]
    arguments += ["--set", "hidden=16", "--set", "delay=1"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "2 islands, streaming" in result.output
    written = json.loads(found.read_text())
    assert written["scenario"]["bandwidth"] == 1.25e6
    assert len(written["curve"]) >= 2


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("20", "bandwidth: '20' is no number with a unit"),
        ("fast", "bandwidth: 'fast' is no number with a unit"),
        ("0", "bandwidth = 0.0: must be more than 0"),
        ("0Mbit", "bandwidth = 0.0: must be more than 0"),
    ],
)
def test_a_bandwidth_that_is_none_is_told_what_is_wrong_with_it(rate: str, said: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "--bandwidth", rate])
    assert isinstance(result.exception, OperatorError)
    assert said in result.exception.why


def test_figures_are_written_for_people() -> None:
    found = {"control_bytes": 1_673_330.0, "rounds": 3933.5, "exposed": 0.05, "replaced": 2}
    told = [_noted(key, value) for key, value in found.items()]
    assert told == ["1.67 MB", "3,934", "0.05", "2"]


@pytest.mark.parametrize(
    "arguments", [["--mode", "nonsense"], ["--set", "alpha"], ["--bandwidth", "20"]]
)
def test_the_command_refuses_what_it_cannot_do(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, ["simulate", *arguments])
    assert isinstance(result.exception, OperatorError)
