"""How a run like one that is over is made: the flags of ``node start`` that have its settings."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.manifest_form import flat
from bootstrap.validation import toml_value
from node.data.supply import OWN_TEXT
from node.modes import once
from node.presets import PRESETS, tables_of, with_schedule

# what comes with the weights and the text of the next run, or is of scripts
_OTHERS = ("format", "model.", "data.path", "data.tokenizer", "evaluation.digest", "script.")
_KEPT = "model.attention"  # of the model what no config.json says
TRIES = 8  # a setting may change the defaults of others, but not for long


def flags_again(run: Manifest, place: str = "") -> list[str] | None:
    """Flags beside --init-from and --dir for as many rounds more as N says; None: none are known.

    ``place`` is this island's own text. Of the presets the one counts that needs the fewest flags.
    """
    longer = "rounds.inner_steps" if once(run) else "rounds.total_rounds"
    found = [(name, changes) for name in PRESETS if (changes := _changes(name, run, longer))]
    if not found:
        return None
    name, changes = min(found, key=lambda one: len(one[1]))
    # a default by now, as of others; the schedule first, on which the warm-up may depend
    for key in sorted(changes.keys() - {longer}, key=lambda key: (key != "inner.total_steps", key)):
        fewer = {other: value for other, value in changes.items() if other != key}
        if _different(name, fewer, run) == []:
            changes = fewer
    words = ["--data", place] if place else []
    words += ["--preset", name] if name != "tiny" else []
    if mode := changes.pop("mode", ""):
        words += ["--mode", mode]
    changes = {key: value for key, value in changes.items() if key != longer} | {longer: "N"}
    return words + [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]


def _changes(name: str, run: Manifest, longer: str) -> dict[str, str]:
    """What --set and --mode have to say beside a preset; empty where it cannot be that one."""
    plain = flat(run.model_dump())
    changes = {key: _text(plain[key]) for key in ("mode", "data.seq_len", longer)}
    for _ in range(TRIES):
        missing = _different(name, changes, run)
        if missing is None:
            return {}
        if not missing:
            return changes
        changes |= {key: _text(plain[key]) for key in missing}
    return {}


def _different(name: str, changes: dict[str, str], run: Manifest) -> list[str] | None:
    """Settings in which what is made of a preset differs from ``run``; None: it is refused."""
    tables = tables_of(name, changes)
    said = {key: value for key, value in tables.get("model", {}).items() if key == "attention"}
    tables["model"] = run.model.model_dump(exclude={"attention"}) | said
    try:
        made = with_schedule(Manifest.model_validate(tables), name, changes)
    except ValidationError:
        return None
    theirs = flat(made.model_dump())
    return [
        key
        for key, value in flat(run.model_dump()).items()
        if theirs[key] != value
        and (key == _KEPT or not key.startswith(_OTHERS))
        and (key, value) != ("name", OWN_TEXT)
    ]


def _text(value: Any) -> str:
    """As --set takes it: text stands there without quotes."""
    return value if isinstance(value, str) else toml_value(value)
