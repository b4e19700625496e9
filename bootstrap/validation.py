"""Settings files for people: TOML in, a checked model out, and mistakes explained in their words.

Used for the manifest of a run and for a node's own settings. Every mistake of a file is reported
at once, each with its key, its value, what is allowed, and for an unknown key the nearest known
one (E204).
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from protocols.errors import OperatorError, reason

M = TypeVar("M", bound=BaseModel)

MAX_FILE_BYTES = 64 * 1024
_RANGE_ERRORS = ("greater_than_equal", "greater_than", "less_than_equal", "less_than")
_SHOWN_VALUE = 80  # characters of a wrong value that are repeated to the operator


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file of at most 64 KiB; raises :class:`OperatorError` E204."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise bad_config(
            f"cannot read {path}", reason(error), "give the path of a TOML file"
        ) from error
    if len(data) > MAX_FILE_BYTES:
        raise bad_config(
            f"cannot use {path}",
            f"it is larger than {MAX_FILE_BYTES} bytes",
            "give a TOML file of settings",
        )
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise bad_config(
            f"cannot read {path}", "it is not UTF-8 text", "give a TOML file"
        ) from error
    except (ValueError, RecursionError) as error:  # also for a number with thousands of digits
        raise bad_config(
            f"cannot read {path}", f"not valid TOML: {error}", "correct that line (https://toml.io)"
        ) from error


def check(model: type[M], values: Mapping[str, Any], where: str) -> M:
    """Build ``model`` from plain values; ``where`` names their origin in the E204 raised."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        mistakes = explain(error, model)
        raise bad_config(
            f"{where}: {len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}",
            "\n       ".join(mistakes),
            "correct what is named above; `node config show` lists every key and its value",
        ) from error


def explain(error: ValidationError, model: type[BaseModel], *, suggest: bool = True) -> list[str]:
    """One line a mistake: key, value, what is allowed; with ``suggest``, what may be meant."""
    return [_explain(dict(item), model, suggest) for item in error.errors(include_url=False)]


def bad_config(what: str, why: str, fix: str) -> OperatorError:
    """E204, exit status 2 as for any other wrong usage."""
    return OperatorError("E204", what, why, fix, exit_code=2)


def to_toml(model: BaseModel) -> str:
    """The model as TOML; what was not set by anyone carries the comment ``# default``."""
    return "\n".join(_toml_lines(model, "")).strip() + "\n"


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every leaf of a model as (dotted key, field)."""
    for name, field in model.model_fields.items():
        table = _table(field)
        if table is None:
            yield prefix + name, field
        else:
            yield from fields(table, f"{prefix}{name}.")


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: ``1 to 1024``, ``one of a, b``; empty if anything."""
    if get_origin(field.annotation) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(field.annotation))
    limits: dict[str, Any] = {}
    for mark in field.metadata:
        for bound in ("ge", "gt", "le", "lt", "pattern"):
            value = getattr(mark, bound, None)
            if value is not None:
                limits[bound] = value
    if "pattern" in limits:
        return f"text matching {limits['pattern']}"
    low = str(limits["ge"]) if "ge" in limits else _worded("more than", limits.get("gt"))
    if "le" in limits and "ge" in limits:
        return f"{low} to {limits['le']}"
    high = _worded("at most", limits.get("le")) or _worded("less than", limits.get("lt"))
    if "ge" in limits:
        low += " or more"
    return " and ".join(part for part in (low, high) if part)


def set_list(key: str, field: FieldInfo) -> str:
    """How a list is given to a command, by the example of its default; quoted for a shell."""
    return f"--set '{key}={toml_value(field.default)}'"


def _worded(words: str, bound: Any) -> str:
    return f"{words} {bound}" if bound is not None else ""


def _explain(item: dict[str, Any], model: type[BaseModel], suggest: bool) -> str:
    path = [part for part in item["loc"] if isinstance(part, str)]
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"{key}: unknown key" + (_suggestion(path, model) if suggest else "")
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":  # a rule across keys: its text names them
        return f"{key}: {message}" if path and _field(path, model) else message
    message = re.sub(r"^(Input|String|Value|Tuple) should", "must", message)
    if not key:  # not a table at all, or not JSON
        return message
    field = _field(path, model)
    limits = allowed(field) if field is not None else ""
    if item["type"] in _RANGE_ERRORS and limits:
        message = f"must be {limits}"
    if item["type"] == "literal_error" and field is not None and suggest:
        message += nearest(str(item["input"]), map(str, get_args(field.annotation)))
    return f"{key} = {_shown(item['input'])}: {message}"


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` with the known word that is nearest; empty where none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def _suggestion(path: list[str], model: type[BaseModel]) -> str:
    table: type[BaseModel] | None = model
    for name in path[:-1]:
        field = table.model_fields.get(name) if table is not None else None
        table = _table(field) if field is not None else None
    known = list(table.model_fields) if table is not None else []
    elsewhere = [key for key, _ in fields(model) if key.split(".")[-1] == path[-1]]
    if elsewhere:
        return f"; it stands in another table: {' or '.join(elsewhere)}"
    if told := nearest(path[-1], known):
        return told.replace("mean ", f"mean {'.'.join([*path[:-1], ''])}")
    return f"; known here: {', '.join(known)}" if known else ""


def _field(path: list[str], model: type[BaseModel]) -> FieldInfo | None:
    wanted = ".".join(path)
    return next((field for key, field in fields(model) if key == wanted), None)


def _table(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE else text[: _SHOWN_VALUE - 1] + "…"


def _toml_lines(model: BaseModel, prefix: str) -> Iterator[str]:
    tables = []
    for name in type(model).model_fields:
        value = getattr(model, name)
        if isinstance(value, BaseModel):
            tables.append((name, value))
            continue
        comment = "" if name in model.model_fields_set else "  # default"
        yield f"{name} = {toml_value(value)}{comment}"
    for name, table in tables:
        yield ""
        yield f"[{prefix}{name}]"
        yield from _toml_lines(table, f"{prefix}{name}.")


def toml_value(value: Any) -> str:
    """One scalar, list or table key's value in TOML."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple | list):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    # JSON's escapes are a subset of those of a TOML basic string, save for DEL
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
