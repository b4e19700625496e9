"""The form in which a manifest is hashed, signed and sent; and manifests of other versions.

The canonical form is UTF-8 JSON with sorted keys, no spaces and floats as the shortest decimal that
reads back as the same float64. Every key is present, since a default may differ from one version to
the next, but for those of :data:`LEFT_OUT`.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ValidationError, ValidationInfo

from bootstrap.manifest_rounds import is_table
from bootstrap.validation import explain
from protocols.errors import Malformed, OtherVersion

# Keys that came later, and what a manifest without them means: they are left out where they are
# just that. So runs made before them can be read, and those that do not use them keep their ids.
# Every new key joins them, and what it means here never changes, while its default may.
LEFT_OUT: dict[str, Any] = {"script.frozen": "", "script.frozen_marks": ""}

# pydantic's context for a run that is under way: it is read as it is, without rules that only hold
# for a run that is to be made (bootstrap/manifest_rules.py)
READING = {"reading": True}

# mistakes that another version may not have taken for any: a key, a name or a combination
_UNKNOWN = ("extra_forbidden", "literal_error", "value_error")
_MOST_SHOWN = 1000  # characters of what a stranger may have written


def is_read(info: ValidationInfo) -> bool:
    """Whether a validator has a run under way before it (:data:`READING`)."""
    return info.context == READING


def canonical_bytes(plain: dict[str, Any]) -> bytes:
    """Of a manifest's plain tables."""
    plain = _no_negative_zero(plain)
    for key, meaning in LEFT_OUT.items():
        name, _, field = key.rpartition(".")
        table = plain[name] if name else plain
        if table[field] == meaning:
            del table[field]
    return json.dumps(
        plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def with_left_out(given: Any) -> Any:
    """A manifest's plain tables as they were read, with the keys that were left out."""
    if not is_table(given):
        return given
    tables = dict(given)
    for key, meaning in LEFT_OUT.items():
        name, _, field = key.rpartition(".")
        if not name:
            tables.setdefault(field, meaning)
        elif is_table(tables.get(name)):
            tables[name] = {field: meaning, **tables[name]}
    return tables


def unread(error: ValidationError, model: type[BaseModel]) -> Malformed:
    """What to raise for bytes that are no manifest of this version."""
    unknown = any(item["type"] in _UNKNOWN for item in error.errors(include_url=False))
    said = "; ".join(explain(error, model, suggest=not unknown)[:8])[:_MOST_SHOWN]
    if unknown:
        return OtherVersion(f"the manifest is none of this version of Atoll: {said}")
    return Malformed(f"manifest: {said}")


def not_canonical(data: bytes, canonical: bytes) -> Malformed:
    """What to raise for bytes that can be read, but ought to be ``canonical``."""
    given = flat(json.loads(data))
    if missing := [key for key in flat(json.loads(canonical)) if key not in given]:
        known = "the manifest is of an older version of Atoll"
        return OtherVersion(f"{known}: without {', '.join(missing[:8])}")
    return Malformed("manifest: not in canonical form")


def flat(plain: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Tables within tables as one, by keys like ``rounds.codec``."""
    found: dict[str, Any] = {}
    for key, value in plain.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[prefix + key] = value
    return found


def _no_negative_zero(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _no_negative_zero(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_no_negative_zero(item) for item in value]
    return value + 0.0 if isinstance(value, float) else value
