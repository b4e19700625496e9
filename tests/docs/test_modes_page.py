"""The page about modes: its examples are run files that load, and that a node trains with."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from places import ROOT
from swarm_kit import Island, until

from bootstrap.manifest import load
from bootstrap.manifest_rounds import Mode, OuterRule
from node.modes import check_runs, doubts

PAGE = (ROOT / "docs" / "modes.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
NAMES = [re.findall(r'name = "([a-z-]+)"', text)[0] for text in EXAMPLES]


@pytest.mark.parametrize("text", EXAMPLES, ids=NAMES)
def test_examples_are_run_files(text: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    check_runs(load(file))
    assert not doubts(load(file))


def test_the_page_names_every_mode_and_every_outer_optimizer() -> None:
    for name in (*get_args(Mode), *get_args(OuterRule)):
        assert f"`{name}`" in PAGE, name


@pytest.mark.swarm
@pytest.mark.timeout(150)
@pytest.mark.parametrize("text", EXAMPLES, ids=NAMES)
def test_a_node_trains_with_each_example(text: str, tmp_path: Path) -> None:
    """One island alone, through the first rounds of the run, or to its only one."""
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    island = Island("alone", tmp_path)
    rounds = max(3, 60 // load(file).rounds.inner_steps)  # 60 steps where they are so few
    island.start("--run", str(file), "--rounds", str(rounds))
    try:
        until(lambda: not island.running, 140, "it ends", island.tail)
        assert island.process is not None
        assert island.process.returncode == 0, island.tail()
        losses = [event["loss"] for event in island.events("step")]
        assert island.events("round")
        assert losses[-1] < losses[0] - 1.0, losses[:: len(losses) // 8]
    finally:
        island.kill()
