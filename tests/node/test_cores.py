"""How many threads a rank takes, and who is told that others take the same cores."""

from __future__ import annotations

from pathlib import Path
from runpy import run_path

import pytest

from node import directories
from node.island import cores
from node.monitor import processors
from node.statedir import StateDir


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight cores, nothing to do, no node."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(cores, "CORES", 8)
    monkeypatch.setattr(cores, "MACHINE", 8)
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
    (other.root / "daemon.lock").write_text("7 another boot/pid:[1]\n")  # home is on a shared disk
    assert not cores.contention(0, mine.root)
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
    monkeypatch.setattr(cores, "CORES", 2)  # others may well be busy on the other six
    assert bool(cores.contention(0, tmp_path)) == told
    assert ("all 2 cores" in cores.contention(0, tmp_path)) == told


def test_cores_that_others_have_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)), raising=False)
    assert processors.usable_cores(Path("/nowhere"), Path("/nowhere")) == 6
    assert 1 <= run_path(cores.__file__)["threads_of"](0, 2) <= 3
    monkeypatch.delattr("os.sched_getaffinity")  # not every system has it
    assert processors.usable_cores(Path("/nowhere"), Path("/nowhere")) == 64


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/a/b", {"a/b/cpu.max": "250000 100000"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "20000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, 6),
        ("0::/", {"cpu.max": "9900000 100000"}, 6),
        ("0::/", {"cpu.max": "nonsense"}, 6),
        # as of a host's path, in a container that has its own group as the root
        ("4:cpu,cpuacct:/docker/1f\n0::/", {"cpu/cpu.cfs_quota_us": "150000"}, 2),
        ("2:cpu:/b", {"cpu/b/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_quota_us": "-1"}, 6),
        ("5:cpuset:/b", {"cpu/b/cpu.cfs_quota_us": "150000"}, 6),
    ],
)
def test_a_control_group_gives_less(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    cores: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(6)), raising=False)
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text(groups + "\n")
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
        if "quota" in name:
            file.with_name("cpu.cfs_period_us").write_text("100000\n")
    assert processors.usable_cores(tmp_path, tmp_path / "cgroup") == cores


def test_a_machine_that_tells_no_load_is_not_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def untold() -> tuple[float, float, float]:
        raise OSError

    monkeypatch.setattr("os.getloadavg", untold)
    assert not cores.contention(0, tmp_path)
