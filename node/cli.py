"""The command line: ``node start``, ``node status`` and the rest.

Heavy modules are imported inside the commands, so that ``--help`` answers at once.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from bootstrap.manifest import Manifest, load
from bootstrap.validation import bad_config, explain, to_toml, toml_value
from node import __version__
from node.config import SECRETS, NodeConfig, no_address, resolve
from node.errors import EXIT_USAGE, operator_error
from node.interrupts import clean_up_first
from node.options import with_settings

app = typer.Typer(
    name="node",
    help="Train one model together over the internet. `node start` trains, alone or with --peers.",
    epilog="This is not Node.js. Where both are installed, use the command `atoll`.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
config_app = typer.Typer(help="Look at settings.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")

ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        help="TOML file of settings. [default: node.toml in the state directory]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

Preset = Annotated[
    str, typer.Option(metavar="NAME", help="Create a run from a preset: tiny, small, 125m, 1b, 8b.")
]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the preset, as in inner.lr=1e-3."),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"atoll {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


@app.command()
@with_settings()
def start(
    flags: dict[str, Any],
    config_file: ConfigFile = None,
    preset: Preset = "",
    changes: Changes = None,
) -> None:
    """Train: create a run, or join one with --peers."""
    config = resolve(flags, os.environ, config_file)
    _run(config, manifest_for(config, preset, changes or ()))


@app.command()
@with_settings(
    without=(
        "run",
        "role",
        "nproc",
        "threads",
        "device",
        "micro_batch",
        "data",
        "checkpoint_every",
        "keep_checkpoints",
        "resume",
        "rounds",
    )
)
def bootstrap(flags: dict[str, Any], config_file: ConfigFile = None) -> None:
    """Introduce peers to each other, without training (a seed)."""
    _run(resolve(flags | {"role": "seed"}, os.environ, config_file), None)


@app.command()
def demo(
    seconds: Annotated[float, typer.Option(min=1, help="About how long it may take.")] = 90,
    islands: Annotated[int, typer.Option(min=1, max=16, help="How many islands.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of data, weights and faults.")] = 0,
    as_json: AsJson = False,
) -> None:
    """A whole swarm on this machine: islands train, one is killed, one joins."""
    from node.demo import main

    clean_up_first()  # islands are processes
    raise typer.Exit(main(seconds=seconds, islands=islands, seed=seed, as_json=as_json))


@app.command()
@with_settings("listen", "peers", "public_addr")
def bench(
    flags: dict[str, Any],
    members: Annotated[int, typer.Option(min=2, max=256, help="How many there are.")] = 2,
    size: Annotated[int, typer.Option(min=1, help="Parameters.")] = 25_000_000,
    codec: Annotated[str, typer.Option(help="fp32, bf16, fp16, int8, int4, …")] = "int4",
    rounds: Annotated[int, typer.Option(min=1, help="How often to average.")] = 5,
    tls: Annotated[bool, typer.Option(help="Without it: in the clear, at home only.")] = True,
    as_json: AsJson = False,
) -> None:
    """Average noise with others: what do the links and the machines give? No training."""
    from node.bench.command import main
    from node.bench.member import Settings
    from protocols.codecs import NAMES

    if codec not in NAMES:
        raise bad_config(f"no codec {codec!r}", "there are " + ", ".join(NAMES), "give one of them")
    config = resolve(flags, os.environ)
    settings = Settings(
        members=members,
        size=size,
        codec=codec,
        rounds=rounds,
        tls=tls,
        listen=config.listen,
        advertise=config.public_addr,
        peers=config.peers,
        seed=os.getpid(),
    )
    raise typer.Exit(main(settings, as_json=as_json))


@app.command()
@with_settings("dir", "api", "api_key")
def status(flags: dict[str, Any], as_json: AsJson = False) -> None:
    """One screen about the node that runs on this machine."""
    from node.status import fetch, render

    config = resolve(flags, os.environ)
    api = "" if config.is_default("api") else config.api
    state = fetch(config.dir, api=api, key=config.api_key)
    typer.echo(json.dumps(state, indent=2) if as_json else render(state))


@app.command()
@with_settings("dir")
def keygen(
    flags: dict[str, Any],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="[default: identity.pem in the state directory]"),
    ] = None,
) -> None:
    """Make a new identity and print its peer id; never overwrites one."""
    from protocols.identity import Identity

    path = out or resolve(flags, os.environ).identity_path
    identity = Identity.generate()
    try:
        identity.save(path)
    except FileExistsError as error:
        raise operator_error(
            "E104",
            f"{path} exists",
            why="a lost key is a lost identity, so none is overwritten",
            fix="give another file with --out, or move that one away",
        ) from error
    except OSError as error:
        raise operator_error(
            "E104",
            f"cannot write {path}",
            why=error.strerror or str(error),
            fix="give a file this user may write with --out",
        ) from error
    typer.echo(identity.peer_id)


@app.command()
def export(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write; must not exist.")],
    source: Annotated[
        Path,
        typer.Option(
            "--from", metavar="PATH", help="A checkpoint, or a state directory for its newest one."
        ),
    ],
    to: Annotated[str, typer.Option(metavar="hf", help="Format: hf (Hugging Face).")] = "hf",
) -> None:
    """Write the model of a checkpoint for other programs."""
    if to != "hf":
        raise bad_config(f"cannot export to {to!r}", "hf is the one format", "give --to hf")
    from node.export import export_hf
    from node.outer_files import read_checkpoint

    clean_up_first()  # a folder may be half written
    outer = read_checkpoint(source)
    typer.echo(export_hf(outer.signed.manifest.model, outer.base, folder))


@app.command()
def version() -> None:
    """Versions of Atoll, its protocol and what it stands on."""
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


@config_app.command("show")
@with_settings()
def config_show(
    flags: dict[str, Any], config_file: ConfigFile = None, as_json: AsJson = False
) -> None:
    """Every setting with its value and source, and the manifest of the run file."""
    config = resolve(flags, os.environ, config_file)
    manifest = load(config.run) if config.run is not None else None
    typer.echo(_as_json(config, manifest) if as_json else _as_text(config, manifest))


def manifest_for(
    config: NodeConfig, preset: str = "", changes: Sequence[str] = ()
) -> Manifest | None:
    """The manifest this node brings along; None where it takes one from peers or a checkpoint.

    With both a run of its own and ``peers`` that run is returned, to be compared with the swarm's
    (E201).
    """
    if preset or changes:
        if config.run is not None:
            raise bad_config("two runs", "--run excludes --preset and --set", "give one of them")
        return _preset(preset or "tiny", changes)
    if config.run is not None:
        return load(config.run)
    if config.peers or config.resume:
        return None
    if config.role == "observer":
        raise bad_config(
            "nothing to observe",
            "role observer creates no run, and no peers are given",
            "give a peer of the run with --peers HOST:PORT",
        )
    return Manifest() if config.role == "island" else None


def _preset(name: str, changes: Sequence[str]) -> Manifest:
    from node.presets import preset

    split = dict(change.partition("=")[::2] for change in changes)
    try:
        return preset(name, split)
    except ValidationError as error:
        why = "\n       ".join(explain(error, Manifest))
        raise bad_config("bad --set", why, "correct what is named above") from error
    except ValueError as error:
        raise bad_config("bad --preset or --set", str(error), "see node start --help") from error


def _run(config: NodeConfig, manifest: Manifest | None) -> None:
    from node.runtime import run

    raise typer.Exit(run(config, manifest))


def _shown(config: NodeConfig, key: str) -> Any:
    value = getattr(config, key)
    return "(hidden)" if key in SECRETS and value else value


def _as_text(config: NodeConfig, manifest: Manifest | None) -> str:
    lines = ["# settings of this node"]
    for key in NodeConfig.model_fields:
        value = _shown(config, key)
        source = config.source(key)
        if value is None:
            lines.append(f"# {key} is not set")
        else:
            lines.append(f"{key} = {toml_value(value)}  # {source}")
    if manifest is not None:
        lines += ["", f"# manifest of {config.run}: run {manifest.label}", to_toml(manifest)]
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


_NODEJS_SUFFIXES = (".js", ".mjs", ".cjs", ".ts", ".mts", ".cts")
_NODEJS_FLAGS = (
    "-",
    "-c",
    "-e",
    "-i",
    "-p",
    "-pe",
    "-r",
    "-v",
    "--check",
    "--eval",
    "--interactive",
    "--print",
    "--require",
    "--test",
    "--watch",
    "--v8-options",
    "--no-warnings",
)
_NODEJS_PREFIXES = (
    "--import",
    "--inspect",
    "--experimental-",
    "--input-type",
    "--loader",
    "--max-old-space-size",
    "--enable-source-maps",
    "--trace-",
    "--unhandled-rejections",
    "--env-file",
    "--openssl-",
)


def refuse_empty_peers(arguments: list[str]) -> None:
    """Raise E102 where ``--peers`` would take the next flag for its address."""
    for flag, value in itertools.pairwise([*arguments, ""]):
        if flag == "--peers" and (not value or value.startswith("--")):
            raise no_address()


def refuse_nodejs(arguments: list[str]) -> None:
    """Exit with status 2 if this looks like a call of Node.js, which has the same name."""
    first = arguments[0] if arguments else ""
    if (
        first in _NODEJS_FLAGS
        or first.lower().endswith(_NODEJS_SUFFIXES)
        or first.startswith(_NODEJS_PREFIXES)
    ):
        typer.echo(
            f"`{first}` looks like a call of Node.js: this is not Node.js.\n"
            "This `node` is Atoll's; Atoll also answers to `atoll`. Node.js is found by its full "
            "path,\nor outside of this Python environment.",
            err=True,
        )
        raise SystemExit(EXIT_USAGE)
