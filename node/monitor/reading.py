"""Events back from the lines that :class:`~node.monitor.event_log.EventLog` wrote.

A line may be of another version of Atoll: keys that are unknown are left out, and an event that
lacks some, or whose kind is unknown, is skipped.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, TypeGuard

from node.monitor import events
from node.monitor.events import Event, Record
from protocols.wire import MAX_INT

_KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
LATEST = 253_402_300_799.0  # the last second of the year 9999


def read_record(values: object) -> Record | None:
    """The record that :meth:`Record.plain` made ``values`` of; None for anything else."""
    if not isinstance(values, dict):
        return None
    kind = _KINDS.get(str(values.get("kind", "")))
    when, number = values.get("time"), values.get("seq")
    if kind is None or not _integer(number) or not _number(when) or not 0 <= when <= LATEST:
        return None
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in values:
            declared, value = str(field.type), values[field.name]
            if declared == "float" and value is None:
                value = math.nan  # as it was
            elif not _fits(declared, value):
                return None
            given[field.name] = value
        elif field.default is field.default_factory is dataclasses.MISSING:
            return None
    return Record(number, float(when), kind(**given))


def _integer(value: Any) -> TypeGuard[int]:
    return type(value) is int and -MAX_INT <= value <= MAX_INT


def _number(value: Any) -> TypeGuard[float]:
    return _integer(value) or (type(value) is float and math.isfinite(value))


def _fits(declared: str, value: Any) -> bool:
    """Whether a value may stand in a field of this annotation; non-finite numbers are null."""
    if declared.endswith(" | None"):
        return value is None or _fits(declared.removesuffix(" | None"), value)
    if declared.startswith("Literal["):
        return isinstance(value, str) and f'"{value}"' in declared.replace("'", '"')
    if found := re.fullmatch(r"Mapping\[str, (.+)\]", declared):
        item = found[1].replace(", float]", ", float | None]")  # of islands: not known, or was NaN
        return isinstance(value, dict) and all(_fits(item, one) for one in value.values())
    if declared == "Sequence[str]":
        return isinstance(value, list) and all(isinstance(one, str) for one in value)
    if declared == "bool":
        return isinstance(value, bool)
    if declared in ("int", "float"):
        return _integer(value) if declared == "int" else _number(value)
    return isinstance(value, str)  # `str`, and names of kinds of texts
