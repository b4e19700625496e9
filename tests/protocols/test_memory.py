"""The in-memory transport: calls, pushes and pulls, their time, their refusals."""

from __future__ import annotations

import asyncio

import pytest
from memory_kit import MB, PEERS, body, collect, count, echo, join, now, pull, zeros

from protocols.errors import (
    IdentityMismatch,
    LocalProtocolError,
    Malformed,
    RemoteRefused,
    Unreachable,
    Why,
)
from protocols.identity import PeerId
from protocols.memory.transport import Link, MemoryNetwork
from protocols.memory.virtual_time import run
from protocols.transport import Incoming, Outgoing, Transport

NEVER = PeerId("nobody")


def test_it_is_a_transport() -> None:
    transport: Transport = MemoryNetwork().join(PEERS[0])
    assert transport.peer_id == PEERS[0]


# --- the three verbs ----------------------------------------------------------------------------


def test_a_call_takes_the_links_time() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork(link=Link(latency=0.1)))
        seen = []

        async def greet(peer: PeerId, data: bytes) -> bytes:
            seen.append(peer)
            return b"hello " + data

        b.on_call("greet", greet)
        assert await a.call(b.peer_id, "greet", b"you", timeout=5) == b"hello you"
        assert now() == pytest.approx(0.4)  # a round trip to connect and one for the call
        await a.call(b.peer_id, "greet", b"you", timeout=5)
        assert now() == pytest.approx(0.6)  # the connection is there already
        assert seen == [a.peer_id, a.peer_id]
        assert a.stats.peer(b.peer_id).round_trip == pytest.approx(0.2)

    run(main())


def test_the_handlers_time_is_not_the_links() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork(link=Link(latency=0.1)))

        async def slow(peer: PeerId, data: bytes) -> bytes:
            await asyncio.sleep(3)
            return b""

        b.on_call("slow", slow)
        await a.call(b.peer_id, "slow", b"", timeout=5)
        assert a.stats.peer(b.peer_id).round_trip == pytest.approx(0.2)

    run(main())


@pytest.mark.parametrize("size", [0, 1, 99_999, 100_000, 2 * MB + 7])
def test_bodies_arrive_whole(size: int) -> None:
    data = bytes(i * 31 % 251 for i in range(size))

    async def main() -> None:
        network = MemoryNetwork(
            seed=3,
            link=Link(latency=0.02, jitter=0.05, loss=0.02),
            upload=10 * MB,
            download=10 * MB,
        )
        a, b = join(network)
        b.on_push("take", collect, max_length=size)

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            assert header == b""
            return body(data)

        b.on_pull("give", give)
        assert await a.push(b.peer_id, "take", b"h", body(data), timeout=5) == data
        assert await pull(a, b.peer_id, "give") == data

    run(main())


def test_it_runs_on_an_ordinary_loop() -> None:
    async def main() -> bytes:
        a, b = join(MemoryNetwork(link=Link(latency=0.001)))
        b.on_call("echo", echo)
        b.on_push("take", collect, max_length=1000)
        assert await a.push(b.peer_id, "take", b"", body(b"x" * 1000), timeout=5) == b"x" * 1000
        return await a.call(b.peer_id, "echo", b"real time", timeout=5)

    assert asyncio.run(main()) == b"real time"


def test_statistics_count_bodies_by_name() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())
        b.on_call("echo", echo)
        b.on_push("take", count, max_length=MB)

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            return zeros(300_000)

        b.on_pull("give", give)
        await a.call(b.peer_id, "echo", b"12345", timeout=5)
        await a.push(b.peer_id, "take", b"head", zeros(500_000), timeout=5)
        await pull(a, b.peer_id, "give")
        assert a.stats.out_by_name == {"echo": 5, "take": 500_004, "give": 0}
        assert b.stats.in_by_name == a.stats.out_by_name
        assert b.stats.out_by_name == {"echo": 5, "take": 6, "give": 300_000}
        assert a.stats.in_by_name == b.stats.out_by_name
        assert b.stats.requests_by_name == {"echo": 1, "take": 1, "give": 1}
        assert b.stats.peer(a.peer_id).bytes_in == 500_009

    run(main())


# --- refusals -----------------------------------------------------------------------------------


def test_what_handlers_raise_reaches_the_caller() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())

        async def malformed(peer: PeerId, data: bytes) -> bytes:
            raise Malformed("seven bytes too many")

        async def own(peer: PeerId, data: bytes) -> bytes:
            raise RemoteRefused("busy", "later")

        b.on_call("malformed", malformed)
        b.on_call("own", own)
        b.on_call("small", echo, max_body=10)
        b.on_push("small", collect, max_length=10)
        for name, code in [
            ("malformed", "protocol"), ("own", "busy"), ("none", "unknown"), ("small", "too_large"),
        ]:  # fmt: skip
            with pytest.raises(RemoteRefused) as refused:
                await a.call(b.peer_id, name, b"x" * 11, timeout=5)
            assert refused.value.code == code
        with pytest.raises(RemoteRefused, match="too_large"):
            await a.push(b.peer_id, "small", b"", zeros(10 * MB), timeout=5)
        with pytest.raises(RemoteRefused, match="unknown"):
            await a.push(b.peer_id, "none", b"", zeros(10 * MB), timeout=5)
        with pytest.raises(RemoteRefused, match="unknown"):
            await pull(a, b.peer_id, "none")
        assert b.stats.refused_requests == 7

    run(main())


def test_a_bug_in_a_handler_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())

        async def broken(peer: PeerId, data: bytes) -> bytes:
            raise ValueError("secret")

        b.on_call("broken", broken)
        with pytest.raises(RemoteRefused) as refused:
            await a.call(b.peer_id, "broken", b"", timeout=5)
        assert "secret" not in str(refused.value)

    run(main())
    assert "secret" in caplog.text


def test_bounds_of_the_one_who_asks() -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())
        b.on_call("echo", echo)

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            return zeros(1001)

        b.on_pull("give", give)
        with pytest.raises(RemoteRefused, match="too_large"):
            await a.call(b.peer_id, "echo", b"x" * 101, timeout=5, max_reply=100)
        with pytest.raises(RemoteRefused, match="too_large"):
            await pull(a, b.peer_id, "give", limit=1000)
        with pytest.raises(LocalProtocolError):
            await a.push(b.peer_id, "x", b"h" * 70_000, zeros(1), timeout=5)

    run(main())


@pytest.mark.parametrize(("announced", "sent"), [(10, 9), (10, 11), (0, 1)])
def test_a_body_of_another_length_is_our_bug(announced: int, sent: int) -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())
        got = []

        async def take(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
            async for chunk in incoming:
                got.append(len(chunk))
            return b"never"

        b.on_push("take", take, max_length=100)
        wrong = Outgoing(announced, body(b"x" * sent).chunks)
        with pytest.raises(LocalProtocolError):
            await a.push(b.peer_id, "take", b"", wrong, timeout=5)

    run(main())


def test_a_pulled_body_that_breaks_off_resets(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        a, b = join(MemoryNetwork())

        async def give(peer: PeerId, header: bytes) -> Outgoing:
            return Outgoing(100, body(b"x" * 40).chunks)

        b.on_pull("give", give)
        with pytest.raises(Unreachable) as broken:
            await pull(a, b.peer_id, "give")
        assert broken.value.why is Why.RESET

    run(main())
    assert "broke off" in caplog.text


# --- addresses ----------------------------------------------------------------------------------


def test_dialling_finds_out_who_answers() -> None:
    async def main() -> None:
        network = MemoryNetwork()
        a, b, c = join(network, 3)
        assert await a.dial(b.address) == b.peer_id
        assert await a.dial(b.address, b.peer_id) == b.peer_id
        with pytest.raises(IdentityMismatch) as wrong:
            await a.dial(b.address, c.peer_id)
        assert wrong.value.got == b.peer_id
        with pytest.raises(Unreachable) as refused:
            await a.dial("10.200.0.1:4390")
        assert refused.value.why is Why.REFUSED
        with pytest.raises(Unreachable) as unknown:
            await a.call(NEVER, "echo", b"", timeout=1)
        assert unknown.value.why is Why.NO_ADDRESS
        with pytest.raises(Unreachable) as myself:
            await a.call(a.peer_id, "echo", b"", timeout=1)
        assert myself.value.why is Why.SELF

    run(main())
