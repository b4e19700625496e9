"""Small scenarios, each with the codec that its mode reads, and the command."""

from __future__ import annotations

from typing import Any

from click.testing import Result as Said
from signals_kit import signals_kept
from typer.testing import CliRunner

from node.cli import app
from node.simulate.scenario import Scenario
from node.simulate.world import Result, simulate
from protocols.errors import OperatorError

SMALL: dict[str, Any] = {
    "islands": 3,
    "rounds": 4,
    "inner_steps": 8,
    "hidden": 16,
    "batch": 16,
    "inner_lr": 1e-2,
}
CODECS = {"gossip": "int8", "push-sum": "bf16", "sparta": "bf16", "allreduce": "fp32"}


def run(mode: str, **changes: Any) -> Result:
    codec = {"codec": CODECS.get(mode, "int4")}
    return simulate(Scenario.model_validate(SMALL | {"mode": mode} | codec | changes))


def told(caught: BaseException) -> OperatorError:
    """The operator's error inside of groups of tasks."""
    while isinstance(caught, BaseExceptionGroup):
        caught = caught.exceptions[0]
    assert isinstance(caught, OperatorError), caught
    return caught


def simulated(*arguments: str) -> Said:
    """``node simulate``, with what it says and raises."""
    with signals_kept():
        return CliRunner().invoke(app, ["simulate", *arguments])
