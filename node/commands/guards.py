"""Arguments that are not what they seem: calls of Node.js, and ``--peers`` without an address."""

from __future__ import annotations

import itertools

import typer

from node.errors import EXIT_USAGE
from node.setting_values import no_address

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
