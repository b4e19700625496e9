"""Hosts that read their data while host 0 waits for others."""

from __future__ import annotations

import asyncio

import pytest
from hub_kit import JOB, WAIT_S, Other, alive, hub, quicken

from node.hosts.wire import Leaving, Prepared


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.mark.parametrize("then", ["reads on", "ready", "lost", "leaving"])
async def test_hosts_that_read_their_data_are_waited_for_at_the_first_start(then: str) -> None:
    """Though the minimum is there, and one that has not come is missing all the while."""
    wait_s = 0.8 if then == "reads on" else WAIT_S
    async with hub(minimum=1, maximum=3, wait_s=wait_s) as (made, said):
        made.offer(JOB)
        other = await Other.dial(made)
        await other.greet()
        async with alive(other):
            waiting = asyncio.ensure_future(made.muster(again=False))
            done, _ = await asyncio.wait((waiting,), timeout=0.5)  # of a last call of 0.2 s
            assert not done
            match then:
                case "ready":
                    other.connection.send(Prepared())
                case "lost":
                    other.connection.close()
                case "leaving":
                    other.connection.send(Leaving())
            found = await asyncio.wait_for(waiting, WAIT_S / 2)
            assert [host.number for host in found] == [1] * (then == "ready")
            assert any("host 1 (reads its data), 2 is missing" in line for line in said)


async def test_ranks_that_start_again_do_not_wait_for_a_host_that_reads_its_data() -> None:
    async with hub(minimum=1, maximum=2) as (made, _):
        made.offer(JOB)
        other = await Other.dial(made)
        await other.greet()
        async with alive(other):
            assert await asyncio.wait_for(made.muster(again=True), WAIT_S / 2) == []
