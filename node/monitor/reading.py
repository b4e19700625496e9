"""Events back from the lines that :class:`~node.monitor.event_log.EventLog` wrote.

A line may be of another version of Atoll: keys that are unknown are left out, and an event that
lacks some, or whose kind is unknown, is none.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from node.monitor import events
from node.monitor.events import Event, Record

_KINDS: dict[str, type[Event]] = {
    kind.kind: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind is not Event
}
_NUMBERS = ("int", "float", "float | None", "int | None")


def read_record(values: object) -> Record | None:
    """The record that :meth:`Record.plain` made ``values`` of; None for anything else."""
    if not isinstance(values, dict):
        return None
    kind = _KINDS.get(str(values.get("kind", "")))
    when, number = values.get("time"), values.get("seq")
    if kind is None or not isinstance(when, int | float) or not isinstance(number, int):
        return None
    given: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        if field.name in values:
            value = values[field.name]
            if not _fits(str(field.type), value):
                return None
            given[field.name] = value
        elif field.default is field.default_factory is dataclasses.MISSING:
            return None
    return Record(number, float(when), kind(**given))


def _fits(declared: str, value: Any) -> bool:
    """Whether a value may stand in a field, as far as those who read events rely on it."""
    if declared in _NUMBERS:
        return isinstance(value, int | float | None)
    if declared.startswith("Literal["):
        return f'"{value}"' in declared or f"'{value}'" in declared
    if declared.startswith("Mapping[str, Mapping"):
        return isinstance(value, dict) and all(isinstance(item, dict) for item in value.values())
    if declared.startswith("Mapping"):
        return isinstance(value, dict)
    return True
