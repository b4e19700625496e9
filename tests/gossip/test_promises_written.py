"""No promise leaves a member before it is on its disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from exchange_kit import until
from promises_kit import ME, RUN, last
from simulated_swarm import simulated_swarm

from gossip.chain.promises import At, PromiseRecord, Promises
from gossip.rounds.proposer import Proposer
from protocols.errors import RemoteRefused
from protocols.memory import virtual_time
from protocols.messages import Promise

pytestmark = pytest.mark.usefixtures("remembered_signatures")
HEAD = b"h" * 32  # of the certificate that a round builds on


class Slow(PromiseRecord):
    """A disk that writes when it is told to, or never can."""

    def __init__(self, path: Path, *, broken: bool = False) -> None:
        super().__init__(path, RUN, ME)
        self.go, self.broken, self.asked = asyncio.Event(), broken, asyncio.Event()

    async def offload(self, work: Any) -> None:
        self.asked.set()
        await self.go.wait()
        work()

    def write(self, at: At | None) -> None:
        if self.broken:
            raise OSError("no space left on device")
        super().write(at)


async def test_what_is_said_waits_for_the_disk_and_keeps_its_order(tmp_path: Path) -> None:
    disk, said, failures = Slow(tmp_path / "promised"), [], []
    async with asyncio.TaskGroup() as group:
        wiring: Any = SimpleNamespace(offload=disk.offload, spawn=group.create_task)
        promises = Promises(disk, wiring, failures.append)
        promises.once_on_disk(None, lambda: said.append("before"))
        assert said == ["before"]
        for at, word in (((3, HEAD), "vote"), (None, "news"), ((3, HEAD), "more")):
            promises.once_on_disk(at, lambda word=word: said.append(word))  # type: ignore[misc]
        answering = group.create_task(promises.before_answer((3, HEAD)))
        await disk.asked.wait()
        assert said == ["before"]
        assert not answering.done()
        assert last(tmp_path / "promised") is None
        disk.go.set()
        await answering
    assert said == ["before", "vote", "news", "more"]
    assert last(tmp_path / "promised") == 3
    promises.once_on_disk((3, HEAD), lambda: said.append("at once"))
    assert said[-1] == "at once"
    assert not failures


async def test_what_waits_for_a_disk_that_does_not_answer_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is beyond that is as if it were lost on the way."""
    monkeypatch.setattr("gossip.chain.promises.MOST_HELD", 3)
    disk, said, nothing = Slow(tmp_path / "promised"), [], lambda error: None
    async with asyncio.TaskGroup() as group:
        wiring: Any = SimpleNamespace(offload=disk.offload, spawn=group.create_task)
        promises = Promises(disk, wiring, nothing)
        for word in range(5):
            promises.once_on_disk((3, HEAD), lambda word=word: said.append(word))  # type: ignore[misc]
        await disk.asked.wait()
        assert said == []
        disk.go.set()
    assert said == [0, 1, 2]
    promises.once_on_disk((3, HEAD), lambda: said.append(5))
    assert said[-1] == 5, "there is room again"


@pytest.mark.parametrize("mended", [False, True])
def test_who_cannot_write_promises_nothing_until_it_can(mended: bool, tmp_path: Path) -> None:
    said, failures, over = [], [], []

    async def main() -> None:
        disk = Slow(tmp_path / "promised", broken=True)
        disk.go.set()
        async with asyncio.TaskGroup() as group:
            wiring: Any = SimpleNamespace(offload=disk.offload, spawn=group.create_task)
            promises = Promises(disk, wiring, failures.append, lambda round_: round_ in over)
            await promises.begin()
            promises.once_on_disk((3, HEAD), lambda: said.append("vote"))
            promises.once_on_disk(None, lambda: said.append("news"))
            with pytest.raises(RemoteRefused, match="no space"):
                await promises.before_answer((3, HEAD))
            await asyncio.sleep(100.0)
            assert said == []
            if mended:
                disk.broken = False
            else:
                over.append(3)

    virtual_time.run(main())
    assert said == (["vote", "news"] if mended else ["news"])
    assert last(tmp_path / "promised") == (3 if mended else None), (
        "what is not known is not made up"
    )
    assert len(failures) == 1
    assert "no space" in str(failures[0])


def test_no_answer_of_a_member_promises_what_is_not_on_its_disk(tmp_path: Path) -> None:
    async def slowly(work: Callable[[], Any]) -> Any:
        await asyncio.sleep(2.0)
        return work()

    async def main() -> None:
        async with simulated_swarm(4, think=(30.0, 31.0), records=tmp_path) as swarm:
            await asyncio.sleep(0.5)
            asked, candidate, *_ = swarm.living()
            promises = asked.swarm.chains[0].promises
            promises._wiring = replace(promises._wiring, offload=slowly)
            agreement = candidate.swarm.chains[0].round.agreement
            prepare = Proposer(agreement).prepare(0, agreement.roster)
            assert promises.unwritten((prepare.round, prepare.previous))
            transport = candidate.swarm.wiring.transport
            answer = await transport.call(asked.peer, "round", prepare.encode(), timeout=10.0)
            promise: Promise = Promise.decode(answer)
            assert (promise.epoch, promise.ballot) == (0, prepare.ballot)
            kept = swarm.record_of(asked.peer, 0)
            assert kept is not None
            assert kept.promised is not None
            assert kept.promised.last == prepare.round

    virtual_time.run(main())


def test_who_is_alone_goes_on_when_its_disk_does(tmp_path: Path) -> None:
    async def main() -> None:
        async with simulated_swarm(1, size=8000, records=tmp_path) as swarm:
            (alone,) = swarm.members.values()

            async def rounds(more: int) -> None:
                goal = len(alone.replica.history) + more
                await until(lambda: len(alone.replica.history) >= goal, 60.0, every=0.1)

            await rounds(2)
            record = alone.swarm.chains[0].record
            assert record is not None
            place = record._path
            place.rename(tmp_path / "away")
            place.mkdir()
            await asyncio.sleep(60.0)
            before = len(alone.replica.history)
            await asyncio.sleep(60.0)
            assert len(alone.replica.history) == before
            place.rmdir()
            await rounds(2)

    virtual_time.run(main())
