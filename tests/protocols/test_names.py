"""Names that peers have told, under name servers that do not answer."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from address_kit import named
from http_kit import QUICK, A, B, C, address, echo, take, two, wait_for
from test_relay import place

from protocols.addresses import relay_address
from protocols.bodies import BufferFeed
from protocols.connections.names import MOST, MOST_OF_ONE, Names
from protocols.errors import IdentityMismatch, Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.identity import Identity
from protocols.relay.wire import RelayDial

MANY = 40  # more than threads of the event loop's own pool
LIMITS = replace(QUICK, connect=0.5)


class Resolver:
    """Names under ``.slow`` are not answered until :meth:`answer`; ``asked``: all that were."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._answered = threading.Event()
        self._real = socket.getaddrinfo

    def __call__(self, host: str, *rest: Any, **named: Any) -> Any:
        if host == "127.0.0.1" or named.get("flags", 0) & socket.AI_NUMERICHOST:
            return self._real(host, *rest, **named)
        self.asked.append(host)
        if host.endswith(".slow"):
            assert self._answered.wait(30)
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return self._real("127.0.0.1", *rest, **named)

    def answer(self) -> None:
        self._answered.set()


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr("socket.getaddrinfo", made)
    yield made
    made.answer()


async def test_names_that_are_not_answered_hold_up_nothing_else(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "protocols.connections.same_machine._AVAILABLE", False
    )  # lanes are dialled, too
    async with two() as (a, b):
        a.on_push("take", take, max_length=100)

        async def in_vain(number: int) -> None:
            peer = Identity.generate().peer_id
            b.book.add(peer, f"{number}.slow:1")
            with pytest.raises(Unreachable) as error:
                await (
                    b.push(peer, "take", b"", BufferFeed(b"x"), timeout=60)
                    if number % 2
                    else b.call(peer, "echo", b"", timeout=60)
                )
            assert error.value.why in (Why.DNS, Why.TIMEOUT)

        async with asyncio.TaskGroup() as group:
            for number in range(MANY):
                group.create_task(in_vain(number))
            await wait_for(lambda: len(resolver.asked) == MOST)
            assert await b.push(a.peer_id, "take", b"", BufferFeed(b"x"), timeout=3) == b"1"
            await asyncio.wait_for(asyncio.to_thread(int), 3)
            assert b.book.has_worked(a.peer_id, address(a))
            resolver.answer()


async def test_one_peers_names_leave_room_for_anothers(resolver: Resolver) -> None:
    names = Names()
    slow = [asyncio.create_task(names.places(f"{n}.slow", 1, "one")) for n in range(MANY)]
    try:
        await wait_for(lambda: len(resolver.asked) >= MOST_OF_ONE)
        places = await names.places("quick.name", 4390, "another")
        assert [place[4] for place in places] == [("127.0.0.1", 4390)]
        assert len(resolver.asked) == MOST_OF_ONE + 1
        resolver.answer()  # the others have their turn
        for failed in await asyncio.gather(*slow, return_exceptions=True):
            assert isinstance(failed, socket.gaierror)
        assert len(resolver.asked) == MANY + 1
        assert not names._under_way
        assert not names._looking
    finally:
        for task in slow:
            task.cancel()


async def test_a_name_is_looked_up_once_for_all_who_want_it(resolver: Resolver) -> None:
    names = Names()
    wanted = [asyncio.create_task(names.places("a.slow", 1, who)) for who in "abcdef"]
    await wait_for(lambda: bool(resolver.asked))
    wanted.pop().cancel()  # which is nothing to the others
    resolver.answer()
    for failed in await asyncio.gather(*wanted, return_exceptions=True):
        assert isinstance(failed, socket.gaierror)
    assert resolver.asked == ["a.slow"]


async def test_names_to_dial_back_count_as_the_callers(resolver: Resolver) -> None:
    async with place(limits=LIMITS) as here:
        here.closed.book.add(here.relay.peer_id, address(here.relay))
        for number in range(16):
            asked = RelayDial(here.hidden.peer_id, bytes(16), (f"{number}.slow:1",), False)
            await here.closed.call(here.relay.peer_id, "relay-dial", asked.encode(), timeout=5)
        await wait_for(lambda: len(resolver.asked) == MOST_OF_ONE)
        assert await here.open.call(here.hidden.peer_id, "echo", b"x", timeout=5) == b"x"
        assert len(resolver.asked) == MOST_OF_ONE


async def test_names_of_relays_count_as_those_of_who_waits_there(resolver: Resolver) -> None:
    async with two(LIMITS) as (_, b):
        for number in range(8):
            relay = Identity.generate().peer_id
            b.book.add(C.peer_id, relay_address(f"{number}.slow:1", relay))
        with pytest.raises(Unreachable):
            await b.call(C.peer_id, "echo", b"", timeout=5)
        assert len(resolver.asked) == MOST_OF_ONE


def test_the_end_waits_for_no_name(resolver: Resolver) -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(Names().places("a.slow", 1, "one"), 0.1)

    unanswered = threading.Timer(5, resolver.answer)
    unanswered.start()
    asyncio.run(main())
    assert not resolver._answered.is_set()
    unanswered.cancel()


@pytest.mark.parametrize("first", [0, 1])
async def test_a_name_of_several_machines_leads_to_the_one_that_is_meant(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Name servers give their addresses out in an order that turns."""
    monkeypatch.setattr("protocols.connections.same_machine._AVAILABLE", False)
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=QUICK) as one,
        HttpTransport(B, limits=QUICK) as caller,
    ):
        assert one.listening is not None
        port = one.listening[1]
        async with HttpTransport(C, listen=f"127.0.0.2:{port}", limits=QUICK) as other:
            places = ["127.0.0.1", "127.0.0.2"]
            named(monkeypatch, "seeds.example", *places[first:], *places[:first])
            where = f"seeds.example:{port}"
            met = await caller.dial(where)  # whoever is there
            assert met == (one, other)[first].peer_id
            for node in (one, other):
                node.on_call("echo", echo)
                node.on_push("take", take, max_length=100)
                assert await caller.dial(where, node.peer_id) == node.peer_id
                assert await caller.call(node.peer_id, "echo", b"x", timeout=5) == b"x"
                taken = await caller.push(node.peer_id, "take", b"", BufferFeed(b"x"), timeout=5)
                assert taken == b"1"
                assert caller.book.has_worked(node.peer_id, where)
            nobody = Identity.generate().peer_id
            with pytest.raises(IdentityMismatch) as wrong:
                await caller.dial(where, nobody)
            assert wrong.value.got == met
        with pytest.raises(IdentityMismatch):  # one is down, and the other is another
            await caller.dial(where, nobody)


async def test_another_peer_is_told_of_where_the_next_address_is_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with (
        HttpTransport(A, listen="127.0.0.1:0", limits=LIMITS) as one,
        HttpTransport(B, limits=LIMITS) as caller,
    ):
        assert one.listening is not None
        port = one.listening[1]
        with socket.create_server(("127.0.0.2", port)):  # which accepts, and says nothing
            named(monkeypatch, "seeds.example", "127.0.0.1", "127.0.0.2")
            with pytest.raises(IdentityMismatch):
                await caller.dial(f"seeds.example:{port}", C.peer_id)
