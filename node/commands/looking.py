"""Commands about nodes that run here, and about this machine: ``status`` to ``version``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from node import __version__
from node.commands.shared import (
    AsJson,
    Changes,
    ConfigFile,
    Mode,
    Preset,
    changes_of,
    finite,
    given_path,
)
from node.config import SECRETS, NodeConfig, resolve
from node.errors import without_credentials
from node.options import with_settings

if TYPE_CHECKING:
    from bootstrap.manifest import Manifest

OF_DIR = "where the node of --dir says it is"


@with_settings("dir", "api", "api_key", api=OF_DIR)
def status(
    flags: dict[str, Any],
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it again and again until Ctrl-C.")
    ] = False,
    every: Annotated[
        float, typer.Option(min=0.2, max=86_400, callback=finite, help="Seconds between looks.")
    ] = 2.0,
    as_json: AsJson = False,
) -> None:
    """One screen about the node that runs on this machine."""
    from node.status import render, report, watch_it

    config = resolve(flags, os.environ)
    api = config.named_api

    def look() -> dict[str, Any]:
        return report(config.dir, api=api, key=config.api_key)

    if watch:
        watch_it(look, every, as_json=as_json)
    state = look()
    typer.echo(json.dumps(state, indent=2) if as_json else render(state))


@with_settings("peers", "invitation", "dir", "api", "api_key", api=OF_DIR)
def monitor(
    flags: dict[str, Any],
    replay: Annotated[
        Path | None,
        typer.Option(
            parser=given_path, metavar="FILE", help="Show an events.jsonl from its beginning."
        ),
    ] = None,
    speed: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Seconds of the run that a replay shows in one; 0: all at once.",
        ),
    ] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="Print one picture as JSON.")] = False,
) -> None:
    """The dashboard in a terminal.

    Of the node that runs here; of a swarm with --peers, as an observer that nobody counts; of a
    log of events with --replay.
    """
    from node.monitor.terminal.command import main

    config = resolve(flags, os.environ)
    raise typer.Exit(main(config, replay=replay, speed=speed, once=once))


@with_settings("dir")
def runs(
    flags: dict[str, Any],
    everything: Annotated[
        bool, typer.Option("--all", help="Also failed starts, and demos that are over.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Nodes on this machine, and their state directories."""
    from node.directories import all_directories, as_document, as_text

    found = all_directories(resolve(flags, os.environ).dir)
    typer.echo(as_document(found) if as_json else as_text(found, everything=everything))


@with_settings("dir")
def stop(
    flags: dict[str, Any],
    now: Annotated[bool, typer.Option("--now", help="At once, without a last checkpoint.")] = False,
    timeout: Annotated[
        float, typer.Option(min=1, callback=finite, help="Seconds to wait for it.")
    ] = 120.0,
) -> None:
    """Stop a node on this machine, cleanly.

    It leaves as after Ctrl-C; this waits until it has ended.
    """
    from node.directories import stop as stop_node

    pid = stop_node(
        resolve(flags, os.environ).dir,
        timeout_s=timeout,
        now=now,
        tell=lambda text: typer.echo(text, err=True),
    )
    typer.echo(f"process {pid} has ended")


@with_settings(
    "peers", "listen", "public_addr", "api", "dashboard", "dir", "device", "invitation", "run"
)
def doctor(
    flags: dict[str, Any],
    config_file: ConfigFile = None,
    network: Annotated[
        bool, typer.Option("--network/--no-network", help="Ask peers, and try torch.")
    ] = True,
    preset: Preset = "",
    as_json: AsJson = False,
) -> None:
    """Find what would keep this machine from training.

    Each check with why and what to do; exit status 1 if one failed. What is needed is what the
    run of --run or --preset needs, else that of the state directory, else that of the peers.
    """
    from node.commands.manifest import manifest_for
    from node.doctor.command import main
    from node.doctor.run import of_directory

    config = resolve(flags, os.environ, config_file)
    given = bool(preset) or config.run is not None
    manifest = None if given else of_directory(config.dir)
    manifest = manifest or manifest_for(config, preset)
    raise typer.Exit(main(config, manifest, network=network, as_json=as_json))


def version() -> None:
    """Versions of Atoll, its protocol and what it is built on."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    from protocols.messages import PROTOCOL_VERSION

    typer.echo(f"atoll {__version__} (protocol {PROTOCOL_VERSION})")
    typer.echo(f"python {sys.version.split()[0]}")
    for package in ("torch", "hivemind"):
        try:
            typer.echo(f"{package} {installed(package)}")
        except PackageNotFoundError:
            typer.echo(f"{package} missing")


@with_settings()
def config_show(
    flags: dict[str, Any],
    config_file: ConfigFile = None,
    preset: Preset = "",
    changes: Changes = None,
    mode: Mode = "",
    as_json: AsJson = False,
) -> None:
    """Every setting with its value and source, and all of the run that `node start` would create.

    A run to join has settings of its own, which its peers tell.
    """
    from node.commands.manifest import manifest_for

    config = resolve(flags, os.environ, config_file)
    given = changes_of(changes, mode)
    creates = preset or given or config.run is not None or config.role in ("island", "server")
    manifest = manifest_for(config, preset, given) if creates else None
    typer.echo(_as_json(config, manifest) if as_json else _as_text(config, manifest))


def config_explain(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...",
            help="Settings or tables, as in rounds.quorum, rounds, quorum, listen; all by default.",
        ),
    ] = None,
) -> None:
    """What settings mean, what they take, and their defaults: of a run and of a node."""
    from node.setting_reference import explain

    typer.echo(explain(names or ()))


def _shown(config: NodeConfig, key: str) -> Any:
    value = getattr(config, key)
    if isinstance(value, str):
        value = without_credentials(value)
    return "(hidden)" if key in SECRETS and value else value


def _as_text(config: NodeConfig, manifest: Manifest | None) -> str:
    from bootstrap.validation import to_toml, toml_value

    lines = ["# settings of this node"]
    for key in NodeConfig.model_fields:
        value = _shown(config, key)
        source = config.source(key)
        if value is None:
            lines.append(f"# {key} is not set")
        else:
            lines.append(f"{key} = {toml_value(value)}  # {source}")
    if manifest is not None:
        of = f" of {config.run}" if config.run is not None else ""
        lines += ["", f"# manifest{of}: run {manifest.label}", to_toml(manifest)]
    return "\n".join(lines)


def _as_json(config: NodeConfig, manifest: Manifest | None) -> str:
    settings = {
        key: {"value": _shown(config, key), "source": config.source(key)}
        for key in NodeConfig.model_fields
    }
    run = None
    if manifest is not None:
        run = {"id": manifest.run_id.hex(), "manifest": manifest.model_dump(mode="json")}
    return json.dumps({"settings": settings, "run": run}, indent=2, default=str)
