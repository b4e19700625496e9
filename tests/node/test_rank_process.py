"""What a rank's process gets from the one that starts it."""

import os
import platform
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from node.hosts.interface import LOOPBACK
from node.island.rank_ends import obituary
from node.island.rank_process import KEPT_MEMORY, RankProcess, rank_environment

# blocks of 8 MiB, given back and taken again; page faults of each turn
TURNS = """
import resource
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(8 << 20) for _ in range(5)]
    del blocks
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="settings of glibc")
def test_memory_that_a_step_gives_back_is_there_for_the_next_one() -> None:
    def faults(environment: dict[str, str]) -> list[int]:
        words = [sys.executable, "-S", "-c", TURNS]
        done = subprocess.run(words, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        return [int(line) for line in done.stdout.split()]

    plain = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    assert min(faults(plain)) > 40 * 256 // 2  # pages of 4 KiB; half of them were kept anyhow
    assert max(faults(rank_environment(1))[1:]) < 100


def test_what_the_operator_says_of_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert rank_environment(1)["GLIBC_TUNABLES"] == KEPT_MEMORY
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert rank_environment(1)["GLIBC_TUNABLES"] == "glibc.malloc.arena_max=1"


def test_ranks_meet_over_loopback_only_where_no_other_host_has_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def gloo(address: str = "") -> str | None:
        return rank_environment(1, address).get("GLOO_SOCKET_IFNAME")

    nobodys = "192.0.2.77"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert (gloo(), gloo("127.0.0.1"), gloo(nobodys)) == (LOOPBACK, LOOPBACK, None)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert (gloo(), gloo("127.0.0.1"), gloo(nobodys)) == (LOOPBACK, "eth7", "eth7")


async def test_a_rank_whose_log_is_gone_has_ended_all_the_same(tmp_path: Path) -> None:
    """As where logrotate has moved it, or removed it."""
    process = SimpleNamespace(wait=AsyncMock(return_value=-signal.SIGABRT))
    rank = RankProcess(0, cast(Any, process), tmp_path / "trainer-rank0.log", 0)
    status = await rank.wait()
    assert status == -signal.SIGABRT
    died = obituary([rank], [(0, status)], None, 0, 600.0)
    assert (died.text, died.log_tail) == ("rank 0 was ended by SIGABRT", "")
    rank.log.write_text("a last word\n")
    assert rank.tail() == "a last word"
