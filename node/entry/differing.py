"""How the run that a node was given differs from the swarm's, or from its checkpoint's (E201)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bootstrap.manifest import Manifest, difference
from bootstrap.manifest_form import flat
from node.presets import PRESETS

_MOST, _LONGEST = 8, 120  # differences that are told, and characters of each
_LEAST = 20  # of each side of one, however long its key
_UNSET = object()
_FOLLOWING = ("inner.total_steps", "inner.warmup_steps")  # the rounds, if they are not set


def differences(own: Manifest, theirs: Manifest) -> list[str]:
    """What differs, apart from what only the creation of the run fills in or takes out.

    And from what is frozen in a script's model, which :func:`node.entry.own_model.layout_of`
    compares.
    """
    filled_in = ["evaluation.digest ", "data.path ", "data.tokenizer ", "script.frozen"]
    filled_in += ["model.document_end ", "model.initial "]
    if "vocab_size" not in own.model.model_fields_set:
        filled_in.append("model.vocab_size ")
    if "name" not in own.model_fields_set:
        filled_in.append("name ")
    return [line for line in difference(own, theirs) if not line.startswith(tuple(filled_in))]


def listed(found: list[str], own: Manifest | None) -> str:
    """What :func:`differences` found, for E201: first what ``own`` was given by hand."""
    given = {} if own is None else flat(own.model_dump(mode="json", exclude_unset=True))
    preset = _chosen(given)

    def rank(line: str) -> int:
        key = line.partition(" ")[0]
        if key not in given:
            return 2
        return int(key in _FOLLOWING or preset.get(key, _UNSET) == given[key])

    order = [_shortened(line) for line in sorted(found, key=rank)]
    more = [f"and {len(order) - _MOST} more"] if len(order) > _MOST else []
    return "; ".join(order[:_MOST] + more)


def _chosen(given: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the preset that most of what was given comes from; none where it is of none.

    All of a preset's keys are given with it, except those of a model that takes the place of its.
    """
    presets = [flat(tables) for tables in PRESETS.values()]
    whole = [
        preset
        for preset in presets
        if all(key in given or key.startswith("model.") for key in preset)
    ]
    return max(
        whole, default={}, key=lambda preset: sum(given.get(key) == preset[key] for key in preset)
    )


def _shortened(line: str) -> str:
    """A line of :func:`difference` where it is long: of each side what is around the difference."""
    if len(line) <= _LONGEST:
        return line
    key, _, values = line.partition(" ")
    left, _, right = values.partition(" != ")
    room = max(_LEAST, (_LONGEST - len(key)) // 2 - 5)  # without what is between, and two "…"
    pairs = enumerate(zip(left, right, strict=False))
    differs = next((at for at, (a, b) in pairs if a != b), min(len(left), len(right)))
    begin = max(0, differs - room // 2)

    def part(value: str) -> str:
        start = max(0, min(begin, len(value) - room))
        end = start + room
        return "…" * (start > 0) + value[start:end] + "…" * (end < len(value))

    return f"{key} {part(left)} != {part(right)}"
