"""Scenarios and commands that cannot work, and runs that fail, say why."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from simulate_kit import SMALL, run, simulated, told

from node.setting_values import speed
from node.simulate.scenario import Scenario, load
from protocols.errors import OperatorError


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"codec": "top12"}, "momentum"),
        ({"mode": "gossip", "codec": "int4"}, "parameters themselves want one of"),
        ({"stragglers": 5}, "more stragglers"),
        ({"codec": "auto", "codecs": ("int4", "top12")}, "momentum"),
        ({"mode": "server", "codec": "auto"}, "nobody could send later"),
        ({"mode": "btm", "most_steps": 100}, "do not follow from the links"),
        ({"most_steps": 7}, "most_steps is less than inner_steps"),
        ({"inner_steps": 0, "most_steps": 7, "codec": "top12"}, "momentum"),
        ({"mode": "streaming", "inner_steps": 0, "codec": "top12"}, "momentum"),
        ({"stragglers": 3, "narrow": 2, "islands": 4}, "narrow links"),
        ({"outer": "adam", "codec": "top12", "outer_momentum": 0.0}, "second moments"),
        ({"mode": "async", "codec": "top12"}, "momentum"),
        ({"mode": "async", "outer": "yogi"}, "delayed Nesterov"),
        ({"mode": "async", "outer": "sgd"}, "not by its mean"),
        ({"mode": "server", "bound": 2, "outer": "heavyball"}, "delayed Nesterov"),
        ({"mode": "sparta", "codec": "top3"}, "never sent"),
        ({"mode": "btm", "codec": "int1"}, "never sent"),
        ({"mode": "allreduce", "codec": "top12"}, "second moments"),
        ({"mode": "allreduce", "codec": "int1", "feedback": 0.0}, "has to be sent later"),
        ({"mode": "push-sum", "codec": "bf16", "rule": "open"}, "certified rounds alone"),
        ({"mode": "fedavg", "codec": "int2"}, "nobody could send later"),
        ({"mode": "async", "owners": 2}, "every island owns a part"),
        ({"outer_lr": 1e30}, "less than or equal to 10"),
        ({"mode": "streaming", "inner_steps": 2, "fragments": 3}, "fragments exceeds inner_steps"),
        ({"mode": "streaming", "fragments": 1}, "is mode diloco"),
        ({"mode": "streaming", "fragments": 4}, "which has 3 layers"),
        ({"mode": "diloco", "fragments": 2}, "merges the model whole"),
        ({"model": "llama", "hidden": 50}, "multiple of 8"),
        ({"mode": "gossip", "codec": "int8", "churn": 1.0, "islands": 1}, "churn of one island"),
        ({"mode": "allreduce", "inner": "muon", "codec": "fp32"}, "by AdamW"),
        ({"mode": "powersgd", "codec": "int2"}, "int4 or a finer codec"),
        ({"mode": "onebit-adam", "codec": "int8"}, "codec int8 .* does not read it"),
        ({"mode": "onebit-adam", "codec": "auto"}, "codec auto .* does not read it"),
        ({"mode": "powersgd", "feedback": 0.5}, "does not read it; leave it away, or use mode"),
        ({"mode": "gossip", "codec": "int8", "outer": "adam"}, "outer adam .* or use mode diloco"),
        ({"mode": "sparta", "outer_lr": 0.5}, "outer_lr 0.5 .* does not read it"),
        ({"mode": "push-sum", "codec": "int8", "outer_momentum": 0.5}, "does not read it"),
        ({"mode": "gossip", "codec": "int8", "pairs": "average", "outer_lr": 0.5}, "no outer step"),
        ({"mode": "eager", "quorum": 1.0}, "quorum 1.0 .* or use mode diloco"),
        ({"mode": "allreduce", "align": True}, "align True .* or use mode diloco"),
        ({"neighbours": 2}, "neighbours 2 .* or use mode gossip or push-sum"),
        ({"seed": 10**15}, "seed"),
        ({"step_s": 1e-12}, "step_s"),
        ({"batch": 10**9}, "batch"),
    ],
)
def test_scenarios_that_cannot_work_are_refused_with_the_reason(
    changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ValidationError, match=reason):
        Scenario.model_validate(changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"codec": "top12"}, "codec top12 with outer_momentum: .*; set outer to sparseloco"),
        ({"codec": "int2", "feedback": 0.0}, "feedback = 0 with codec int2: .*; set feedback"),
        ({"codec": "auto", "codecs": ("int2", "int4")}, "codecs must go from fine to coarse"),
        ({"mode": "allreduce", "codec": "top12"}, "codec top12 with mode allreduce: "),
        ({"mode": "powersgd", "codec": "int2"}, "mode powersgd with codec int2: "),
        ({"mode": "onebit-adam", "inner": "muon"}, "mode onebit-adam with inner muon: "),
        ({"mode": "fedavg", "codec": "int2"}, "mode fedavg with codec int2: "),
        ({"mode": "sparta", "codec": "int2"}, "mode sparta with codec int2: "),
        ({"mode": "push-sum", "codec": "auto", "codecs": ("int8", "int4")}, ".* with codec int4: "),
        ({"outer": "sgd", "outer_momentum": 0.5}, "outer sgd .*: leave outer_momentum at 0"),
        ({"mode": "async", "outer": "yogi"}, "outer yogi .*; use nesterov, .* or take mode diloco"),
        ({"mode": "async", "outer": "sgd"}, "outer sgd with outer_lr 1 .*; set outer_lr to "),
        ({"mode": "async", "rule": "open"}, "rule open: a round begins .*; use mode diloco"),
        ({"align": True, "outer": "sgd"}, "align with outer sgd .*, or use nesterov"),
        ({"mode": "async", "align": True, "outer_momentum": 0.0}, ".* outer_momentum above 0"),
        ({"mode": "eager", "codec": "top12"}, "mode eager with .* or outer nesterov: "),
        ({"quorum": 1e-3}, "outer nesterov where .* stale; set quorum to 0.5$"),
        ({"quorum": 1e-3, "outer": "sgd"}, ".*; set outer_lr to .*, or quorum to 0.5$"),
        (
            {"quorum": 1e-3, "outer": "sgd", "outer_lr": 0.3, "rule": "open"},
            "rule open: .*; set quorum to 0.5$",
        ),
        ({"mode": "streaming", "delay": 9}, "delay exceeds a quarter of inner_steps"),
        ({"mode": "streaming", "alpha": 1.0}, "alpha = 1.0: must be 0 or more and less than 1"),
        ({"mode": "gossip", "neighbours": 20}, "neighbours = 20: must be 1 to 16"),
        ({"warmup_rounds": 2**70}, f"warmup_rounds = {2**70}: must be 0 to "),
    ],
)
def test_what_a_run_refuses_is_said_by_the_keys_of_the_scenario(
    changes: dict[str, Any], said: str
) -> None:
    with pytest.raises(OperatorError) as caught:
        load(None, changes)
    assert (caught.value.code, caught.value.exit_code) == ("E204", 2)
    assert re.match(said, caught.value.why)
    assert not re.search(r"\b(outer|rounds|merge|gossip|inner)\.[a-z]", caught.value.why)


def test_arrivals_in_lock_step_may_have_any_outer_optimizer_as_in_a_run() -> None:
    result = run("async", bound=0, outer="adam")
    assert result.points[-1].loss < result.points[0].loss


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


def test_where_nothing_can_be_written_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.simulate.world.simulate", lambda *_: pytest.fail("it has run"))
    for place in (tmp_path / "none" / "x.json", tmp_path, tmp_path / ("x" * 300)):
        result = simulated("--json", str(place))
        assert isinstance(result.exception, OperatorError), result.output
        assert "--json" in result.exception.fix
    result = simulated("--plot", str(tmp_path / "x.foo"))
    assert isinstance(result.exception, OperatorError), result.output
    assert result.exception.what == "no plot"
    monkeypatch.setenv("PATH", str(tmp_path))  # where there is no LaTeX
    result = simulated("--plot", str(tmp_path / "x.pgf"))
    assert isinstance(result.exception, OperatorError), result.output
    assert result.exception.what == "no plot"
    assert "x.pgf: " in result.exception.why


def test_a_scenario_file_is_read_and_its_mistakes_named(tmp_path: Path) -> None:
    file = tmp_path / "one.toml"
    file.write_text('mode = "gossip"\ncodec = "int8"\nbandwidth = "20Mbit"\n')
    assert load(file, {}).bandwidth == 2.5e6
    file.write_text("island = 3\n")
    with pytest.raises(OperatorError, match="island"):
        load(file, {})


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        ("20", "bandwidth: '20' is no number with a unit"),
        ("fast", "bandwidth: must be a speed, as in 20Mbit"),
        ("0", "bandwidth = 0.0: must be more than 0"),
        ("0Mbit", "bandwidth = 0.0: must be more than 0"),
    ],
)
def test_a_bandwidth_that_is_none_is_told_what_is_wrong_with_it(rate: str, said: str) -> None:
    result = simulated("--bandwidth", rate)
    assert isinstance(result.exception, OperatorError)
    assert said in result.exception.why


@pytest.mark.parametrize(
    "rate",
    [
        *("20Mbit", "20Mbps", "20MBit", "20mbits/s", ".02gbit", "20. mbit"),
        *("2.5MB", "2.5MBps", "2500kB/s", "2500KBPS", 2_500_000),
    ],
)
def test_a_bandwidth_is_written_as_the_speeds_of_a_node_are(rate: str | int) -> None:
    assert Scenario.model_validate({"bandwidth": rate}).bandwidth == 2.5e6
    assert speed(rate) == 2.5e6


@pytest.mark.parametrize("given", ["int4,int2", "int4, int2", '["int4", "int2"]', ["int4", "int2"]])
def test_a_list_of_codecs_is_taken_as_it_is_typed(given: str | list[str]) -> None:
    assert load(None, {"codec": "auto", "codecs": given}).codecs == ("int4", "int2")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("int4,int3", "codecs.1 = 'int3': must be .*'int4'"),
        ("", "codecs.0 = '': must be .*'int4'"),
        (4, "codecs: 4 is no list, as in int4,int2"),
    ],
)
def test_who_gives_no_list_of_codecs_is_told_what_would_do(given: object, said: str) -> None:
    with pytest.raises(OperatorError) as caught:
        load(None, {"codec": "auto", "codecs": given})
    assert re.search(said, caught.value.why)


def test_a_setting_that_is_given_twice_is_refused() -> None:
    result = simulated("--islands", "2", "--set", "islands=3")
    assert isinstance(result.exception, OperatorError)
    assert result.exception.what == "two values of islands"


@pytest.mark.parametrize(
    "arguments", [["--mode", "nonsense"], ["--set", "alpha"], ["--bandwidth", "20"]]
)
def test_the_command_refuses_what_it_cannot_do(arguments: list[str]) -> None:
    result = simulated(*arguments)
    assert isinstance(result.exception, OperatorError)


def test_nothing_is_said_of_a_schedule_that_no_simulation_has() -> None:
    told_of = simulated("--islands", "2", "--rounds", "2", "--inner-steps", "2")
    assert told_of.exit_code == 0, told_of.output
    assert "total_steps" not in told_of.output
