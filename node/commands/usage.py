"""A command line that was not understood, told as every other error is: why, what to do, a code."""

from __future__ import annotations

from typing import Any

import typer

from node.errors import operator_error
from protocols.errors import OperatorError

# click's own classes, which newer versions of typer bring along in a place of their own
WrongUsage: Any = typer.BadParameter.__base__


def told(error: Exception) -> OperatorError:
    """E204 for what click raises of a flag, a value or a command that it does not take."""
    wrong: Any = error
    command = wrong.ctx.command_path if wrong.ctx else "node"
    text = wrong.format_message().rstrip(".")
    return operator_error(
        "E204",
        text[:1].lower() + text[1:],
        why=f"`{command}` cannot be called like this",
        fix=f"{_hint(wrong)}see `{command} --help`",
    )


def _hint(error: Any) -> str:
    """Where the option that was meant may be found; empty for other errors."""
    name = getattr(error, "option_name", None)
    options = [one for param in error.ctx.command.params for one in param.opts] if error.ctx else []
    if name is None or "--set" not in options:
        return ""
    found = " or ".join(f"--set {setting}=…" for setting in settings_called(name))
    return f"it is a setting of the run that a node creates: {found}; " if found else ""


def settings_called(option: str) -> list[str]:
    """Settings of a run's manifest that have the name of an option: ``--lr``: ``inner.lr``."""
    from pydantic import BaseModel

    from bootstrap.manifest import Manifest

    name = option.lstrip("-").replace("-", "_")
    found = [name] if name in Manifest.model_fields else []
    for table, field in Manifest.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            found += [f"{table}.{name}"] if name in section.model_fields else []
    return found
