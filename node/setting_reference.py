"""What every setting means, of a run and of a node: ``node config explain``, docs/settings.md.

``python -m node.setting_reference > docs/settings.md`` writes the page. The words are those that
stand beside the fields (:mod:`bootstrap.manifest`, :mod:`node.config`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any, get_args, get_origin

from pydantic.fields import FieldInfo

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import MOST_COUNT, Mode
from bootstrap.validation import allowed, bad_config, fields, nearest, set_list, toml_value
from node.config import ENVIRONMENT_PREFIX, NodeConfig
from node.options import RATES, SIZES, shown_default

NODE = "node"  # the table that a node's own settings are shown in
WITH_UNITS = (*RATES, *SIZES)  # their bounds are bytes, and people write 20Mbit

_TOP = """# Settings

Written by `python -m node.setting_reference > docs/settings.md`; do not edit.
`node config explain [NAME …]` prints the same, and `node config show` the values.

## Of a run

All islands of a run have the same, in its manifest. Who creates one gives them as
`--set KEY=VALUE` (a list as `--set 'rounds.codecs=["int4", "int2"]'`), or in the TOML file of
`--run`, which has a table for what stands before the dot; who joins gives none. The defaults are
those of the smallest run. Presets of larger ones (`--preset`) have others, and so have modes
(`--mode`), where they are named below."""

_NODES = """
## Of a node

Each node has its own: as a flag (`--max-upload`), a variable (`ATOLL_MAX_UPLOAD`), or a line of
`node.toml` in its state directory (`max_upload = "20Mbit"`). A flag overrides a variable, and a
variable the file."""


@dataclass(frozen=True)
class Setting:
    """One setting, in words."""

    key: str  # as in rounds.inner_steps, or listen of a node
    default: str  # empty: none, or the meaning says what happens without
    values: str  # what it takes; empty: the default shows it
    meaning: str
    of_run: bool
    by_mode: tuple[tuple[str, str], ...] = ()  # modes, and the default that they have instead
    example: str = ""  # of a list: how it is given

    @property
    def table(self) -> str:
        """The TOML table it stands in; empty: none."""
        return self.key.rpartition(".")[0] if self.of_run else NODE

    @property
    def last(self) -> str:
        """The key within its table."""
        return self.key.rpartition(".")[2]

    @property
    def defaults(self) -> str:
        """The default, with those of modes that differ."""
        others = [f"{modes}: {value}" for modes, value in self.by_mode]
        return "; ".join([*([self.default] if self.default else []), *others])


@cache
def settings() -> tuple[Setting, ...]:
    """All of them: those of a run as they stand in its file, then those of a node."""
    return (*_of_runs(), *_of_nodes())


def explain(names: Sequence[str]) -> str:
    """What ``names`` mean: keys, tables, keys without their table, or parts; none: everything.

    Raises :class:`~protocols.errors.OperatorError` E204 for a name that there is not.
    """
    chosen = [one for name in names for one in _named(name)] if names else settings()
    return "\n".join(_in_words(one) for one in dict.fromkeys(chosen))


def document() -> str:
    """docs/settings.md."""
    lines = [_TOP]
    for table, rows in groupby(settings(), lambda one: one.table):
        if table:
            lines.append(_NODES if table == NODE else f"\n### [{table}]")
        lines += ["", "| key | default | takes | meaning |", "|---|---|---|---|"]
        lines += [
            f"| `{one.key}` | {_cell(one.defaults)} | {_cell(one.values)} | {_cell(one.meaning)} |"
            for one in rows
        ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def _in_words(one: Setting) -> str:
    flag, variable = "--" + one.key.replace("_", "-"), ENVIRONMENT_PREFIX + one.key.upper()
    rows = (
        ("default", one.defaults),
        ("takes", one.values),
        (
            "given as",
            (one.example or f"--set {one.key}=…") if one.of_run else f"{flag}, {variable}",
        ),
    )
    return "\n".join([one.key, f"  {one.meaning}", *(f"  {a:8} {b}" for a, b in rows if b), ""])


def _named(name: str) -> list[Setting]:
    key = name.strip().lower().replace("-", "_")
    exact = [one for one in settings() if key in (one.key, one.table, one.last)]
    found = (exact or [one for one in settings() if key in one.key]) if key else []
    if not found:
        known = {word for one in settings() for word in (one.key, one.table, one.last) if word}
        raise bad_config(
            f"no setting {name!r}",
            f"neither a run nor a node has one of this name{nearest(key, sorted(known))}",
            "`node config explain` lists all of them",
        )
    return found


def _of_runs() -> Iterator[Setting]:
    usual = Manifest()
    modes = {mode: Manifest.model_validate({"mode": mode}) for mode in get_args(Mode)}
    for key, field in fields(Manifest):
        if len(get_args(field.annotation)) == 1:
            continue  # nothing to choose
        default = _written(_value(usual, key))
        other: dict[str, list[str]] = {}
        for mode, run in modes.items():
            value = _written(_value(run, key))
            if value != default and key != "mode":
                other.setdefault(value, []).append(mode)
        by_mode = tuple((", ".join(names), value) for value, names in other.items())
        example = set_list(key, field) if get_origin(field.annotation) is tuple else ""
        yield Setting(key, default, _takes(field), _one_line(field), True, by_mode, example)


def _of_nodes() -> Iterator[Setting]:
    for key, field in NodeConfig.model_fields.items():
        takes = "" if key in WITH_UNITS else _takes(field)
        yield Setting(key, shown_default(key, field), takes, _one_line(field), False)


def _value(model: Any, key: str) -> Any:
    for name in key.split("."):
        model = getattr(model, name)
    return model


def _written(value: Any) -> str:
    return "" if value == "" else toml_value(value)


def _takes(field: FieldInfo) -> str:
    """What it takes, without patterns of text and a bound that nobody meets."""
    words = allowed(field)
    return "" if words.startswith("text ") else words.replace(f" to {MOST_COUNT}", " or more")


def _one_line(field: FieldInfo) -> str:
    return " ".join((field.description or "").split())


if __name__ == "__main__":
    sys.stdout.write(document())
