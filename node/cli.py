"""The command line: which commands there are, and in which order they are shown.

What they do stands in :mod:`node.commands`, a file a family.
"""

from __future__ import annotations

from typing import Annotated

import typer

from node import __version__
from node.commands import data, files, looking, running, simulating
from node.commands.shared import Command

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
app.add_typer(running.bootstrap_app, name="bootstrap")
app.add_typer(data.app, name="data")


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


for _command in (
    running.start,
    running.demo,
    running.bench,
    simulating.simulate,
    looking.status,
    looking.monitor,
    looking.runs,
    looking.stop,
    looking.doctor,
    files.keygen,
    files.export,
    looking.version,
):
    app.command(cls=Command)(_command)
config_app.command("show", cls=Command)(looking.config_show)
