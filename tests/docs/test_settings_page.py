"""What every setting means: complete, current on its page, and found by name."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest
from places import ROOT
from typer.testing import CliRunner

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import Mode
from bootstrap.validation import fields
from node.cli import app
from node.config import NodeConfig
from node.setting_reference import document, explain, settings
from protocols.errors import OperatorError


def of(key: str) -> str:
    [paragraph] = [one for one in explain([key]).split("\n\n") if one.startswith(f"{key}\n")]
    return paragraph


def test_every_setting_is_explained() -> None:
    known = {one.key for one in settings() if one.of_run}
    assert {key for key, _ in fields(Manifest)} - known == {"format"}
    assert {one.key for one in settings() if not one.of_run} == set(NodeConfig.model_fields)
    for one in settings():
        assert one.meaning.endswith("."), one.key
        assert len(one.meaning) > 5
        assert "\n" not in one.meaning


def test_the_page_is_current_and_what_the_command_writes() -> None:
    command = [sys.executable, "-m", "node.setting_reference"]
    written = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    assert written == document()
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == written, (
        "run: python -m node.setting_reference > docs/settings.md"
    )


def test_defaults_are_those_of_the_modes() -> None:
    assert "default  0.5; async: 0.001\n" in of("rounds.quorum")
    assert "eager: 0.4; push-sum, fedavg, allreduce, sparta, btm: 1.0" in of("outer.lr")
    for mode in get_args(Mode):
        run = Manifest.model_validate({"mode": mode})
        [shown] = [one for one in settings() if one.key == "rounds.staleness"]
        others = {name: value for names, value in shown.by_mode for name in names.split(", ")}
        assert others.get(mode, shown.default) == str(run.rounds.staleness)


def test_bounds_and_ways_to_give_it_are_told() -> None:
    quorum = of("rounds.quorum")
    assert "takes    more than 0 and at most 1" in quorum
    assert "given as --set rounds.quorum=…" in quorum
    assert """given as --set 'rounds.codecs=["int4", "int2"]'""" in of("rounds.codecs")
    assert "given as --set 'inner.betas=[0.9, 0.95]'" in of("inner.betas")
    upload = of("max_upload")
    assert "given as --max-upload, ATOLL_MAX_UPLOAD" in upload
    assert "takes" not in upload, "its bound is in bytes, and 20Mbit is written"
    assert "takes    0 or more\n" in of("rounds.eval_every"), "not the largest integer"


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("quorum", {"rounds.quorum"}),
        ("max-upload", {"max_upload"}),
        ("seed", {"seed", "data.seed"}),
        ("inner_steps", {"inner_steps", "rounds.inner_steps"}),
        ("LR", {"inner.lr", "outer.lr"}),
        ("gossip", {"gossip.rule", "gossip.neighbours", "gossip.extra", "gossip.bound"}),
        ("momentum_st", {"outer.momentum_start"}),
    ],
)
def test_it_is_found_by_key_table_or_part(name: str, found: set[str]) -> None:
    assert {one.split("\n")[0] for one in explain([name]).split("\n\n") if one} == found


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(OperatorError, match="quorun") as refused:
        explain(["quorun"])
    assert refused.value.code == "E204"
    assert "did you mean quorum?" in refused.value.why
    with pytest.raises(OperatorError, match="no setting"):
        explain([" "])


def test_the_command_prints_it() -> None:
    printed = CliRunner().invoke(app, ["config", "explain", "quorum", "quorum"])
    assert printed.exit_code == 0
    assert printed.output.count("rounds.quorum\n") == 1
    everything = CliRunner().invoke(app, ["config", "explain"]).output
    assert everything.count("\n  given as ") == len(settings())
