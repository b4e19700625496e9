"""What several commands have: options, and how a mistyped one is answered."""

from __future__ import annotations

import difflib
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from node.commands.usage import settings_called


def given(text: str) -> str:
    """The parser of a path or URL: an empty path would be the current directory, or the root."""
    if not text.strip():  # a variable of the shell that is not set
        raise typer.BadParameter("it is empty; give a path")
    return text


def given_path(text: str) -> Path:
    """As :func:`given`."""
    return Path(given(text))


def finite(number: float | None) -> float | None:
    """For every option that is a float: click takes inf too, and nan, which is below no minimum."""
    if number is not None and not math.isfinite(number):
        raise typer.BadParameter("it is not a finite number")
    return number


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        parser=given_path,
        metavar="FILE",
        help="TOML file of settings. [default: node.toml in the state directory]",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

# as in node.presets, which takes too long to load for a help text
PRESET_NAMES = (
    *("tiny", "tiny-streaming", "small", "125m", "350m", "1b", "3b", "8b", "70b"),
    *("moe-tiny", "moe-1b", "moe-8x7b"),
)
Preset = Annotated[
    str,
    typer.Option(metavar="NAME", help=f"Create a run: {', '.join(PRESET_NAMES)}."),
]


Changes = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change the preset, as in inner.lr=1e-3."),
]
Mode = Annotated[
    str,
    typer.Option(metavar="NAME", help="Mode of the run to create: diloco, async, … (docs/modes)."),
]


def changes_of(changes: list[str] | None, mode: str) -> list[str]:
    """What ``--set`` and ``--mode`` change."""
    return [*(changes or ()), *([f"mode={mode}"] if mode else ())]


class Command(TyperCommand):
    """A command that names the nearest of its options for one that it does not have."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse as the base class does; an error names only the nearest of similar options."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # of click, which is part of newer versions of typer
            if name := getattr(error, "option_name", ""):
                known = [option for one in self.params for option in getattr(one, "opts", ())]
                own = "--set" in known and settings_called(name)  # told in place of a near option
                near = [] if own else difflib.get_close_matches(name, known, n=1)
                error.possibilities = near  # type: ignore[attr-defined]
            raise
