"""The command line: which commands there are, and in which order they are shown.

What they do stands in :mod:`node.commands`, a file a family.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from node import __version__
from node.commands import data, files, looking, running, simulating
from node.commands.shared import Command

config_app = typer.Typer(help="Look at settings.", no_args_is_help=True, rich_markup_mode=None)
config_app.command("show", cls=Command)(looking.config_show)
config_app.command("explain", cls=Command)(looking.config_explain)

COMMANDS: dict[str, Callable[..., None] | typer.Typer] = {
    "start": running.start,
    "demo": running.demo,
    "bench": running.bench,
    "simulate": simulating.simulate,
    "status": looking.status,
    "monitor": looking.monitor,
    "runs": looking.runs,
    "stop": looking.stop,
    "doctor": looking.doctor,
    "keygen": files.keygen,
    "export": files.export,
    "version": looking.version,
    "config": config_app,
    "bootstrap": running.bootstrap_app,
    "data": data.app,
}


class Commands(TyperGroup):
    """Builds the options of the command that is called, and of no other.

    Those of all of them, every setting of a node among them, take longer than a short command.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """As the base class does, which knows names and help alone."""
        name, named, rest = super().resolve_command(ctx, args)
        return name, built(name) if name and named else named, rest


def built(name: str) -> Any:
    """The whole command of that name, as click has it."""
    what = COMMANDS[name]
    if isinstance(what, typer.Typer):
        return typer.main.get_group(what)
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=Command)(what)
    return typer.main.get_command(alone)


app = typer.Typer(
    name="node",
    cls=Commands,
    help="Train one model together over the internet. `node start` trains, alone or with --peers.",
    epilog="This is not Node.js. Where both are installed, use the command `atoll`.",
    rich_markup_mode=None,
    add_completion=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


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


def _only_named() -> None:
    raise AssertionError("a command is called as built() gives it")


for _name, _what in COMMANDS.items():
    _text = _what.info.help if isinstance(_what, typer.Typer) else inspect.getdoc(_what)
    app.command(_name, help=_text)(_only_named)
