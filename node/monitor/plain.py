"""Values as bounded JSON, whoever made them: some come from peers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

MAX_TEXT = 2000  # characters of any text
MAX_ITEMS = 1024  # of any list or mapping


def plain(value: Any) -> Any:
    """A value as JSON: texts cut, non-finite numbers null, odd objects as text."""
    kind = type(value)
    if kind is str:  # the commonest first: a live view makes thousands of them a second
        return value if len(value) <= MAX_TEXT else value[:MAX_TEXT]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if kind in _FIELDS or dataclasses.is_dataclass(kind):
        return table(value)
    if isinstance(value, Mapping):
        return {str(key)[:MAX_TEXT]: plain(item) for key, item in _head(value.items())}
    if isinstance(value, list | tuple):
        return [plain(item) for item in _head(value)]
    return str(value)[:MAX_TEXT]


def table(view: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, as JSON values (:func:`plain`)."""
    names = _FIELDS.get(type(view))
    if names is None:
        names = _FIELDS[type(view)] = tuple(item.name for item in dataclasses.fields(view))
    return {name: plain(getattr(view, name)) for name in names}


_FIELDS: dict[type, tuple[str, ...]] = {}  # of the dataclasses seen so far


def _head(items: Any) -> list[Any]:
    return [item for _, item in zip(range(MAX_ITEMS), items, strict=False)]
