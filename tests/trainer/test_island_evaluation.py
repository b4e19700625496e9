"""An evaluation that fails on one rank ends the others, which are in a collective call of it."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from places import KITS
from suites import slow
from trainer_kit import begin, tiny_settings, tiny_vectors

from node.island.island import Island
from node.island.rank_ends import TrainerDied
from node.trainer.channel import Ready
from node.trainer.settings import EXIT_CRASHED, EXIT_OUT_OF_MEMORY, EXIT_REFUSED

WAIT_S = 60.0  # for anything; a loaded machine imports torch slowly
PROMPT_S = 10.0  # for the end of all ranks; a collective call may take ten minutes
PROGRAM = KITS / "failing_rank.py"


@pytest.mark.parametrize(
    ("failing", "failure", "code", "status"),
    [
        (1, "any", "E405", EXIT_CRASHED),
        (1, "memory", "E401", EXIT_OUT_OF_MEMORY),
        (0, "data", "E601", EXIT_REFUSED),
        *slow((0, "any", "E405", EXIT_CRASHED), (1, "data", "E601", EXIT_REFUSED)),
    ],
)
async def test_it_ends_all_ranks(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    failure: str,
    code: str,
    status: int,
) -> None:
    python = tmp_path / "python"  # is called with: -P -m node.trainer.rank …
    python.write_text(f'#!/bin/sh\nshift 3\nexec {sys.executable} {PROGRAM} "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("FAILING", str(failing))
    monkeypatch.setenv("FAILURE", failure)
    settings = tiny_settings(tmp_path, ranks=2)
    vectors = tiny_vectors(settings.manifest)

    async def until(running: Island, kind: type[Any]) -> Any:
        async with asyncio.timeout(WAIT_S):
            while not isinstance(event := await running.next_event(), kind):
                assert not isinstance(event, TrainerDied), event
            return event

    async with Island(settings, vectors, tmp_path / "run") as running:
        await until(running, Ready)
        await running.send(begin(evaluate=True))
        began = time.monotonic()
        died = await until(running, TrainerDied)
        assert time.monotonic() - began < PROMPT_S
        assert (died.rank, died.code, died.exit_code) == (failing, code, status)
        refused = f"rank {failing}: cannot stream datasets:x: the server is away"
        assert (str(died.error) == refused) is (failure == "data")
        assert not running.alive
    vectors.close()
