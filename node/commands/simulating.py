"""``node simulate``: a whole swarm in this process, on a virtual clock."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bootstrap.validation import bad_config
from node.commands.shared import finite, given_path
from node.errors import with_extra
from node.interrupts import clean_up_first
from node.monitor.wording import megabytes
from protocols.errors import OperatorError, reason

if TYPE_CHECKING:
    from node.simulate.scenario import Scenario
    from node.simulate.world import Result

WIDTH = 48  # of the chart in the terminal


def simulate(
    scenario: Annotated[
        Path | None,
        typer.Option(
            "--scenario", parser=given_path, metavar="FILE", help="TOML file of settings."
        ),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="diloco, streaming, eager, gossip, push-sum, async, server, fedavg, sparta, "
            "allreduce, powersgd, onebit-adam or btm. [default: diloco]"
        ),
    ] = None,
    islands: Annotated[int | None, typer.Option(help="How many. [default: 4]")] = None,
    rounds: Annotated[
        int | None,
        typer.Option(
            help="How much to train: as much as this many rounds without stragglers. [default: 20]"
        ),
    ] = None,
    inner_steps: Annotated[int | None, typer.Option(help="In a round. [default: 20]")] = None,
    codec: Annotated[
        str | None, typer.Option(help="[default: int4; gossip and push-sum: bf16]")
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(callback=finite, metavar="SECONDS", help="One way. [default: 0.05]"),
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(metavar="RATE", help="Of each link. [default: 100Mbit]")
    ] = None,
    churn: Annotated[
        float | None,
        typer.Option(
            callback=finite, metavar="SHARE", help="Of the islands replaced in 10 rounds."
        ),
    ] = None,
    stragglers: Annotated[int | None, typer.Option(help="Islands that are 4x slower.")] = None,
    attackers: Annotated[int | None, typer.Option(help="Islands that send -3x updates.")] = None,
    seed: Annotated[int | None, typer.Option(help="[default: 0]")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any other setting of a scenario."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", parser=given_path, metavar="FILE", help="Write the result there."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            parser=given_path, metavar="FILE", help="Draw the loss there (needs matplotlib)."
        ),
    ] = None,
) -> None:
    """Train a swarm of islands in this process, on a virtual clock and a simulated network."""
    clean_up_first()
    given = {
        "mode": mode,
        "islands": islands,
        "rounds": rounds,
        "inner_steps": inner_steps,
        "codec": codec,
        "latency": latency,
        "bandwidth": bandwidth,
        "churn": churn,
        "stragglers": stragglers,
        "attackers": attackers,
        "seed": seed,
    }
    flags = {key: value for key, value in given.items() if value is not None}
    one = _scenario(scenario, flags, changes or [])
    # all that can be known to fail does so before the run, which may take long
    if json_file is not None:
        _check_place(json_file, "no result", "--json")
    draw = _plotter(plot) if plot is not None else None
    result = _with_progress(one)
    typer.echo(_summary(result))
    if json_file is not None:
        _written(json_file, json.dumps(result.to_json(), indent=1) + "\n")
    if draw is not None and plot is not None:
        try:
            draw(result, plot)
        except OSError as error:
            raise _no_plot(f"{plot}: {reason(error)}") from error


def _scenario(path: Path | None, flags: dict[str, Any], changes: list[str]) -> Scenario:
    from node.simulate.scenario import load

    values = dict(flags)
    for change in changes:
        key, equals, value = change.partition("=")
        if not equals:
            raise bad_config("bad --set", f"{change!r} is no KEY=VALUE", "as in --set alpha=0.5")
        if key in flags:
            flag = "--" + key.replace("_", "-")
            raise bad_config(f"two values of {key}", f"{flag} and --set {change}", "give one")
        values[key] = value
    return load(path, values)


def _with_progress(one: Scenario) -> Result:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from node.modes import doubts
    from node.simulate.run import manifest_of
    from node.simulate.world import decide
    from node.simulate.world import simulate as run

    for doubt in doubts(manifest_of(decide(one)[0], one.rounds), schedule=False):
        typer.echo(doubt, err=True)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %")
    with Progress(
        *columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task(f"{one.islands} islands, {one.mode}", total=1.0)
        logging.disable(logging.WARNING)  # what downloads say of islands that are replaced
        try:
            return run(one, lambda share: bar.update(task, completed=share))
        finally:
            logging.disable(logging.NOTSET)


def _summary(result: Result) -> str:
    from node.simulate.run import codecs_of

    lines = [
        f"{'virtual time':>12} {'steps':>7} {'bytes/parameter':>16} {'loss':>8}",
    ]
    points = result.points
    every = max(1, len(points) // 12)
    low, high = min(p.loss for p in points), max(p.loss for p in points)
    for point in [*points[:-1:every], points[-1]]:
        length = round(WIDTH * (point.loss - low) / (high - low)) if high > low else 0
        lines.append(
            f"{point.time:10.1f} s {point.steps:7.0f} {point.bytes:16.2f} {point.loss:8.4f} "
            f"{'#' * length}".rstrip()
        )
    one = result.scenario
    lines.append(
        f"{one.islands} islands, {one.mode}, {'+'.join(codecs_of(one))}, "
        f"{result.parameters:,} parameters{_chosen(one)}: "
        f"{points[-1].time:,.0f} s simulated in {result.seconds:.0f} s"
    )
    lines += [f"{key.replace('_', ' ')}: {_noted(key, n)}" for key, n in result.notes.items()]
    return "\n".join(lines)


def _chosen(one: Scenario) -> str:
    """Settings that are not the defaults, which tell two results apart."""
    said = {"mode", "islands", "codec", "codecs"}
    given = one.model_dump(exclude_defaults=True, exclude=said)
    return "".join(f", {name}={_setting(name, value)}" for name, value in given.items())


def _setting(name: str, value: object) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value / 125e3:g}Mbit" if name == "bandwidth" else f"{value:g}"


def _noted(key: str, value: float) -> str:
    """Bytes with their unit; numbers that are large without an exponent or a fraction."""
    if key.endswith("_bytes"):
        return megabytes(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"


def _plotter(path: Path) -> Callable[[Result, Path], None]:
    """What draws there; raises OperatorError E204 where nothing can."""
    try:
        from node.simulate import plot
    except ImportError as error:
        raise bad_config("no plot", "matplotlib is not installed", with_extra("bench")) from error
    try:
        plot.check(path)
    except ValueError as error:
        raise _no_plot(str(error)) from error
    _check_place(path, "no plot", "--plot")
    return plot.draw


def _no_plot(why: str) -> OperatorError:
    return bad_config("no plot", why, "give a .png, .svg or .pdf with --plot")


def _check_place(path: Path, what: str, option: str) -> None:
    """Raise OperatorError E204 where no file can be written there."""
    why = ""
    try:
        if path.is_dir():
            why = "it is a directory"
        elif not path.parent.is_dir():
            why = f"there is no directory {path.parent}"
        elif not os.access(path if path.exists() else path.parent, os.W_OK):
            why = "it may not be written"
    except OSError as error:  # a name that is too long, or a folder that may not be looked into
        why = reason(error)
    if why:
        raise bad_config(what, f"{path}: {why}", f"give another file with {option}")


def _written(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise bad_config(
            "no result", f"{path}: {reason(error)}", "give another file with --json"
        ) from error
