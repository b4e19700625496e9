"""What memory is left: the machine's, or less where a control group has a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.monitor.machine import Machine
from node.monitor.memory import available

KIB = 1024


@pytest.fixture
def system(tmp_path: Path) -> Path:
    for folder in ("proc/self", "cgroup/system.slice/atoll.service"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable: 5000 kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/system.slice/atoll.service\n")
    return tmp_path


def limited(system: Path, group: str, limit: str, used: int) -> int | None:
    folder = system / "cgroup" / group
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used * KIB}\n")
    (folder / "memory.stat").write_text(
        f"anon 5\nfile 9\nactive_file {100 * KIB}\ninactive_file {200 * KIB}\n"
    )
    return available(system / "proc", system / "cgroup")


@pytest.mark.parametrize("group", ["", "system.slice", "system.slice/atoll.service"])
def test_a_limit_of_any_group_counts_and_files_that_are_cached_do_not(
    system: Path, group: str
) -> None:
    assert limited(system, group, str(2000 * KIB), 1500) == 800 * KIB


def test_no_limit_and_one_beyond_the_machine_leave_what_the_machine_has(system: Path) -> None:
    assert limited(system, "", "max", 1500) == 5000 * KIB
    assert limited(system, "", str(90_000 * KIB), 1500) == 5000 * KIB


def test_a_group_that_is_over_its_limit_has_nothing_left(system: Path) -> None:
    assert limited(system, "", str(1000 * KIB), 1500) == 0


def test_what_is_left_is_compared_with_the_total_of_whichever_leaves_least(system: Path) -> None:
    """A container with a limit on a machine that has much: not nearly all of it is in use."""
    told = Machine(system, proc=system / "proc", cgroups=system / "cgroup")()
    assert (told.memory_available, told.memory_total) == (5000 * KIB, 9000 * KIB)
    for limit, total in ((2000, 2000), (90_000, 9000)):
        limited(system, "", str(limit * KIB), 500)
        told = Machine(system, proc=system / "proc", cgroups=system / "cgroup")()
        assert told.memory_total == total * KIB


def test_a_system_that_tells_nothing_is_not_known(tmp_path: Path) -> None:
    assert available(tmp_path, tmp_path) is None
