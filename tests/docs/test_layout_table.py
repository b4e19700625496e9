"""The table of layouts: every case was run and held, and the page shows what is kept."""

from __future__ import annotations

import json
from typing import Any

from places import ROOT

from benchmarks.layout_cases import CASES, REFUSED, STEPS
from benchmarks.layouts import table

HEAD, TAIL = "<!-- layouts: begin -->", "<!-- layouts: end -->"


def kept() -> dict[str, dict[str, Any]]:
    whole = json.loads((ROOT / "benchmarks" / "results" / "layouts.json").read_text())
    assert whole["steps"] == STEPS
    return {row["name"]: row for row in whole["layouts"]}


def test_every_case_was_run_and_held() -> None:
    rows = kept()
    assert rows.keys() == {case.name for case in CASES}
    for case in CASES:
        row = rows[case.name]
        assert (row["layout"], row["ok"]) == (str(case.dims), True), case.name
        assert row["loss_difference"] <= row["loss_limit"], case.name


def test_the_page_shows_what_is_kept() -> None:
    page = (ROOT / "docs" / "parallelism.md").read_text()
    shown = page[page.index(HEAD) + len(HEAD) : page.index(TAIL)]
    assert shown.strip() == table(kept().values()).strip()
    assert all(case.name in shown for case in REFUSED)


def test_a_layout_beyond_its_limits_stands_there_as_failed() -> None:
    row = next(iter(kept().values()))
    assert "failed" not in table([row])
    assert "| failed: 1.0e-01 |" in table([row | {"ok": False, "loss_difference": 0.1}])
