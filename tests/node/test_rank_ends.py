"""What people are told of a rank that has refused to train: its own three lines, as such."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainer_kit import tiny_settings

from node.errors import operator_error
from node.island.events import problem_of
from node.island.rank_ends import obituary
from node.trainer.channel import Failed
from node.trainer.settings import EXIT_REFUSED

REFUSAL = operator_error(
    "E601", "cannot read the text", why="it has gone", fix="start again: a peer has it"
)
TRACE = "Traceback (most recent call last):\n  E601; fix: start again: a peer has it\n"
LATER = "sys:1: ResourceWarning: unclosed socket\n"


def rank(number: int, log: Path, *, where: str = "", said: str = "") -> Any:
    return SimpleNamespace(number=number, log=log, where=where, tail=said.strip)


@pytest.mark.parametrize(("number", "prompt"), [(0, True), (0, False), (1, True)])
def test_a_refusal_is_told_in_the_ranks_own_words(
    tmp_path: Path, number: int, prompt: bool
) -> None:
    """Rank 0's also where its process takes a while to end: it may have a GPU's memory to free."""
    log = tmp_path / f"trainer-rank{number}.log"
    ranks = [rank(0, log, said=TRACE), rank(1, log, where=" on host 1 (b)")]
    failed = None
    if number == 0:
        failed = Failed(REFUSAL.code, REFUSAL.text())
    else:
        ranks[1].tail = lambda: f"{TRACE}{REFUSAL.text()}\n{LATER}"
    ended = [(number, EXIT_REFUSED)] if prompt else []
    died = obituary(ranks, ended, failed, 0, 600.0)
    problem = problem_of(died, tiny_settings(tmp_path))
    who = ("rank 0", "rank 1 on host 1 (b)")[number]
    assert problem.text() == (
        f"error E601: {who}: cannot read the text\n"
        "  why: it has gone\n"
        f"  fix: start again: a peer has it; see {log}"
    )
    assert (died.code, died.rank) == ("E601", number)
    assert died.text == f"{who}: cannot read the text: it has gone"


@pytest.mark.parametrize("lines", [1, 2])
def test_of_a_refusal_that_is_cut_off_what_came_is_told(tmp_path: Path, lines: int) -> None:
    """A rank's last words have a limit."""
    said = "\n".join(REFUSAL.text().splitlines()[:lines])
    log = tmp_path / "log"
    died = obituary([rank(0, log)], [(0, EXIT_REFUSED)], Failed("E601", said), 0, 600.0)
    problem = problem_of(died, tiny_settings(tmp_path))
    assert (problem.code, problem.what) == ("E601", "trainer: cannot read the text")
    assert (problem.why == REFUSAL.why) is (lines == 2)
    assert problem.fix == f"see {log}"
