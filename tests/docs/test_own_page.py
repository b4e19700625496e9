"""The page about scripts of one's own: its table of the island, and what it says of data."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from places import ROOT

from node.script.session import Joined
from node.trainer.copies import OF_SCHEDULE_FREE, SCHEDULE_FREE

PAGE = (ROOT / "docs" / "own.md").read_text(encoding="utf-8")
INSIDE = {"begin", "abandon"}  # what node.join itself calls


def test_the_page_names_all_that_an_island_has() -> None:
    table = PAGE.split("## What the island tells")[1].split("\n\n")[1]
    cells = [row.split("|")[1] for row in table.splitlines()[2:]]
    named = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert named == {name for name in vars(Joined) if not name.startswith("_")} - INSIDE


def test_the_page_names_what_an_optimizer_s_points_may_be_called() -> None:
    (lines,) = (text for text in PAGE.split("\n\n") if "points of parameter space" in text)
    assert set(re.findall(r"`(\w+)`", lines)) == SCHEDULE_FREE | {OF_SCHEDULE_FREE}


def test_windows_picked_by_share_are_read_once() -> None:
    (lines,) = (
        block for block in re.findall(r"```python\n(.*?)```", PAGE, re.S) if ".share" in block
    )
    read: list[int] = []
    for place in range(3):
        for step in range(2):
            island = SimpleNamespace(share=(place, 3), round=4)
            names: dict[str, Any] = {
                "torch": torch,
                "island": island,
                "windows": torch.arange(2000),
                "k": step,
            }
            exec(lines, names)
            read += names["batch"].tolist()
    assert len(set(read)) == len(read) == 3 * 2 * 256
