"""Alerts and panels of the templates name what a node exports."""

import json
import re

import promql_parser
import pytest
import yaml
from api_kit import Kit
from promql_kit import evaluated, labels

from node.monitor import metrics
from node.monitor.events import CheckpointSaved, RoundDone, RoundFailed, Step
from node.monitor.metrics import exposition, registry
from node.monitor.views import GpuView, MachineView, PeerView, RunView
from node.templates import render


@pytest.fixture(scope="module")
def exported():
    """Every sample a node can export: name -> label names -> values seen."""
    kit = Kit()
    kit.live()
    kit.state.run = RunView(id="ab", label="x", total_rounds=50, manifest={})
    kit.state.providers.machine = lambda: MachineView(
        memory_available=1,
        memory_used=1,
        disk_free=1,
        disk_total=2,
        gpus=(
            GpuView(index=0, utilisation=0.5, memory_used=1, memory_total=2),
            GpuView(index=1, temperature_c=60.0, power_w=300.0),
        ),
    )
    kit.state.providers.peers = lambda: [PeerView(peer="a", status="active", rtt_s=0.1)]
    kit.log.emit(Step(step=1, round=1, loss=2.0, grad_norm=1.0, mfu=0.3, data_s=0.01))
    kit.log.emit(
        RoundDone(round=1, validation_loss=1.0, consensus=0.5, consensus_after=0.1, utilisation=0.9)
    )
    kit.log.emit(CheckpointSaved(round=1, path="x"))
    found = {"up": {"job": {"atoll"}}}
    for line in exposition(registry(kit.state)).decode().splitlines():
        if not line.startswith("#"):
            name, labels = re.fullmatch(r"(\w+)(?:\{(.*)\})? \S+", line).groups()
            seen = found.setdefault(name, {})
            for label, value in re.findall(r'(\w+)="([^"]*)"', labels or ""):
                seen.setdefault(label, set()).add(value)
    return found


def expressions():
    for group in yaml.safe_load(render("prometheus"))["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    for panel in json.loads(render("grafana"))["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def rule_of(title, kit):
    """Whether an alert's rule holds some hours from the kit's time on."""
    [text] = [expr for name, expr in expressions() if name == title]
    rule = promql_parser.parse(text)

    def holds(hours):
        lines = exposition(registry(kit.state)).decode().splitlines()
        told = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        samples = {name: float(said) for name, said in told}
        return evaluated(rule, samples, kit.now + 3600 * hours) is not None

    return holds


def selectors(expression):
    """Name and matchers of everything that an expression reads."""
    return re.findall(r"\b(swarm_\w+|up)\b(?:\{([^}]*)\})?", expression)


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_expressions_are_valid_and_read_what_is_exported(title, expression, exported):
    promql_parser.parse(expression)
    read = selectors(expression)
    assert read, title
    for name, matchers in read:
        assert name in exported, f"{title} reads {name}, which nothing exports"
        for label, sign, value in re.findall(r'(\w+)(=~|=)"([^"]*)"', matchers):
            if label == "instance":
                continue
            assert label in exported[name], f"{name} has no label {label}"
            for one in value.split("|") if sign == "=~" else [value]:
                assert one in exported[name][label], f"{name} never has {label}={one}"


@pytest.mark.parametrize(("title", "expression"), list(expressions()))
def test_both_sides_of_an_operator_can_meet(title, expression, exported):
    labels(promql_parser.parse(expression), exported)


@pytest.mark.parametrize(
    ("expression", "meet"),
    [
        ('swarm_rounds_total{outcome="failed"} > swarm_rounds_total{outcome="committed"}', False),
        ('rate(swarm_rounds_total{outcome="failed"}[1h]) > ignoring(outcome) swarm_round', True),
        ("swarm_round and swarm_rounds_total", False),
        ("swarm_round and sum without (outcome) (swarm_rounds_total) == 0", True),
        ("swarm_round and on(instance) (swarm_rounds_total == 0)", True),
        ("sum by (kind) (swarm_sent_bytes_total) / swarm_received_bytes_total", True),
        ("sum(swarm_sent_bytes_total) / swarm_received_bytes_total", False),
        ("time() - swarm_round > 3", True),
    ],
)
def test_what_meets(expression, meet, exported):
    parsed = promql_parser.parse(expression)
    if meet:
        labels(parsed, exported)
    else:
        with pytest.raises(AssertionError, match="on one side"):
            labels(parsed, exported)


@pytest.mark.parametrize(("step_s", "after_h"), [(2.0, 3.0), (60.0, 5 * 50 / 3)])
def test_a_stall_is_told_of_by_what_the_steps_of_a_round_take(step_s, after_h):
    """As well where the alarm ``stall`` is silent: at an island that joins again."""
    kit = Kit()
    fires = rule_of("AtollRoundsStalled", kit)
    manifest = {"rounds": {"inner_steps": 1000}}
    kit.state.run = RunView(id="ab", label="x", total_rounds=50, manifest=manifest)
    kit.now = kit.state.node.started
    kit.log.emit(Step(step=1, round=0, loss=2.0, seconds=step_s))
    assert not fires(after_h - 0.1)
    assert fires(after_h + 0.1)
    kit.now += 36_000
    kit.log.emit(RoundDone(round=0))
    assert not fires(after_h - 0.1)
    assert fires(after_h + 0.1)
    kit.log.emit(RoundDone(round=50))
    kit.state.round = 50
    assert not fires(after_h + 0.1), "the run is over"


@pytest.mark.parametrize(
    ("committed", "degraded", "failed", "fires"),
    [
        (60, 0, 5, False),
        (0, 60, 1, False),
        (4, 56, 11, False),
        (60, 0, 13, True),
        (4, 56, 13, True),
        (0, 0, 2, True),
    ],
)
def test_attempts_that_fail_are_told_of_by_their_share(committed, degraded, failed, fires):
    """Of all that were made: a round without the work of somebody is a round too."""
    kit = Kit()
    holds = rule_of("AtollRoundsFail", kit)
    for number in range(committed + degraded):
        outcome = "committed" if number < committed else "degraded"
        kit.log.emit(RoundDone(round=number, outcome=outcome))
    for _ in range(failed):
        kit.log.emit(RoundFailed(round=60, reason="another plan"))
    assert holds(0) == fires


def test_a_node_that_never_makes_a_checkpoint_is_told_of_too():
    """As where its disk was read-only from the start; one that trains nothing makes none."""
    kit = Kit()
    fires = rule_of("AtollNoCheckpoint", kit)
    kit.now = kit.state.node.started
    assert not fires(7)
    kit.log.emit(Step(step=1, round=0, loss=2.0))
    assert [fires(hours) for hours in (5, 7)] == [False, True]
    kit.now += 36_000
    kit.log.emit(CheckpointSaved(round=1, path="x"))
    assert [fires(hours) for hours in (5, 7)] == [False, True]


@pytest.mark.parametrize(("title", "most"), [("Islands active", 2), ("Peers by status", 5)])
def test_islands_are_counted_without_those_who_do_not_train(title, most):
    kit = Kit()
    roles = ("island", "island", "server", "seed", "odd\x1b")
    kit.state.providers.peers = lambda: [
        PeerView(peer=str(n), role=role, status="active") for n, role in enumerate(roles)
    ]
    [expression] = [expr for name, expr in expressions() if name == title]
    [(name, matchers)] = selectors(expression)
    chosen = dict(re.findall(r'(\w+)="([^"]*)"', matchers)) | {"status": "active"}
    [family] = [one for one in registry(kit.state).collect() if one.name == name]
    values = [one.value for one in family.samples if chosen.items() <= one.labels.items()]
    assert ("sum" in expression) == (len(values) > 1)
    assert sum(values) == most


def test_every_label_of_a_legend_is_there(exported):
    for panel in json.loads(render("grafana"))["panels"]:
        for target in panel["targets"]:
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            known = {"instance"}.union(*(exported[name] for name, _ in selectors(target["expr"])))
            assert labels <= known, panel["title"]


def test_alerts_say_what_to_do_and_how_bad_it_is():
    for group in yaml.safe_load(render("prometheus"))["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "description"}


def test_the_dashboard_is_one_that_grafana_imports():
    board = json.loads(render("grafana"))
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert at["x"] + at["w"] <= 24
        assert not cells & taken
        taken |= cells
        letters = [target["refId"] for target in panel["targets"]]
        assert len(set(letters)) == len(letters)


def test_all_alarms_are_exported(exported):
    from typing import get_args, get_type_hints

    from node.monitor.alarms import Alarm

    kinds = set(get_args(get_type_hints(Alarm)["kind"]))
    assert set(metrics.ALARMS) == kinds == exported["swarm_alarms"]["kind"]
