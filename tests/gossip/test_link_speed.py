"""How fast this node's own link is: what transfers show together, and the operator's limit."""

from __future__ import annotations

import asyncio
import os
import time
from types import SimpleNamespace
from typing import Any

import pytest
from http_kit import QUICK, A, B, address

from node.config import resolve
from node.reports.links import own_speeds
from protocols.bodies import BufferDrain, BufferFeed
from protocols.errors import OperatorError
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.stats import Meter, TransportStats
from protocols.transport import Incoming


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of this machine as if there were a link between them."""
    monkeypatch.setattr("protocols.lanes.lane.same_machine", lambda sock: False)


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Meter:
    """To which bodies of 50 bytes are long ones."""
    monkeypatch.setattr("protocols.stats.LONG_BYTES", 50)
    return Meter()


def test_transfers_at_once_share_a_link(meter: Meter) -> None:
    assert meter.read() is None
    meter.note(10.0, 4.0, 400)  # from 6 to 10
    meter.note(10.0, 4.0, 400)
    meter.note(11.0, 2.0, 100)  # half of it beside the others
    assert meter.read() == pytest.approx((400 + 400 + 50) / 4)


def test_short_bodies_show_that_a_link_is_faster_and_never_that_it_is_slower(
    meter: Meter,
) -> None:
    meter.note(1.0, 1.0, 40)  # waited perhaps
    assert meter.read() == 40  # but so much at least
    meter.note(3.0, 1.0, 30)
    assert meter.read() == 40
    meter.note(5.0, 0.1, 30)
    assert meter.read() == pytest.approx(300)
    meter.note(7.0, 1.0, 60)  # a long one: that is what the link gives
    meter.note(8.0, 1.0, 20)
    assert meter.read() == 60


def test_short_bodies_at_once_are_as_good_as_a_long_one(meter: Meter) -> None:
    meter.note(1.0, 1.0, 1000)
    assert meter.read() == 1000
    for _ in range(3):
        meter.note(3.0, 1.0, 20)
    assert meter.read() == 60


def test_what_windows_say_counts_while_there_are_new_ones(meter: Meter) -> None:
    speed, windows = 100.0, 3
    meter.link = lambda: (speed, windows)
    meter.note(1.0, 0.1, 40)
    assert meter.read() == 100.0  # it has just been measured
    meter.note(3.0, 0.1, 40)
    assert meter.read() == pytest.approx(400.0)  # short ones have shown more since
    meter.note(5.0, 1.0, 60)
    assert meter.read() == pytest.approx(400.0)  # it may have been paced at what was known before
    windows += 1
    assert meter.read() == 100.0
    speed = 500.0  # by what short bodies have shown: see protocols.lanes.pacing
    assert meter.read() == 500.0


async def test_a_short_body_that_lay_here_is_not_taken_for_a_fast_link(
    linked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the kernel while the handler does other things, here for 100 s, and read at once."""
    size, busy = 20_000, [0.0]
    clock = SimpleNamespace(perf_counter=lambda: time.perf_counter() + busy[0])
    monkeypatch.setattr("protocols.lanes.server.time", clock)
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a,
        HttpTransport(B, limits=QUICK) as b,
    ):
        b.book.add(A.peer_id, address(a))

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            busy[0] += 100.0
            await body.into(BufferDrain(bytearray(size)))
            return b""

        a.on_push("take", take, max_length=size)
        await b.push(A.peer_id, "take", b"", BufferFeed(bytes(size)), timeout=5)
        received = a.stats.download.read()
        assert received is not None
        assert received <= size / 100.0


def test_a_slower_link_shows_at_once_and_a_faster_one_by_and_by(meter: Meter) -> None:
    meter.note(1.0, 1.0, 1000)
    assert meter.read() == 1000
    assert meter.read() == 1000  # nothing new
    meter.note(9.0, 1.0, 50)
    assert meter.read() == 50
    meter.note(12.0, 1.0, 1000)
    assert meter.read() == 525
    meter.note(14.0, 1.0, 10)  # to a slow peer: one fast transfer shows what the link can
    meter.note(16.0, 1.0, 1000)
    assert meter.read() == pytest.approx(762.5)


async def test_what_an_upload_limit_leaves_is_measured(linked: None) -> None:
    rate, size = 4e6, 1_000_000
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a,
        HttpTransport(B, limits=QUICK, max_upload=rate) as b,
    ):
        b.book.add(A.peer_id, address(a))

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            await body.into(BufferDrain(bytearray(size)))
            return b""

        a.on_push("take", take, max_length=size)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                feed = BufferFeed(os.urandom(size))  # which nothing packs
                group.create_task(b.push(A.peer_id, "take", b"", feed, timeout=5))
        had = 3 * size / (time.monotonic() - began)  # the limit, but where the machine stood still
        sent, received = b.stats.upload.read(), a.stats.download.read()
        assert sent is not None
        assert received is not None
        # together they had the whole limit, though each alone had a third of it
        assert 0.75 * had < sent < 1.3 * rate
        assert 0.75 * had < received < 1.3 * rate
        assert (b.stats.peer(A.peer_id).upload or 0.0) < 0.6 * rate


async def test_what_is_carried_for_others_is_part_of_what_the_link_carries(
    linked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own bodies pay for that: were it not counted they would get slower and slower."""
    size, carried = 1_000_000, 400_000
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a,
        HttpTransport(B, limits=QUICK, max_upload=4e6) as b,
    ):
        b.book.add(A.peer_id, address(a))
        arrived: list[float] = []
        real = b._reactor.pacer.note

        def note(now: float, count: int, *facts: Any, **more: Any) -> None:
            arrived.append(count)
            real(now, count, *facts, **more)

        monkeypatch.setattr(b._reactor.pacer, "note", note)

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            began = time.monotonic()
            b.relay._moved(carried)
            await body.into(BufferDrain(bytearray(size)))
            assert time.monotonic() - began > 0.8 * (size + carried) / 4e6
            return b""

        a.on_push("take", take, max_length=size)
        await b.push(A.peer_id, "take", b"", BufferFeed(os.urandom(size)), timeout=5)
        assert max(arrived) > size + carried / 4


async def test_what_stays_on_a_machine_says_nothing_of_its_link() -> None:
    size = 1_000_000
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as a,
        HttpTransport(B, limits=QUICK) as b,
    ):
        b.book.add(A.peer_id, address(a))

        async def take(peer: PeerId, header: bytes, body: Incoming) -> bytes:
            await body.into(BufferDrain(bytearray(size)))
            return b""

        a.on_push("take", take, max_length=size)
        await b.push(A.peer_id, "take", b"", BufferFeed(bytes(size)), timeout=5)
        assert (b.stats.upload.read(), a.stats.download.read()) == (None, None)
        assert b.stats.peer(A.peer_id).upload  # which the matrix of links shows


@pytest.mark.parametrize(
    ("limit", "measured", "announced"),
    [(0.0, None, 0.0), (0.0, 3e6, 3e6), (2e6, None, 2e6), (2e6, 3e6, 2e6), (2e6, 1e6, 1e6)],
)
def test_no_more_is_announced_than_the_limit(
    limit: float, measured: float | None, announced: float
) -> None:
    stats = TransportStats()
    if measured is not None:
        stats.upload.note(1.0, 1.0, int(measured))
    for index, seconds in enumerate((0.2, 0.01, 0.03)):
        stats.measured_call(PeerId(f"peer {index}"), seconds)
    said = own_speeds(stats, limit)
    assert said == {"upload": announced, "download": 0.0, "round_trip": 0.03}


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("20Mbit", 2.5e6),
        ("20 mbit/s", 2.5e6),
        ("20Mbps", 2.5e6),
        ("20Mb", 2.5e6),
        ("2.5MB", 2.5e6),
        ("2.5 MB/s", 2.5e6),
        ("2500000", 2.5e6),
        ("1Gbit", 1.25e8),
        ("800k", 8e5),
        ("40kbit", 5e3),
        ("0", 0.0),
    ],
)
def test_a_limit_as_people_write_it(text: str, bytes_s: float) -> None:
    assert resolve({"max_upload": text}, {}).max_upload == pytest.approx(bytes_s)
    assert resolve({}, {"ATOLL_MAX_UPLOAD": text}).max_upload == pytest.approx(bytes_s)


@pytest.mark.parametrize(
    "text", ["fast", "-3MB", "20 apples", "", "1e400", "39kbit", "20MBit per s"]
)
def test_what_is_no_speed_is_refused_by_name(text: str) -> None:
    with pytest.raises(OperatorError) as error:
        resolve({"max_upload": text}, {})
    assert error.value.code == "E204"
    assert "max_upload" in error.value.why
    assert "--max-upload" in error.value.why
    assert "20Mbit" in error.value.why or "40kbit" in error.value.why


def test_a_settings_file_may_have_either_form(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "node.toml"
    file.write_text('max_upload = "20Mbit"\n')
    assert resolve({}, {}, file).max_upload == 2.5e6
    file.write_text("max_upload = 2500000\n")
    assert resolve({}, {}, file).max_upload == 2.5e6
