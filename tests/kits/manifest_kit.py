"""Manifests as a version of Atoll made them, kept for those that come after it.

``python tests/kits/manifest_kit.py > tests/bootstrap/manifests/protocol-N.jsonl`` writes those of
the version that runs: the defaults in full, then by what they differ in those of each mode and
outer optimizer, and of settings drawn at random that it takes. From the repository's root, with
``PYTHONPATH=.``.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from blake3 import blake3
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from bootstrap.manifest import Manifest
from bootstrap.manifest_form import flat
from bootstrap.manifest_rounds import Mode, OuterRule
from bootstrap.validation import fields
from protocols.messages import PROTOCOL_VERSION

FOLDER = Path(__file__).parents[1] / "bootstrap" / "manifests"
TABLES = ("outer.", "rounds.", "merge.", "gossip.", "inner.optimizer")  # with rules across keys
OFTEN = (  # those that most rules are about
    *("outer.optimizer", "outer.lr", "outer.momentum", "outer.momentum_start"),
    *("rounds.codec", "rounds.fragments", "rounds.alpha", "rounds.quorum", "rounds.staleness"),
    *("rounds.groups", "rounds.owners", "rounds.align", "merge.rule", "merge.trust"),
)
DRAWN = 200


def frozen(version: int) -> Iterator[tuple[bytes, bytes]]:
    """Run ids and canonical bytes of the manifests of a protocol version."""
    defaults: dict[str, Any] | None = None
    for line in (FOLDER / f"protocol-{version}.jsonl").read_text("utf-8").splitlines():
        said = json.loads(line)
        tables = json.loads(json.dumps(defaults or said["defaults"]))
        defaults = defaults or said["defaults"]
        for key, value in said.get("changes", {}).items():
            name, _, field = key.rpartition(".")
            (tables[name] if name else tables)[field] = value
        data = json.dumps(tables, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        yield bytes.fromhex(said["run"]), data.encode()


def freeze(seed: int) -> Iterator[str]:
    """The lines of such a file, of this version."""
    usual = Manifest().canonical()
    yield json.dumps({"run": blake3(usual).hexdigest(), "defaults": json.loads(usual)})
    said, before = {usual}, flat(json.loads(usual))
    for tables in _settings(random.Random(seed)):
        try:
            made = Manifest.model_validate(tables).canonical()
        except ValidationError:
            continue
        if made not in said:
            plain = flat(json.loads(made))
            changes = {key: value for key, value in plain.items() if before.get(key) != value}
            yield json.dumps({"run": blake3(made).hexdigest(), "changes": changes})
        said.add(made)
        if len(said) > DRAWN:
            return


def _settings(draw: random.Random) -> Iterator[dict[str, Any]]:
    """Without end: the modes, the outer optimizers, then what may or may not go together."""
    for mode in get_args(Mode):
        yield {"mode": mode}
        yield {"mode": mode, "rounds": {"fragments": 2}}
    for rule in get_args(OuterRule):
        yield {"outer": {"optimizer": rule}}
        yield {"outer": {"optimizer": rule, "momentum_start": 0.5}}
    yield {"script": {"layout": "0" * 64, "parameters": 10, "dense": 8}}
    yield {"model": {"kind": "hf", "config": '{"model_type":"gpt2"}'}}
    known = {key: field for key, field in fields(Manifest) if key.startswith(TABLES)}
    while True:
        tables: dict[str, Any] = {"mode": draw.choice(get_args(Mode))}
        for key in draw.sample([*sorted(known), *4 * OFTEN], draw.randint(1, 6)):
            name, _, field = key.rpartition(".")
            tables.setdefault(name, {})[field] = _value(draw, key, known[key])
        yield tables


def _value(draw: random.Random, key: str, field: FieldInfo) -> Any:
    if key == "rounds.codecs":
        return draw.choice([("bf16", "int8"), ("int4",), ("int8", "int2", "top12")])
    if get_origin(field.annotation) is Literal or key == "rounds.codec":
        return draw.choice([*get_args(field.annotation), field.default])
    if field.annotation is bool:
        return draw.random() < 0.5
    if key == "rounds.quorum":
        return draw.choice([0.001, 0.5, 1.0])
    return draw.choice([0, 1, 2, 4, 50] if field.annotation is int else [0.0, 0.1, 0.5, 0.9, 1.0])


if __name__ == "__main__":
    sys.stdout.writelines(f"{line}\n" for line in freeze(PROTOCOL_VERSION))
