"""The connection between the hosts of an island: greetings, silence, ranks, ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
from trainer_kit import tiny_manifest

import node.hosts.hub
import node.hosts.wire
from node import __version__
from node.config import resolve
from node.errors import operator_error
from node.hosts.helper import Helper
from node.hosts.hub import HOST_LOST, Host, Hub
from node.hosts.meeting import Meeting
from node.hosts.tokens import fingerprint
from node.hosts.wire import (
    Beat,
    Challenge,
    Farewell,
    Halt,
    Hello,
    Job,
    Launch,
    Link,
    LinkLostError,
    Prepared,
    RankEnded,
    Welcome,
    fitting,
    nonce,
    proof,
    proven,
    signed,
)
from protocols.errors import OperatorError

WAIT_S = 20.0
JOB = Job(b"{}", b"shard", b"", "", bytes(32))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node.hosts.wire, "BEAT_S", 0.05)
    monkeypatch.setattr(node.hosts.hub, "LAST_CALL_S", 0.2)
    monkeypatch.setattr(node.hosts.hub, "RESTART_CALL_S", 0.1)


def place(port: int = 0, **changes: Any) -> Meeting:
    values = {"host": 0, "minimum": 2, "maximum": 2, "key": "k", "wait_s": WAIT_S}
    return Meeting(**{"address": "127.0.0.1", "port": port, **values, **changes})


@asynccontextmanager
async def hub(**changes: Any) -> AsyncIterator[tuple[Hub, list[str]]]:
    said: list[str] = []
    made = Hub(place(**changes), "cpu", said.append)
    await made.open()
    try:
        yield made, said
    finally:
        for other in Other.all:
            await other.link.flush(1.0)
        Other.all.clear()
        await made.aclose()


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        while not (found := condition()):  # noqa: ASYNC110 - of another's state
            await asyncio.sleep(0.005)
    return found


class Other:
    """Another host, as the test has it."""

    all: ClassVar[list[Other]] = []  # of the present test

    def __init__(self, link: Link) -> None:
        self.link = link
        self.all.append(self)

    @classmethod
    async def dial(cls, made: Hub) -> Other:
        return cls(Link(*await asyncio.open_connection("127.0.0.1", made.port)))

    async def greet(self, number: int = 1, key: str = "k", **changes: Any) -> Any:
        challenge = await self.link.receive()
        assert isinstance(challenge, Challenge)
        mine = nonce()
        whole = signed(challenge.nonce, mine, number)
        values = {"version": __version__, "name": "other", "ranks": 2, "device": "cpu"} | changes
        self.link.send(Hello(host=number, nonce=mine, proof=proof(key, b"hello", *whole), **values))
        answer = await self.link.receive()
        if isinstance(answer, Welcome):
            assert proven(key, answer.proof, b"welcome", *whole)
            self.link.admit()
        return answer

    async def receive(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(WAIT_S):
            word = await self.link.receive()
        assert isinstance(word, kind), word
        return word


@asynccontextmanager
async def alive(other: Other) -> AsyncIterator[None]:
    watching = asyncio.ensure_future(other.link.watch())
    yield
    watching.cancel()
    await asyncio.wait((watching,))


async def ready(made: Hub, number: int = 1, **changes: Any) -> Other:
    other = await Other.dial(made)
    assert isinstance(await other.greet(number, **changes), Welcome)
    await other.receive(Job)
    other.link.send(Prepared())
    return other


async def test_a_host_comes_prepares_and_runs_ranks() -> None:
    async with hub() as (made, said):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            [host] = await made.muster(again=False)
            assert (host.number, host.ranks, made.grown) == (1, 2, False)
            ranks = made.launch(host, 7, "{}", range(2, 4), "127.0.0.1:5")
            launch = await other.receive(Launch)
            assert (launch.life, launch.first, launch.count) == (7, 2, 2)
            other.link.send(RankEnded(6, 2, 0, 0, "an earlier life", ""))
            other.link.send(RankEnded(7, 2, 0, int(signal.SIGSEGV), "/log", "last words"))
            assert await ranks[0].wait() == -signal.SIGSEGV
            assert (str(ranks[0].log), ranks[0].tail()) == ("/log", "last words")
            ranks[1].signal(signal.SIGTERM)
            assert (await other.receive(Halt)).life == 7
            other.link.send(RankEnded(7, 3, 0, int(signal.SIGKILL), "/log", ""))
            assert await ranks[1].wait() == -signal.SIGKILL
        assert "host 1 (other) of this island is ready: 2 ranks" in said


async def test_a_silent_host_is_lost_and_its_ranks_with_it() -> None:
    async with hub(minimum=1) as (made, said):
        made.offer(JOB)
        other = await ready(made)
        async with alive(other):
            [host] = await made.muster(again=False)
            [rank] = made.launch(host, 1, "{}", range(2, 3), "x:1")
        async with asyncio.timeout(WAIT_S):  # from here on it says nothing
            assert await rank.wait() == HOST_LOST
        assert "no sign of life" in rank.tail()
        assert any("host 1 (other) of this island is lost" in line for line in said)
        assert await made.muster(again=True) == []
        [late] = made.launch(host, 2, "{}", range(2, 3), "x:1")
        assert await late.wait() == HOST_LOST
        back = await ready(made)
        async with alive(back):
            await until(lambda: made.grown)
            assert [h.number for h in await made.muster(again=True)] == [1]
            assert not made.grown


async def test_a_host_that_connects_anew_takes_its_old_place() -> None:
    async with hub() as (made, _):
        made.offer(JOB)
        first = await ready(made)
        async with alive(first):
            [host] = await made.muster(again=False)
            [rank] = made.launch(host, 1, "{}", range(1, 2), "x:1")
            async with alive(await ready(made)):
                assert await rank.wait() == HOST_LOST
                [again] = await made.muster(again=True)
                assert again is not host


async def test_missing_hosts_are_waited_for_and_then_named() -> None:
    async with hub(wait_s=0.3, maximum=3, minimum=3) as (made, said):
        made.offer(JOB)
        async with alive(await ready(made, 2)):
            with pytest.raises(OperatorError) as caught:
                await made.muster(again=False)
    assert caught.value.code == "E409"
    assert "2 of 3 are ready, host 1 is missing" in caught.value.what
    assert any("host 1 is missing (at least 3); 0 s left" in line for line in said)


async def test_with_the_minimum_it_waits_only_a_while() -> None:
    async with hub(maximum=3) as (made, _):
        made.offer(JOB)
        async with alive(await ready(made, 2)):
            assert [host.number for host in await made.muster(again=False)] == [2]
            async with alive(await ready(made, 1)):
                await until(lambda: made.grown)
                assert [host.number for host in await made.muster(again=True)] == [1, 2]


async def test_what_a_host_lacks_ends_the_waiting() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        waiting = asyncio.ensure_future(made.muster(again=False))
        lack = operator_error("E601", "no text here")
        other.link.send(Farewell(lack.code, lack.what, lack.why, lack.fix))
        with pytest.raises(OperatorError, match="cannot take part: no text here"):
            await asyncio.wait_for(waiting, WAIT_S)


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        ({"key": "another"}, "the rendezvous id differs"),
        ({"version": "0.0.0"}, "different versions"),
        ({"number": 2}, "host 2 is not of this island"),
        ({"number": 0}, "host 0 is not of this island"),
        ({"device": "cuda"}, "different devices"),
        ({"number": 2**40}, "is not of this island"),
    ],
)
async def test_who_does_not_belong_here_is_told(greeting: dict[str, Any], text: str) -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        answer = await other.greet(**greeting)
        assert isinstance(answer, Farewell)
        assert answer.code == "E410"
        assert text in answer.what
        assert made.hosts == {}


@pytest.mark.parametrize("said", [b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0\0\0\x01\x90"])
async def test_garbage_ends_a_connection_and_nothing_else(said: bytes) -> None:
    async with hub() as (made, _):
        made.offer(JOB)
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write(said)
        async with asyncio.timeout(WAIT_S):
            while await reader.read(1000):
                continue
        writer.close()
        await writer.wait_closed()
        async with alive(await ready(made)):
            assert len(await made.muster(again=False)) == 1


async def test_a_stranger_may_not_send_large_frames() -> None:
    async with hub() as (made, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", made.port)
        writer.write((1 << 20).to_bytes(4, "big"))
        async with asyncio.timeout(WAIT_S):
            while await reader.read(1000):
                continue
        writer.close()
        await writer.wait_closed()


async def test_beats_are_counted_and_not_told() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        other.link.send(Beat())
        other.link.send(Prepared())
        assert await until(lambda: made.ready)


async def test_a_taken_port_is_told() -> None:
    async with hub() as (made, _):
        second = Hub(place(made.port), "cpu", print)
        with pytest.raises(OperatorError) as caught:
            await second.open()
        assert caught.value.code == "E303"


async def test_why_the_island_ended_is_told_to_all() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        made.say_why(operator_error("E501", "nobody there"))
        closing = asyncio.ensure_future(made.aclose())
        farewell = await other.receive(Farewell)
        assert (farewell.code, farewell.what) == ("E501", "nobody there")
        other.link.close()
        await closing


async def test_an_error_of_any_length_is_told() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        assert isinstance(await other.greet(), Welcome)
        made.say_why(operator_error("E999", why="frame\N{EM DASH}" * 10_000))
        closing = asyncio.ensure_future(made.aclose())
        told = await other.receive(Farewell)
        assert told.code == "E999"
        assert told.why.startswith("frame\N{EM DASH}frame")
        other.link.close()
        await closing


def test_last_words_that_are_no_text_travel() -> None:
    words = (b"\xff" * 4096).decode(errors="replace")  # as RankProcess.tail reads them
    ended = RankEnded(1, 0, 1, 0, "/log", fitting(words))
    assert RankEnded.decode(ended.encode()).tail == words[: len(ended.tail)]
    assert len(ended.tail) > 2000


# --- the other side -------------------------------------------------------------------------------


def helper(tmp_path: Path, port: int, **changes: Any) -> Helper:
    config = resolve({"dir": str(tmp_path), "device": "cpu"}, {})
    return Helper(config, place(port, host=1, **changes))


async def test_without_host_0_a_helper_gives_up(tmp_path: Path) -> None:
    async with hub() as (made, _):
        port = made.port
    with pytest.raises(OperatorError, match="given up after 0 s") as caught:
        await helper(tmp_path, port, wait_s=0.2).main()
    assert caught.value.code == "E409"


async def test_a_helper_with_another_id_is_turned_away(tmp_path: Path) -> None:
    async with hub() as (made, _):
        with pytest.raises(OperatorError, match="rendezvous id"):
            await helper(tmp_path, made.port, key="z").main()


async def test_a_host_0_that_does_not_know_the_id_is_not_followed(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        link = Link(reader, writer)
        link.send(Challenge(nonce()))
        await link.receive()
        link.send(Welcome(bytes(32)))
        with pytest.raises(LinkLostError):
            await link.receive()
        link.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(OperatorError, match="host 0 does not know the rendezvous id"):
            await helper(tmp_path, port).main()


@asynccontextmanager
async def following(tmp_path: Path, port: int) -> AsyncIterator[asyncio.Task[int]]:
    """A helper that follows host 0 until the block ends."""
    running = asyncio.ensure_future(helper(tmp_path, port).main())
    yield running
    running.cancel()
    await asyncio.wait((running,), timeout=WAIT_S)
    assert running.done()


def slow_tokens(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """Making tokens takes so long; the list grows with each time that it is begun."""
    begun: list[str] = []

    def made(*given: Any) -> str:
        begun.append("begun")
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            given[-1](0, 1)  # raises once nobody waits for it
            time.sleep(0.01)
        return str(given[-2])

    monkeypatch.setattr("node.data.supply.tokens_for", made)
    return begun


async def test_making_tokens_takes_longer_than_silence_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(range(256)) * 100)
    begun = slow_tokens(monkeypatch, 4 * node.hosts.wire.SILENT_BEATS * 0.05)
    shown = fingerprint(str(text), 256)
    job = Job(tiny_manifest().model_dump_json().encode(), b"", b"", str(text), shown)
    async with hub() as (made, said):
        made.offer(job)
        async with following(tmp_path, made.port):
            assert len(await asyncio.wait_for(made.muster(again=False), WAIT_S)) == 1
    assert begun == ["begun"]
    assert not [line for line in said if "lost" in line]


async def test_the_end_of_host_0_ends_the_making_of_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = slow_tokens(monkeypatch, 3600.0)
    job = Job(tiny_manifest().model_dump_json().encode(), b"", b"", "x", bytes(32))
    async with hub() as (made, _):
        made.offer(job)
        async with following(tmp_path, made.port) as running:
            await until(lambda: begun)
            await made.aclose()
            assert await asyncio.wait_for(running, WAIT_S) == 0


async def test_other_tokens_than_host_0s_are_refused_on_both_sides(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("\n\n".join(f"paragraph {n} of many others " * 20 for n in range(300)))
    manifest = tiny_manifest()
    job = Job(manifest.model_dump_json().encode(), bytes(17 * 4), b"", str(text), bytes(32))
    async with hub() as (made, _):
        made.offer(job)
        waiting = asyncio.ensure_future(made.muster(again=False))
        with pytest.raises(OperatorError, match="other training tokens") as caught:
            await helper(tmp_path, made.port).main()
        assert caught.value.code == "E410"
        with pytest.raises(OperatorError, match="cannot take part"):
            await asyncio.wait_for(waiting, WAIT_S)


def test_a_fingerprint_tells_tokens_apart(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    data = bytes(range(256)) * 4000
    one.write_bytes(data)
    two.write_bytes(data)
    assert fingerprint(str(one), 256) == fingerprint(str(two), 256)
    two.write_bytes(data[:-1])
    assert fingerprint(str(one), 256) != fingerprint(str(two), 256)
    two.write_bytes(bytes(len(data)))
    assert fingerprint(str(one), 256) != fingerprint(str(two), 256)


async def test_a_link_that_closes_is_told_by_its_reason() -> None:
    async with hub() as (made, _):
        other = await Other.dial(made)
        await other.greet(key="wrong")
        with pytest.raises(LinkLostError, match="closed the connection"):
            await other.link.receive()
        assert Host(1, "n", 1, other.link).shown == "host 1 (n)"
