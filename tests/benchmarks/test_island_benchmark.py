"""The benchmark of islands: what is left of them where it fails, and whether it says why."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import island

Started = list[subprocess.Popen[Any]]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Started:
    """What is started: in the place of Python a program that says one thing and does nothing."""
    idle = tmp_path / "idle"
    idle.write_text("#!/bin/sh\necho what is wrong >&2\nexec sleep 600 >/dev/null\n")
    idle.chmod(0o755)
    found: Started = []
    real = subprocess.Popen

    def popen(*arguments: Any, **options: Any) -> subprocess.Popen[Any]:
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr("sys.executable", str(idle))
    return found


@pytest.fixture(autouse=True)
def nothing_stays(started: Started) -> Any:
    yield
    for process in started:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def gone(process: subprocess.Popen[Any]) -> bool:
    return process.returncode is not None and not os.path.exists(f"/proc/{process.pid}")


def test_islands_that_do_not_come_up_end_and_their_logs_are_told(
    tmp_path: Path, started: Started
) -> None:
    with pytest.raises(TimeoutError, match="what is wrong"):
        island.Islands(tmp_path, None, 1.0, start_s=1.0).measure()
    assert [gone(process) for process in started] == [True]


def test_bare_loops_end_where_one_fails(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_such_core(process: int, core: int) -> None:
        if core:
            raise OSError("no such core")

    monkeypatch.setattr(island, "pin", no_such_core)
    with pytest.raises(OSError, match="no such core"):
        island.bare(Path("text"), 1.0, apart=True)
    assert [gone(process) for process in started] == [True, True]
