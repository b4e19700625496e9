"""Letters on the simulated network: whole, checked, bounded, and resumed where they break."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from gossip.pairs import letters
from gossip.pairs.letters import PUSHES, Letter, Letters, Mail, receive
from gossip.wiring import Wiring
from protocols.bodies import BufferFeed
from protocols.codecs import CHUNK, Encoded, RangeCodec
from protocols.errors import Malformed, RemoteRefused, TransportError
from protocols.identity import Identity, PeerId
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import inline, run
from protocols.messages import TransferHeader

RUN = b"r" * 32
SIZE = 700_000
A, B, C = (Identity.from_seed(bytes([n] * 32)) for n in (1, 2, 3))


class Box:
    """One node with letters, and what it was told."""

    def __init__(
        self, network: MemoryNetwork, identity: Identity, codec: str = "bf16", **more: Any
    ) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.arrived: list[Letter] = []
        self.rejected: list[str] = []
        self.strangers: set[PeerId] = set()
        self.coming = 0  # letters that have begun to arrive
        self.broken = 0  # and have stopped to

        def spawn(coroutine: Any) -> asyncio.Task[None]:
            task = asyncio.get_running_loop().create_task(coroutine)
            self.tasks.add(task)
            return task

        loop = asyncio.get_running_loop()
        self.codec = RangeCodec(codec, SIZE)
        wiring = Wiring(
            network.join(identity.peer_id), identity, RUN, self.codec, spawn, inline, loop.time
        )
        mail = Mail(
            welcome=lambda peer: peer not in self.strangers,
            coming=self._count,
            broken=self._broke,
            arrived=self.arrived.append,
            dropped=lambda stamp: None,
            rejected=lambda peer, error: self.rejected.append(str(error)),
        )
        self.letters = Letters(wiring, SIZE, mail, **more)
        receive([self.letters])

    def _count(self, peer: PeerId) -> None:
        self.coming += 1

    def _broke(self, peer: PeerId) -> None:
        self.broken += 1

    def body(self, value: float, codec: str = "") -> Encoded:
        chosen = self.codec.named(codec or self.codec.name)
        data = torch.empty(chosen.encoded_size(0, SIZE), dtype=torch.uint8)
        chosen.encode(0, torch.full((SIZE,), value), data)
        return Encoded(chosen, data)

    async def send(self, to: Identity, value: float, codec: str = "", **more: Any) -> None:
        given: dict[str, Any] = {"answers": None, "timeout": 5.0} | more
        await self.letters.send(to.peer_id, 4, 1, self.body(value, codec), **given)


def with_boxes(test: Callable[[Box, Box, Box], Awaitable[None]], **more: Any) -> None:
    async def main() -> None:
        network = MemoryNetwork(1, link=more.pop("link", Link(latency=0.01)), upload=12.5e6)
        a, b, c = Box(network, A), Box(network, B, **more), Box(network, C)
        await test(a, b, c)

    run(main())


def test_a_letter_arrives_with_all_that_belongs_to_it() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 3.0, answers=(2, 1), weight=0.25)
        (letter,) = b.arrived
        assert (letter.stamp.sender, letter.stamp.round, letter.stamp.exchange) == (A.peer_id, 4, 1)
        assert letter.stamp.answers == (2, 1)
        assert letter.weight == 0.25
        assert torch.equal(letter.body.data, a.body(3.0).data)
        assert b.letters.take(letter.stamp) is letter
        assert b.letters.take(letter.stamp) is None

    with_boxes(test)


def test_broken_letters_go_on_and_arrive_once() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        for value in range(12):
            await a.send(B, float(value))
        assert len(b.arrived) == 12
        assert all(
            torch.equal(one.body.data, a.body(float(i)).data) for i, one in enumerate(b.arrived)
        )

    with_boxes(test, link=Link(latency=0.01, drop=0.3), keep_all=True, room=20)


def test_values_that_are_not_finite_are_refused() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        data = torch.full((a.codec.encoded_size(0, SIZE),), 255, dtype=torch.uint8)
        body = Encoded(a.codec, data)
        with pytest.raises(RemoteRefused):
            await a.letters.send(B.peer_id, 4, 0, body, answers=None, timeout=5.0)
        assert b.arrived == []
        assert b.rejected

    with_boxes(test)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf"), 2.0**32 + 1])
def test_impossible_weights_are_refused(weight: float) -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        with pytest.raises(RemoteRefused):
            await a.send(B, 1.0, weight=weight)
        assert b.arrived == []

    with_boxes(test)


def test_what_weighs_more_than_it_may_is_refused() -> None:
    """As much as all islands may weigh: else one letter would take the place of all they learnt."""
    most = 2.0

    async def test(a: Box, b: Box, c: Box) -> None:
        nonlocal most
        with pytest.raises(RemoteRefused):
            await a.send(B, 1.0, weight=3.0)
        assert b.arrived == []
        most = 4.0
        await a.send(B, 1.0, weight=3.0)
        assert [letter.weight for letter in b.arrived] == [3.0]

    with_boxes(test, heaviest=lambda: most)


def test_another_codec_and_strangers_are_refused() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        with pytest.raises(TransportError):
            await b.send(A, 1.0)  # int8, where bf16 is the run's
        a.strangers.add(C.peer_id)
        with pytest.raises(RemoteRefused, match="announce"):
            await c.send(A, 1.0)
        assert a.arrived == []

    with_boxes(test, codec="int8")


def test_the_newest_of_each_counts_and_room_is_bounded() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 1.0)
        await a.send(B, 2.0)
        assert len(b.letters.held) == 1
        await c.send(B, 3.0)
        assert [stamp.sender for stamp in b.letters.held] == [C.peer_id]

    with_boxes(test, room=1)


def test_where_none_may_be_lost_there_is_no_room_for_more() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 1.0)
        await a.send(B, 2.0)
        with pytest.raises(RemoteRefused, match="room"):
            await c.send(B, 3.0)
        assert len(b.letters.held) == 2

    with_boxes(test, room=2, keep_all=True)


def test_each_letter_names_its_codec_and_any_that_the_run_allows_is_taken() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        await a.send(B, 1.0, "int8")
        await a.send(B, 2.0, "fp32")
        await a.send(B, 3.0)
        assert [one.body.codec.name for one in b.arrived] == ["int8", "fp32", "bf16"]
        for value, letter in enumerate(b.arrived, 1):
            found = torch.empty(SIZE)
            letter.body.codec.decode(0, letter.body.data, found)
            assert found[[0, -1]].tolist() == pytest.approx([value, value], rel=0.01)
        with pytest.raises(RemoteRefused):
            await a.send(B, 1.0, "fp16")
        assert "fp16, not in" in b.rejected[-1]

    with_boxes(test, codecs=("fp32", "bf16", "int8"))


def test_broken_letters_of_any_codec_go_on() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        names = ["fp32", "int8", "bf16"] * 4
        for value, name in enumerate(names):
            await a.send(B, float(value), name)
        assert [one.body.codec.name for one in b.arrived] == names

    more: dict[str, Any] = {"codecs": ("fp32", "bf16", "int8"), "keep_all": True, "room": 20}
    with_boxes(test, link=Link(latency=0.01, drop=0.3), **more)


def test_nothing_is_kept_of_letters_that_have_come() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        for value in range(3):
            await a.send(B, float(value))
        assert not b.letters.transfers.receiving

    with_boxes(test)


def test_a_peer_has_a_bounded_number_of_letters_on_their_way() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        sent = [a.send(B, float(value)) for value in range(PUSHES + 3)]
        ended = await asyncio.gather(*sent, return_exceptions=True)
        refused = [one for one in ended if isinstance(one, RemoteRefused)]
        assert [one.code for one in refused] == ["busy"] * 3
        assert len(b.arrived) == PUSHES
        await a.send(B, 9.0)

    with_boxes(test, keep_all=True, room=20)


def test_a_letter_that_is_here_does_not_come_again() -> None:
    """Whoever is told that it is coming would wait for an end of which nobody tells."""

    async def test(a: Box, b: Box, c: Box) -> None:
        body = a.body(1.0).data.numpy().tobytes() + struct.pack(">HqHd", 0, -1, 0, 1.0)
        header = TransferHeader(RUN, 0, 4, 0, SIZE, "bf16", bytes(16), 0).encode()
        transport = a.letters.wiring.transport
        await transport.push(B.peer_id, "letter", header, BufferFeed(body), timeout=5.0)
        with pytest.raises(RemoteRefused) as error:
            await transport.push(B.peer_id, "letter", header, BufferFeed(body), timeout=5.0)
        assert error.value.code == "again"
        assert (b.coming, len(b.arrived)) == (1, 1)

    with_boxes(test)


def test_what_made_way_while_its_sender_asked_is_asked_about_again() -> None:
    """Nobody has lied: no memory is taken, nobody is blamed, and it comes from its beginning."""

    async def test(a: Box, b: Box, c: Box) -> None:
        header = TransferHeader(RUN, 0, 4, 0, SIZE, "bf16", bytes(16), CHUNK)
        body = a.body(1.0).data.numpy().tobytes() + bytes(20)
        left = BufferFeed(body[2 * CHUNK :])
        transport = a.letters.wiring.transport
        with pytest.raises(RemoteRefused) as error:
            await transport.push(B.peer_id, "letter", header.encode(), left, timeout=5.0)
        assert error.value.code == "again"
        assert b.rejected == []
        assert not b.letters._arriving

    with_boxes(test)


def test_no_memory_is_taken_for_a_letter_of_another_length_than_its_codec_has() -> None:
    class Arriving:
        """The body of a letter that says that it is fp32."""

        length = 100

        async def into(self, drain: Any, *, stall: float) -> None:
            raise AssertionError("nothing is to be read")

    async def test(a: Box, b: Box, c: Box) -> None:
        header = TransferHeader(RUN, 0, 4, 0, SIZE, "fp32", bytes(16), 0)
        with pytest.raises(Malformed, match="100 bytes of a letter in fp32"):
            await b.letters.receive(A.peer_id, header, Arriving())  # type: ignore[arg-type]
        assert not b.letters._arriving

    with_boxes(test, codecs=("fp32", "bf16"))


class Stalled:
    """The body of a try that stands still: so much of it comes now, and the rest when told to."""

    def __init__(self, data: bytes, first: int) -> None:
        self.length, self._data, self._first = len(data), data, first
        self.stands, self.go_on = asyncio.Event(), asyncio.Event()

    async def into(self, drain: Any, *, stall: float) -> None:
        for part in (self._data[: self._first], self._data[self._first :]):
            while part:
                room = drain.room()
                count = min(len(room), len(part))
                room[:count] = part[:count]
                drain.took(count)
                part = part[count:]
            self.stands.set()
            await self.go_on.wait()


@pytest.mark.parametrize("first", [1000, 0], ids=["begun", "not begun"])
def test_a_try_that_stood_still_writes_nothing_into_what_came_by_the_next(first: int) -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        header = TransferHeader(RUN, 0, 4, 0, SIZE, "bf16", bytes(16), 0)
        trailer = struct.pack(">HqHd", 0, -1, 0, 1.0)
        good = a.body(1.0).data.numpy().tobytes() + trailer
        bad = good[:first] + bytes([255]) * (len(good) - first)  # NaN
        stalled, whole = Stalled(bad, first), Stalled(good, len(good))
        whole.go_on.set()
        receive = b.letters.receive
        older = asyncio.create_task(receive(A.peer_id, header, stalled))  # type: ignore[arg-type]
        await stalled.stands.wait()
        await receive(A.peer_id, header, whole)  # type: ignore[arg-type]
        stalled.go_on.set()
        with pytest.raises(RemoteRefused) as error:
            await older
        assert error.value.code == "again"
        (letter,) = b.arrived
        assert letter.body.data.numpy().tobytes() + trailer == good
        assert not b.letters._arriving

    with_boxes(test)


def test_of_two_tries_the_newer_goes_on() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        header = TransferHeader(RUN, 0, 4, 0, SIZE, "bf16", bytes(16), 0)
        good = a.body(1.0).data.numpy().tobytes() + struct.pack(">HqHd", 0, -1, 0, 1.0)
        older, newer = Stalled(good, 1000), Stalled(good, 500)
        receive = b.letters.receive
        first = asyncio.create_task(receive(A.peer_id, header, older))  # type: ignore[arg-type]
        await older.stands.wait()
        second = asyncio.create_task(receive(A.peer_id, header, newer))  # type: ignore[arg-type]
        await newer.stands.wait()
        older.go_on.set()
        with pytest.raises(RemoteRefused) as error:
            await first
        assert error.value.code == "late"
        assert b.broken == 0  # what has begun to come is still coming
        newer.go_on.set()
        await second
        assert len(b.arrived) == 1


def test_a_letter_that_hardly_moves_makes_way_where_there_is_no_room() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        header = TransferHeader(RUN, 0, 4, 0, SIZE, "bf16", bytes(16), 0)
        slow = Stalled(bytes(b.letters.largest), 1000)
        receive = b.letters.receive
        coming = asyncio.create_task(receive(A.peer_id, header, slow))  # type: ignore[arg-type]
        await slow.stands.wait()
        with pytest.raises(RemoteRefused, match="no room"):
            await c.send(B, 1.0)
        await asyncio.sleep(10.1)
        await c.send(B, 1.0)
        slow.go_on.set()
        with pytest.raises(RemoteRefused) as error:
            await coming
        assert error.value.code == "late"
        assert [letter.stamp.sender for letter in b.arrived] == [C.peer_id]

    with_boxes(test, room=1, longest=lambda: 10.0)


def test_who_leaves_takes_in_what_is_arriving_and_then_nothing_more() -> None:
    """What its sender hears of a letter is what became of it, whatever came when."""

    async def test(a: Box, b: Box, c: Box) -> None:
        receive = b.letters.receive
        name, other = bytes(16), bytes(15) + b"o"
        header = TransferHeader(RUN, 0, 4, 0, SIZE, "bf16", name, 0)
        body = a.body(1.0).data.numpy().tobytes() + struct.pack(">HqHd", 0, -1, 0, 1.0)
        coming = Stalled(body, 1000)
        first = asyncio.create_task(receive(A.peer_id, header, coming))  # type: ignore[arg-type]
        await coming.stands.wait()
        waiting = asyncio.create_task(b.letters.last())
        await asyncio.sleep(1.0)
        assert not waiting.done()
        with pytest.raises(RemoteRefused) as error:
            await c.send(B, 1.0)
        assert error.value.code == "full"
        coming.go_on.set()
        await first
        await asyncio.wait_for(waiting, 1.0)
        assert [letter.stamp.sender for letter in b.arrived] == [A.peer_id]

        b.letters._closing = False  # one that comes too slowly, and one that is about to be begun
        slow, late = Stalled(body, 1000), Stalled(body, 0)
        tries = [
            asyncio.create_task(receive(sender, header, one))  # type: ignore[arg-type]
            for sender, header, one in (
                (A.peer_id, replace(header, basis=other), slow),
                (C.peer_id, header, late),
            )
        ]
        await slow.stands.wait()
        await late.stands.wait()
        b.letters.close()
        slow.go_on.set()
        late.go_on.set()
        for one in tries:
            with pytest.raises(RemoteRefused) as error:
                await one
            assert error.value.code == "late"  # its sender asks again
        again = Stalled(body, len(body))
        for sender, basis, code in (
            (A.peer_id, name, "again"), (A.peer_id, other, "full"), (C.peer_id, name, "full")
        ):  # fmt: skip
            with pytest.raises(RemoteRefused) as error:
                await receive(sender, replace(header, basis=basis), again)  # type: ignore[arg-type]
            assert error.value.code == code
        assert len(b.arrived) == 1

    with_boxes(test)


def test_a_letter_that_made_way_while_it_was_checked_has_not_come() -> None:
    """Others may have been told so meanwhile: a share would count here and where it came from."""

    async def test(a: Box, b: Box, c: Box) -> None:
        check, checking, go_on = b.letters.wiring.offload, asyncio.Event(), asyncio.Event()

        async def slowly(work: Callable[[], Any]) -> Any:
            checking.set()
            await go_on.wait()
            return await check(work)

        b.letters.wiring = replace(b.letters.wiring, offload=slowly)
        sending = asyncio.create_task(a.send(B, 1.0))
        await checking.wait()
        b.letters.close()
        go_on.set()
        with pytest.raises(RemoteRefused) as error:
            await sending
        assert error.value.code in ("late", "full")
        assert not b.arrived

    with_boxes(test)


def test_of_so_many_peers_the_newest_letter_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "MAX_PEERS", 1)

    async def test(a: Box, b: Box, c: Box) -> None:
        for sender in (a, c, a):
            await sender.send(B, 1.0)
        assert list(b.letters._newest) == [A.peer_id]
        assert len(b.arrived) == 3

    with_boxes(test)
