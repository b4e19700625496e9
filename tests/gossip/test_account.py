"""The account of push-sum's weight: what is on disk when, and who says whether a share came."""

from __future__ import annotations

import asyncio
import errno
import json
import math
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shares_kit import RUN, Giver, PaperBook, all_weights

from gossip.pairs.account import Account, Balance, BookFile
from gossip.pairs.meeting import Post
from protocols.errors import RemoteRefused, TransferStalled, TransportError
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import run

A, B = (Identity.from_seed(bytes([n] * 32)) for n in (1, 2))


class Two:
    """Two islands with weight 1 each, whose values are 0 and 1; they give when they are told."""

    def __init__(self, group: asyncio.TaskGroup) -> None:
        self.group, self.network = group, MemoryNetwork(1, link=Link(latency=0.01))
        self.books = {one.peer_id: PaperBook(1.0) for one in (A, B)}
        self.tasks: dict[PeerId, asyncio.Task[None]] = {}
        self.a, self.b = self.start(A, 0.0), self.start(B, 1.0)

    def start(self, who: Identity, value: float) -> Giver:
        peers = [A.peer_id, B.peer_id]
        base, book = torch.full((8,), value), self.books[who.peer_id]
        giver = Giver(who, self.network, random.Random(1), book, base, peers, stopped=True)
        self.tasks[who.peer_id] = self.group.create_task(giver.live())
        return giver

    async def kill(self, who: Identity) -> None:
        self.network.kill(who.peer_id)
        self.tasks[who.peer_id].cancel()
        await asyncio.wait([self.tasks[who.peer_id]])

    async def give(self, *, unheard: bool = False) -> None:
        """A gives half of its weight to B; ``unheard``: and does not hear that it has come."""
        send = self.a.letters.send

        async def lost(*args: Any, **more: Any) -> None:
            await send(*args, **more)
            if not more.get("again"):
                raise TransferStalled("its answer is lost")

        if unheard:
            self.a.letters.send = lost  # type: ignore[method-assign]
        body, weight = self.a.blend.encode(1, "fp32")
        await self.a.postman.send_all([Post(B.peer_id, 0, 0, None, True)], body, weight)

    @property
    def weights(self) -> list[float]:
        """What is here by memory, and it is what is here by disk."""
        for one in (self.a, self.b):
            assert one.weight == one.account.balance.own
        return [self.a.weight, self.b.weight]


def with_two(test: Callable[[Two], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            two = Two(group)
            await asyncio.sleep(2.0)
            await test(two)
            assert all_weights(two.books) == 2.0
            for task in two.tasks.values():
                task.cancel()

    run(main())


def test_a_share_that_came_counts_once_where_its_receiver_is_away_for_ten_minutes() -> None:
    async def test(two: Two) -> None:
        await two.give(unheard=True)
        two.network.freeze(B.peer_id)
        two.a.forget(B.peer_id)
        await asyncio.sleep(700.0)
        assert two.weights == [0.5, 1.5]
        two.network.thaw(B.peer_id)
        two.a.learn(B.peer_id)
        await asyncio.sleep(30.0)
        assert two.weights == [0.5, 1.5]
        assert not two.a.account.balance.given

    with_two(test)


@pytest.mark.parametrize("mixed", [True, False])
def test_a_share_that_came_counts_once_where_its_receiver_was_killed(mixed: bool) -> None:
    """And comes back with the parameters of a checkpoint that was made before, or after."""

    async def test(two: Two) -> None:
        if not mixed:
            two.b.letters.take = lambda stamp: None  # type: ignore[method-assign]
        await two.give(unheard=True)
        if mixed:
            await asyncio.sleep(2.0)
            assert not two.b.letters.held
        await two.kill(B)
        await asyncio.sleep(20.0)
        assert two.a.weight == 0.5  # connections are refused, which says nothing
        two.b = two.start(B, 0.7)
        await asyncio.sleep(20.0)
        assert two.weights == [0.5, 1.5]
        assert two.b.base.tolist() == pytest.approx([0.7] * 8)
        assert not two.a.account.balance.given

    with_two(test)


def test_a_share_that_has_not_come_is_there_again_where_its_sender_was_killed() -> None:
    async def test(two: Two) -> None:
        two.network.freeze(B.peer_id)
        giving = asyncio.ensure_future(two.give())
        await asyncio.sleep(0.1)
        giving.cancel()
        await two.kill(A)
        assert two.books[A.peer_id].balance is not None
        assert two.books[A.peer_id].balance.own == 0.5
        two.a = two.start(A, 0.2)
        two.network.thaw(B.peer_id)
        await asyncio.sleep(20.0)
        assert two.weights in ([1.0, 1.0], [0.5, 1.5])  # what was on its way may have come
        assert not two.a.account.balance.given

    with_two(test)


def test_what_its_sender_has_taken_back_does_not_come_any_more() -> None:
    async def test(two: Two) -> None:
        body, weight = two.a.blend.encode(1, "fp32")
        balance = await two.a.account.change(lambda b: b.give([B.peer_id], weight))
        name = balance.given[B.peer_id].name
        assert not await two.a.letters.withdraw(B.peer_id, name, 1.0)
        post = Post(B.peer_id, 0, 0, None, awaited=False)
        with pytest.raises(TransportError):
            await two.a.letters.send(post, body, timeout=1.0, weight=weight, name=name)
        assert two.b.weight == 1.0
        await two.a.account.change(lambda b: b.settle(B.peer_id, came=False))
        await two.a._take_back(body, weight)
        await two.give()  # the next one does
        assert two.weights == [0.5, 1.5]

    with_two(test)


def test_a_share_that_comes_again_after_a_later_one_counts_once() -> None:
    async def test(two: Two) -> None:
        body, weight = two.a.blend.encode(1, "fp32")
        await two.a._take_back(body, weight)  # it is only to be sent again
        for _ in range(3):
            await two.give()
        assert two.weights == [0.125, 1.875]
        (first, *_, last) = (two.a.account.balance.series + n.to_bytes(8, "big") for n in range(3))
        post = Post(B.peer_id, 0, 0, None, awaited=False)
        for again in (False, True):
            more = {"weight": weight, "name": first, "again": again}
            await two.a.letters.send(post, body, timeout=1.0, **more)
        assert two.weights == [0.125, 1.875]
        for name in (first, last):
            assert await two.a.letters.withdraw(B.peer_id, name, 1.0)

    with_two(test)


def test_a_share_that_was_taken_back_has_not_come_by_a_later_one() -> None:
    async def test(two: Two) -> None:
        body, weight = two.a.blend.encode(1, "fp32")
        balance = await two.a.account.change(lambda b: b.give([B.peer_id], weight))
        name = balance.given[B.peer_id].name
        assert not await two.a.letters.withdraw(B.peer_id, name, 1.0)
        await two.a.account.change(lambda b: b.settle(B.peer_id, came=False))
        await two.a._take_back(body, weight)
        await two.give()
        assert not await two.a.letters.withdraw(B.peer_id, name, 1.0)
        post = Post(B.peer_id, 0, 0, None, awaited=False)
        with pytest.raises(RemoteRefused) as error:
            await two.a.letters.send(post, body, timeout=1.0, weight=weight, name=name)
        assert error.value.code == "late"
        assert two.weights == [0.5, 1.5]

    with_two(test)


def test_where_a_disk_is_full_nothing_is_given_and_nothing_taken() -> None:
    async def test(two: Two) -> None:
        told: list[str] = []
        two.a.postman.notice = told.append
        for full in (A, B):
            two.books[full.peer_id].full = lambda: True
            for _ in range(2):
                await two.give()
                assert two.weights == [1.0, 1.0]
            two.books[full.peer_id].full = lambda: False
        assert len(told) == 1
        assert "No space left" in told[0]
        await two.give()
        assert two.weights == [0.5, 1.5]

    with_two(test)


def test_an_account_is_kept_whole_and_is_of_one_island_and_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weight-0.json"
    book = BookFile(path, RUN, A.peer_id)
    assert book.read() is None
    balance = Balance(1 / 3).give([B.peer_id], 0.1).take(B.peer_id, bytes(range(16)), 2.0**-40)
    book.write(balance)
    assert BookFile(path, RUN, A.peer_id).read() == balance
    assert [one.name for one in tmp_path.iterdir()] == ["weight-0.json"]
    assert BookFile(path, b"s" * 32, A.peer_id).read() is None
    assert BookFile(path, RUN, B.peer_id).read() is None
    text = path.read_text()
    for damaged in ("", "[]", text[:-9], text.replace("own", "owe"), text.replace("0.1", "-1")):
        path.write_text(damaged)
        assert book.read() is None
    path.write_text(text)

    def refused(*given: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(os, "replace", refused)
    with pytest.raises(OSError, match="weight-0"):
        book.write(Balance(1.0))
    assert book.read() == balance


@pytest.mark.parametrize(
    ("what", "value"),
    [
        ("own", 0.0),
        ("own", -1.0),
        ("own", math.nan),
        ("own", math.inf),
        ("series", "00" * 7),
        ("count", -1),
        ("given", {B.peer_id: ["00" * 15, 0.5]}),
        ("given", {B.peer_id: ["00" * 16, 0.0]}),
        ("given", {B.peer_id: ["00" * 16, math.inf]}),
        ("came", {B.peer_id: "00" * 17}),
    ],
)
def test_what_cannot_be_is_not_taken_for_a_balance(tmp_path: Path, what: str, value: Any) -> None:
    path = tmp_path / "weight-0.json"
    book = BookFile(path, RUN, A.peer_id)
    balance = Balance(0.5).give([B.peer_id], 0.1)
    book.write(balance)
    path.write_text(json.dumps({**json.loads(path.read_text()), what: value}))
    assert book.read() is None


def test_a_balance_is_on_the_disk_before_it_takes_the_place_of_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "weight-0.json"
    book, first = BookFile(path, RUN, A.peer_id), Balance(1.0)
    second = replace(first, own=2.0)
    book.write(first)
    length = path.stat().st_size
    sync, synced = os.fsync, list[tuple[str, Balance | None]]()

    def fsync(file: int) -> None:
        sync(file)
        what = os.fstat(file)
        folder = os.path.samestat(what, tmp_path.stat())
        synced.append(("its name" if folder else f"{what.st_size} bytes", book.read()))

    monkeypatch.setattr(os, "fsync", fsync)
    book.write(second)
    assert synced == [(f"{length} bytes", first), ("its name", second)]

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        book.write(first)
    assert book.read() == second
    assert os.listdir(tmp_path) == [path.name]


def test_each_share_has_a_name_of_its_own_and_later_ones_are_greater() -> None:
    balance = Balance(1.0)
    names = []
    for to in (["a", "b"], ["c"], ["a", "d"]):
        balance = balance.give([PeerId(peer) for peer in to], 0.125)
        names += [balance.given[PeerId(peer)].name for peer in to]
        balance = balance.settle(PeerId("a"), came=False) if "a" in to else balance
    assert names == sorted(set(names))
    assert all(name.startswith(balance.series) for name in names)
    assert (balance.own, balance.count) == (1.0 - 3 * 0.125, 5)
    assert sorted(balance.given) == ["b", "c", "d"]
    assert balance.settle(PeerId("b"), came=True).own == balance.own


async def test_what_need_not_be_written_soon_is_written_with_the_next_change() -> None:
    async def offload(work: Callable[[], Any]) -> Any:
        return work()

    book = PaperBook(1.0)
    account = Account(1.0, book, offload)
    after = await account.change(lambda b: b.take(B.peer_id, bytes(16), 0.5), soon=False)
    assert account.balance == after
    assert book.balance is None
    assert (await account.change(lambda b: b.give([B.peer_id], 0.25))).own == 1.25
    assert book.balance == account.balance
    assert Account(9.0, book, offload).balance == account.balance


def test_no_more_names_are_kept_than_peers_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gossip.pairs.account.MAX_PEERS", 3)
    balance = Balance(1.0)
    for n in (0, 1, 2, 0, 3):
        balance = balance.take(PeerId(str(n)), bytes([n] * 16), 0.5)
    assert list(balance.came) == ["2", "0", "3"]
    assert balance.own == 3.5
