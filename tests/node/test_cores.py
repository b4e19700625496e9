"""How many threads a rank takes, and who is told that others take the same cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from node import directories
from node.island import cores
from node.statedir import StateDir


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, nothing to do, no node."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(cores, "CORES", 8)
    monkeypatch.setattr("os.getloadavg", lambda: (0.5, 90.0, 90.0))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("given", "openmp", "ranks", "threads"),
    [
        (0, None, 1, 8),
        (0, None, 3, 2),
        (0, None, 9, 1),
        (0, "3", 2, 3),
        (0, "4,2", 1, 4),
        (2, "3", 1, 2),
        (0, "", 2, 4),
        (0, "0", 2, 4),
        (0, "many", 2, 4),
    ],
)
def test_a_rank_takes_what_was_said_or_its_part_of_the_cores(
    given: int, openmp: str | None, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if openmp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", openmp)
    assert cores.threads_of(given, ranks) == threads


def node_in(directory: Path) -> StateDir:
    """One that runs there, as far as others see."""
    home = StateDir(directory)
    home.lock()
    directories.note(directory)
    return home


def test_who_starts_beside_another_node_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = node_in(tmp_path / "mine"), node_in(tmp_path / "other")
    hint = cores.contention(0, mine.root)
    assert hint.startswith("1 other node of yours on this machine, and this one takes all 8 cores")
    assert "--threads" in hint
    assert not cores.contention(4, mine.root)  # it was shared out already
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert not cores.contention(0, mine.root)
    monkeypatch.delenv("OMP_NUM_THREADS")
    other.unlock()
    assert not cores.contention(0, mine.root)
    mine.unlock()


@pytest.mark.parametrize(("load", "told"), [(7.9, False), (8.1, True)])
def test_who_starts_on_a_busy_machine_is_told(
    load: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    assert bool(cores.contention(0, tmp_path)) == told
    assert ("load 8.1" in cores.contention(0, tmp_path)) == told


def test_a_machine_that_tells_no_load_is_not_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr("os.getloadavg", untold)
    assert not cores.contention(0, tmp_path)
