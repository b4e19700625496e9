"""Commands that take part in a run or play one: ``start``, ``bootstrap``, ``demo``, ``bench``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bootstrap.validation import bad_config, nearest
from node.commands.shared import AsJson, Changes, ConfigFile, Mode, Preset, changes_of, finite
from node.config import NodeConfig, resolve
from node.errors import operator_error
from node.hosts.meeting import meeting, refuse_hosts
from node.interrupts import clean_up_at_any_end
from node.island.settings import IslandSettings
from node.monitor.machine import Machine
from node.options import with_settings
from node.templates import DISK, TEMPLATES, checkpoint_s, render, stop_s

if TYPE_CHECKING:
    from bootstrap.manifest import Manifest

HOSTS = ("nnodes", "node_rank", "rdzv_endpoint", "rdzv_id")  # see node.hosts.meeting
TRAINING = (*IslandSettings.model_fields, "data", "data_cache", "inner_steps")
OF_CREATORS = ("data", "data_cache")  # the evaluation shard is cut from the creator's text
SAVING = ("checkpoint_every", "checkpoint_seconds", "keep_checkpoints", "checkpoint_copy")
TEMPLATE_NAMES = ", ".join(TEMPLATES)


@with_settings()
def start(
    flags: dict[str, Any],
    config_file: ConfigFile = None,
    preset: Preset = "",
    changes: Changes = None,
    mode: Mode = "",
) -> None:
    """Train: create a run, or join one with --peers."""
    from node.commands.manifest import manifest_for

    config = resolve(flags, os.environ, config_file)
    if config.role != "island":
        refuse_hosts(config, config.role)
        creates = config.role == "server" and not (config.peers or config.resume)
        _refuse_training(flags, config.role, but=OF_CREATORS if creates else ())
    place = meeting(config, os.environ) if config.role == "island" else None
    if place is not None and place.host > 0:
        from node.hosts.helper import run

        raise typer.Exit(run(config, place))
    _run(config, manifest_for(config, preset, changes_of(changes, mode)))


def _refuse_training(flags: dict[str, Any], role: str, but: tuple[str, ...]) -> None:
    """Raise E204 for flags that promise work which such a node does not do; ``but``: it does.

    Those that promise none (``--device``, ``--threads``, :data:`SAVING`) scripts may give to all
    their nodes, as they may share settings in files and environments.
    """
    but = (*but, *HOSTS, "device", "threads")
    given = [key for key in TRAINING if key in flags and key not in but]
    if given:
        raise bad_config(
            f"{', '.join('--' + key.replace('_', '-') for key in given)} with --role {role}",
            "such a node trains nothing, so it would do nothing",
            "leave out one of them",
        )


bootstrap_app = typer.Typer(
    help="Introduce peers to each other, without training (a seed).", rich_markup_mode=None
)


@bootstrap_app.callback(invoke_without_command=True)
@with_settings(
    without=(
        *TRAINING,
        *SAVING,
        "run",
        "role",
        "tokenizer",
        "hf_config",
        "init_from",
        "resume",
        "rounds",
        "wait_for",
    )
)
def bootstrap(
    flags: dict[str, Any], context: typer.Context, config_file: ConfigFile = None
) -> None:
    """Introduce peers to each other, without training (a seed).

    `node bootstrap template` prints files with which nodes are run elsewhere.
    """
    if context.invoked_subcommand is None:
        _run(resolve(flags | {"role": "seed"}, os.environ, config_file), None)
    elif flags:
        given = ", ".join("--" + key.replace("_", "-") for key in flags)
        raise bad_config(
            f"{given} before {context.invoked_subcommand}",
            "options of the seed itself do not go with it",
            f"write them after {context.invoked_subcommand}, if it has them",
        )


@bootstrap_app.command()
@with_settings("peers", "public_addr", "nnodes")
def template(
    flags: dict[str, Any],
    name: Annotated[str, typer.Argument(metavar="NAME", help=TEMPLATE_NAMES)],
    parameters: Annotated[
        float,
        typer.Option(
            min=0,
            callback=finite,
            help="Of the model to train, as in 7e9: of a large one the last checkpoint takes long.",
        ),
    ] = 0,
    disk: Annotated[
        float,
        typer.Option(
            min=1, callback=finite, help="Bytes a second that the disk of its checkpoints writes."
        ),
    ] = DISK,
) -> None:
    """Print a file to run or watch nodes with elsewhere.

    For a seed; with --peers, for an island that trains with them.
    """
    config = resolve(flags, {}, here=False)  # it is for another machine
    minimum, _, hosts = config.nnodes.rpartition(":")
    if not hosts.isdigit():
        raise bad_config("--nnodes auto", "a file says how many hosts there are", "give a number")
    try:
        text = render(
            name,
            peers=config.peers,
            public_addr=config.public_addr,
            minimum=int(minimum or 1),  # what they are for: one that is lost is gone on without
            hosts=int(hosts),
            stop=stop_s(checkpoint_s(parameters, disk)),
        )
    except KeyError as error:
        raise bad_config(
            f"no template {name!r}{nearest(name, TEMPLATES)}",
            f"there are {TEMPLATE_NAMES}",
            "give one",
        ) from error
    if int(hosts) > 1 and not TEMPLATES[name].of_hosts:
        those = " or ".join(other for other, one in TEMPLATES.items() if one.of_hosts)
        raise bad_config(
            f"--nnodes {config.nnodes} with {name}",
            "that file runs no island of several hosts",
            f"leave it out, or take {those}",
        )
    typer.echo(text, nl=False)


def demo(
    seconds: Annotated[
        float,
        typer.Option(
            min=1,
            callback=finite,
            help="Seconds to plan rounds for, by the speed of this machine at the start: 8 rounds "
            "and 45 seconds at least. Fewer are made if the machine gets busier: once all has "
            "happened, it ends.",
        ),
    ] = 90,
    islands: Annotated[int, typer.Option(min=1, max=16, help="How many islands.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of data, weights and faults.")] = 0,
    as_json: AsJson = False,
) -> None:
    """A whole swarm on this machine: islands train, one is killed, one joins."""
    from node.demo.run import main

    clean_up_at_any_end()  # islands are processes
    main(seconds=seconds, islands=islands, seed=seed, as_json=as_json)


@with_settings("listen", "peers", "public_addr", "region", "max_upload")
def bench(
    flags: dict[str, Any],
    members: Annotated[int, typer.Option(min=2, max=256, help="How many there are.")] = 2,
    size: Annotated[int, typer.Option(min=1, help="Parameters.")] = 25_000_000,
    codec: Annotated[str, typer.Option(help="fp32, bf16, fp16, int8, int4, …")] = "int4",
    rounds: Annotated[int, typer.Option(min=1, help="How many times to average.")] = 5,
    groups: Annotated[str, typer.Option(help="none, region or grid: see the protocol.")] = "none",
    max_group: Annotated[
        int, typer.Option(min=4, max=512, help="More members than that stand in a grid.")
    ] = 64,
    tls: Annotated[bool, typer.Option(help="Without: links in the clear, at home only.")] = True,
    as_json: AsJson = False,
) -> None:
    """Average noise with others, without training: how fast are the links and machines?"""
    from node.bench.command import main
    from node.bench.settings import VECTORS, Settings
    from protocols.codecs import NAMES

    if codec not in NAMES:
        raise bad_config(f"no codec {codec!r}", "there are " + ", ".join(NAMES), "give one of them")
    if groups not in ("none", "region", "grid"):
        raise bad_config(f"no groups {groups!r}", "it is none, region or grid", "give one of them")
    needed, left = VECTORS * 4 * size, Machine(Path.cwd())().memory_available
    if left is not None and needed > left:
        raise operator_error(
            "E401",
            f"no memory for {size:,} parameters",
            why=f"a member takes {needed / 1e9:.1f} GB for them, and {left / 1e9:.1f} GB are left",
            fix="give a smaller --size",
        )
    config = resolve(flags, os.environ)
    settings = Settings(
        members=members,
        size=size,
        codec=codec,
        rounds=rounds,
        tls=tls,
        groups=groups,  # type: ignore[arg-type]  # looked at above
        max_group=max_group,
        region=config.region,
        listen=config.listen,
        advertise=config.public_addr,
        peers=config.named_peers,
        seed=os.getpid(),
        max_upload=config.max_upload,
    )
    raise typer.Exit(main(settings, as_json=as_json))


def _run(config: NodeConfig, manifest: Manifest | None) -> None:
    from node.daemon import run

    raise typer.Exit(run(config, manifest))
