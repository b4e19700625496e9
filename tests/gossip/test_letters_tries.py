"""Letters that break off, stand still, come twice or are given up."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from letters_kit import RUN, SIZE, A, B, Box, C, with_boxes

from gossip.pairs import letters
from protocols.bodies import BufferFeed
from protocols.codecs import CHUNK
from protocols.errors import Malformed, RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.messages import TransferHeader

GONE, ALSO_GONE = (Identity.from_seed(bytes([n] * 32)).peer_id for n in (8, 9))


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


def test_a_letter_that_is_no_share_may_come_after_a_later_one() -> None:
    """An opening may be given up, and nobody counts which ones have come."""

    async def test(a: Box, b: Box, c: Box) -> None:
        names = [a.letters.name() for _ in range(2)]
        for name in reversed(names):
            await a.send(B, 1.0, name=name)
        assert len(b.arrived) == 2

    with_boxes(test)


def test_who_has_a_letter_says_so_to_a_sender_that_it_does_not_know_any_more() -> None:
    """The word that it came was lost: a share that is taken back then would count twice."""

    async def test(a: Box, b: Box, c: Box) -> None:
        name = a.letters.name()
        await a.send(B, 1.0, name=name)
        b.strangers.add(A.peer_id)
        await a.send(B, 1.0, name=name, again=True)  # raises nothing: it has come
        assert len(b.arrived) == 1
        with pytest.raises(RemoteRefused) as error:
            await a.send(B, 2.0)
        assert error.value.code == "stranger"

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

        async def into(self, drain: Any, *, stall: float, slow: bool) -> None:
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

    async def into(self, drain: Any, *, stall: float, slow: bool) -> None:
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

    with_boxes(test)


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


async def begun(to: Box, sender: PeerId, count: int = 0) -> TransferHeader:
    """A letter of which half came before its sender broke off; ``count`` tells it from others."""
    header = TransferHeader(RUN, 0, 4, 0, SIZE, "bf16", count.to_bytes(16, "big"), 0)
    half = Stalled(bytes(to.letters.largest), to.letters.largest // 2)
    coming = asyncio.create_task(to.letters.receive(sender, header, half))  # type: ignore[arg-type]
    await half.stands.wait()
    coming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await coming
    return header


def here(box: Box, sender: PeerId, header: TransferHeader) -> int:
    """How many elements of a letter its sender need not send again."""
    return TransferHeader.decode(box.letters.reached(sender, header)).done


def test_what_broke_off_makes_way_for_a_share_where_others_wait_to_be_mixed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Senders that are gone never come back for it: shares were refused for as long as a run is.

    But one by a narrow link pauses between its tries, and must not begin again each time.
    """
    monkeypatch.setattr("gossip.pairs.letters.GONE_S", 5.0)

    async def test(a: Box, b: Box, c: Box) -> None:
        gone = {peer: await begun(b, peer) for peer in (GONE, ALSO_GONE)}
        await a.send(B, 0.0)
        with pytest.raises(RemoteRefused, match="room"):
            await c.send(B, 1.0)
        assert all(here(b, peer, header) > 0 for peer, header in gone.items())
        await asyncio.sleep(6.0)
        for value, sender in enumerate((c, a), start=1):
            await sender.send(B, float(value))
        assert len(b.arrived) == 3
        assert [here(b, peer, header) for peer, header in gone.items()] == [0, 0]
        with pytest.raises(RemoteRefused, match="room"):
            await c.send(B, 3.0)

    with_boxes(test, room=3, keep_all=True)


def test_what_broke_off_stays_where_there_would_be_no_room_without_it() -> None:
    async def test(a: Box, b: Box, c: Box) -> None:
        header = await begun(b, A.peer_id)
        for _ in range(2):  # shares that came back
            b.letters.keep(4, b.body(1.0), 1.0)
        with pytest.raises(RemoteRefused, match="room"):
            await c.send(B, 3.0)
        assert here(b, A.peer_id, header) > 0

    with_boxes(test, room=2, keep_all=True)


@pytest.mark.parametrize("keep_all", [False, True])
def test_of_what_broke_off_nothing_is_kept_for_longer_than_a_letter_may_take(
    keep_all: bool,
) -> None:
    """Its memory is a whole letter's; a sender that comes back for it later begins again."""

    async def test(a: Box, b: Box, c: Box) -> None:
        await begun(b, GONE)
        await asyncio.sleep(9.0)
        later = await begun(b, ALSO_GONE)
        assert len(b.letters._arriving) == 2
        await asyncio.sleep(2.0)
        await c.send(B, 1.0)
        assert list(b.letters._arriving) == [ALSO_GONE]
        assert here(b, ALSO_GONE, later) > 0

    with_boxes(test, longest=lambda: 10.0, keep_all=keep_all)


def test_a_letter_goes_on_where_it_broke_off_however_many_tries_it_takes() -> None:
    """A share by a narrow link comes in several, each of which takes the longest that it may."""

    async def test(a: Box, b: Box, c: Box) -> None:
        name = a.letters.name()
        a.letters.wiring.transport.node.upload = 60_000.0  # it takes 23 s
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(10.0):
                    await a.send(B, 1.0, name=name, again=True)
            await asyncio.sleep(5.0)
            await c.send(B, 2.0)
        async with asyncio.timeout(10.0):
            await a.send(B, 1.0, name=name, again=True)
        assert [letter.stamp.sender for letter in b.arrived] == [C.peer_id, C.peer_id, A.peer_id]

    with_boxes(test, longest=lambda: 10.0, keep_all=True)
