"""Host 0 of an island with hosts that the test plays; no processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import pytest

import node.hosts.hub
import node.hosts.wire
from node import __version__
from node.hosts.hub import Hub
from node.hosts.meeting import Meeting
from node.hosts.wire import (
    Challenge,
    Hello,
    HostConnection,
    Job,
    Prepared,
    Welcome,
    nonce,
    proof,
    proven,
    signed,
)

WAIT_S = 20.0
JOB = Job(b"{}", b"shard", b"", "", bytes(32))


def quicken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence and the waits for hosts take moments."""
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
            await other.connection.flush(1.0)
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

    def __init__(self, connection: HostConnection) -> None:
        self.connection = connection
        self.all.append(self)

    @classmethod
    async def dial(cls, made: Hub) -> Other:
        return cls(HostConnection(*await asyncio.open_connection("127.0.0.1", made.port)))

    async def greet(self, number: int = 1, key: str = "k", **changes: Any) -> Any:
        challenge = await self.connection.receive()
        assert isinstance(challenge, Challenge)
        mine = nonce()
        whole = signed(challenge.nonce, mine, number)
        values = {"version": __version__, "name": "other", "ranks": 2, "device": "cpu"}
        values |= {"process": b"its only one"} | changes
        self.connection.send(
            Hello(host=number, nonce=mine, proof=proof(key, b"hello", *whole), **values)
        )
        answer = await self.connection.receive()
        if isinstance(answer, Welcome):
            assert proven(key, answer.proof, b"welcome", *whole)
            self.connection.admit()
        return answer

    async def receive(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(WAIT_S):
            word = await self.connection.receive()
        assert isinstance(word, kind), word
        return word


@asynccontextmanager
async def alive(other: Other) -> AsyncIterator[None]:
    watching = asyncio.ensure_future(other.connection.watch())
    yield
    watching.cancel()
    await asyncio.wait((watching,))


async def ready(made: Hub, number: int = 1, **changes: Any) -> Other:
    other = await Other.dial(made)
    assert isinstance(await other.greet(number, **changes), Welcome)
    await other.receive(Job)
    other.connection.send(Prepared())
    return other
