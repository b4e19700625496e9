"""Command-line options made from :class:`~node.config.NodeConfig`, so each is written once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from node.config import NodeConfig

Command = Callable[..., None]
PLACES = ("data",)  # a path or a URL
LISTS = {"peers": "ADDRESS", "sink": "KIND:WHERE"}  # may be repeated
RATES, SIZES = ("max_upload", "relay"), ("data_cache",)  # with a unit for people
ADDRESSES = ("listen", "public_addr", "api", "dashboard")


def with_settings(
    *keys: str, without: tuple[str, ...] = (), api: str = ""
) -> Callable[[Command], Command]:
    """Give a command an option for each of ``keys`` (default: all but ``without``).

    ``api``: what takes the place of the default of --api in the help text.

    The command receives the options that were given as its ``flags`` argument, unchecked:
    :func:`node.config.resolve` does that together with the environment and the settings file.
    """
    chosen = keys or tuple(key for key in NodeConfig.model_fields if key not in without)

    def decorate(command: Command) -> Command:
        own = [
            parameter
            for parameter in inspect.signature(command, eval_str=True).parameters.values()
            if parameter.name != "flags"
        ]
        names = {parameter.name for parameter in own}

        @functools.wraps(command)
        def wrapper(**values: Any) -> None:
            mine = {name: values.pop(name) for name in names}
            given = {key: value for key, value in values.items() if value not in (None, [])}
            command(flags=given, **mine)

        shown = {"api": api} if api else {}
        parameters = [*own, *(_parameter(key, shown.get(key)) for key in chosen)]
        wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        # typer reads both, and functools.wraps leaves a way back to the inner function
        wrapper.__annotations__ = {item.name: item.annotation for item in parameters}
        del wrapper.__wrapped__
        return wrapper

    return decorate


@functools.cache
def _parameter(key: str, said: str | None) -> inspect.Parameter:
    field = NodeConfig.model_fields[key]
    name = "--" + key.replace("_", "-")
    shown = shown_default(key, field) if said is None else said
    text = (field.description or "") + (f" [default: {shown}]" if shown else "")
    kind, metavar = _kind(key, field)
    declared = f"{name}/--no-{name[2:]}" if metavar is None else name
    option = typer.Option(declared, help=text, metavar=metavar, show_default=False)
    return inspect.Parameter(
        key,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind, option],
    )


def _kind(key: str, field: FieldInfo) -> tuple[Any, str | None]:
    hint = field.annotation
    if hint is bool:
        return bool | None, None
    if key in LISTS:
        return list[str] | None, LISTS[key]
    if key in PLACES:
        return str | None, "PATH"
    if get_origin(hint) is Literal:
        return str | None, "|".join(get_args(hint))
    if hint in (int, float):
        return str | None, "N"
    if Path in (hint, *(get_origin(arg) or arg for arg in get_args(hint))) or _is_path(hint):
        return str | None, "PATH"
    return str | None, "HOST:PORT" if key in ADDRESSES else "TEXT"


def _is_path(hint: Any) -> bool:
    return any(get_args(arg)[:1] == (Path,) for arg in get_args(hint))


def shown_default(key: str, field: FieldInfo) -> str:
    """A setting's default for people; empty where its description says what happens without."""
    if field.default in (None, "", (), False, 0):  # the description says what that means
        return ""
    if key in RATES:
        return f"{field.default * 8 / 1e6:g}Mbit"
    if key in SIZES:
        return f"{field.default / 1e9:g}GB"
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
