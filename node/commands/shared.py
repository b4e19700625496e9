"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    str,
    typer.Option(metavar="NAME", help="Create a run: tiny, tiny-streaming, small, 125m, 1b or 8b."),
]
