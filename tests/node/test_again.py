"""Flags of a run that is as another one was, of more rounds."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from bootstrap.manifest import Manifest, Model, difference
from node import again
from node.again import flags_again
from node.commands.manifest import manifest_for
from node.config import resolve
from node.presets import preset

N = "--set rounds.total_rounds=N"
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "tiny": (
        {"rounds.total_rounds": 2, "rounds.inner_steps": 4},
        f"--set rounds.inner_steps=4 {N}",
    ),
    "small": (
        {"rounds.total_rounds": 7, "rounds.codec": "int8"},
        f"--preset small --set rounds.codec=int8 {N}",
    ),
    "125m": (
        {"mode": "async", "outer.lr": 0.4},
        f"--preset 125m --mode async --set outer.lr=0.4 {N}",
    ),
    "tiny-streaming": ({"rounds.total_rounds": 9}, f"--preset tiny-streaming {N}"),
}
OTHERS: list[tuple[str, dict[str, Any]]] = [
    ("tiny", {"rounds.codec": "auto", "rounds.codecs": ["int8", "int4"], "data.recipe": "text"}),
    ("tiny", {"outer.optimizer": "sgd", "name": "mine", "inner.betas": (0.8, 0.9)}),
    ("tiny", {"rounds.total_rounds": 9, "inner.total_steps": 77, "inner.keep_moments": "false"}),
    ("tiny", {"model.max_seq_len": 64, "data.seq_len": 64, "model.attention": "document"}),
    ("small", {"mode": "allreduce", "rounds.inner_steps": 1}),
    ("tiny", {"mode": "btm", "rounds.inner_steps": 700}),
    ("tiny", {"mode": "gossip", "gossip.rule": "average"}),
    ("moe-tiny", {"mode": "sparta"}),
]


@pytest.mark.parametrize("name", CASES)
def test_the_fewest_flags_are_told(name: str) -> None:
    changes, flags = CASES[name]
    assert shlex.join(flags_again(preset(name, changes)) or ()) == flags
    told = flags_again(preset(name, changes), "/my text")
    assert shlex.join(told or ()) == f"--data '/my text' {flags}"


@pytest.mark.parametrize(
    ("name", "changes"), [*((name, changes) for name, (changes, _) in CASES.items()), *OTHERS]
)
def test_with_them_a_run_is_as_it_was(
    name: str, changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = preset(name, changes)
    flags = flags_again(run)
    assert flags is not None
    count = run.rounds.inner_steps if run.mode == "btm" else run.rounds.total_rounds
    given: dict[str, list[str]] = {flag: [] for flag in ("--preset", "--mode", "--set")}
    for flag, value in zip(flags[::2], flags[1::2], strict=True):
        given[flag].append(value.replace("=N", f"={count}"))
    # what an exported folder's config.json says
    plain = Model.model_validate(run.model.model_dump(exclude={"attention"}))
    monkeypatch.setattr("node.hf.import_hf.read_config", lambda _: plain)
    config = resolve({"dir": str(tmp_path), "init_from": str(tmp_path)}, {})
    all_set = [*given["--set"], *(f"mode={mode}" for mode in given["--mode"])]
    made = manifest_for(config, "".join(given["--preset"]), all_set)
    assert made is not None
    assert not [line for line in difference(made, run) if not line.startswith("model.")]
    assert made.model.attention == run.model.attention


def test_a_run_that_no_preset_leads_to_is_not_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "TRIES", 0)
    assert flags_again(preset("tiny")) is None


def test_it_is_not_the_name_that_a_text_gave_it() -> None:
    assert flags_again(Manifest(name="tiny-text")) == ["--set", "rounds.total_rounds=N"]
