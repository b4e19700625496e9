"""How much a relay, and a node that waits at one, do for strangers; nothing is really dialled."""

from __future__ import annotations

import asyncio
import math
import socket
from typing import Any

import pytest
from http_kit import QUICK, A, B, C

from protocols.address_book import AddressBook
from protocols.connections.names import Names
from protocols.errors import RemoteRefused, TransportError
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time
from protocols.relay.client import Relays
from protocols.relay.server import BRIEF_S, HOLD_S, MAX_CIRCUITS_OF_ONE, RelayServer, _Circuit
from protocols.relay.wire import (
    MAX_CALLS,
    MAX_CALLS_OF_ONE,
    RelayCall,
    RelayCalls,
    RelayDial,
    RelayWait,
)
from protocols.stats import TransportStats
from protocols.tasks import beside

D, E = (Identity.from_seed(bytes([n]) * 32) for n in (4, 5))


def server(rate: float = 1e6) -> tuple[RelayServer, list[float]]:
    clock = [0.0]
    made = RelayServer(TransportStats(), now=lambda: clock[0])
    made.offer(rate)
    return made, clock


async def begin(relay: RelayServer, peer: PeerId) -> None:
    await relay.wait(peer, RelayWait(begin=True).encode())


async def test_a_node_that_does_not_ask_again_is_gone() -> None:
    relay, clock = server()
    await begin(relay, B.peer_id)
    clock[0] = 7
    await relay.dial(C.peer_id, RelayDial(B.peer_id, b"", (), False).encode())
    clock[0] = 9
    with pytest.raises(RemoteRefused, match="absent"):
        await relay.dial(C.peer_id, RelayDial(B.peer_id, b"", (), False).encode())


@pytest.mark.parametrize("ends", ["breaks", "by time"])
def test_a_question_asked_once_more_outlives_the_first_whose_connection_has_broken(
    ends: str,
) -> None:
    """As where a pooled connection was reset: the relay may notice that only after the second."""

    async def main() -> None:
        relay = RelayServer(TransportStats(), now=asyncio.get_running_loop().time)
        await begin(relay, B.peer_id)
        asked = RelayWait(begin=False).encode()
        first = asyncio.ensure_future(relay.wait(B.peer_id, asked))
        await asyncio.sleep(HOLD_S - 1.0)
        second = asyncio.ensure_future(relay.wait(B.peer_id, asked))
        await asyncio.sleep(0.5)
        if ends == "breaks":
            first.cancel()
        await asyncio.sleep(BRIEF_S + 1.0)
        assert first.done()
        call = RelayCall(C.peer_id, b"t" * 16, ())
        relay.tell(B.peer_id, call)
        assert RelayCalls.decode(await second).calls == (call,)

    virtual_time.run(main())


async def test_calls_are_told_to_the_newest_question_alone() -> None:
    relay, _ = server()
    await begin(relay, B.peer_id)
    call = RelayCall(C.peer_id, b"t" * 16, ())
    asked = RelayWait(begin=False).encode()
    async with beside(relay.wait(B.peer_id, asked)):  # whose connection has broken
        await asyncio.sleep(0)
        second = asyncio.ensure_future(relay.wait(B.peer_id, asked))
        await asyncio.sleep(0)
        relay.tell(B.peer_id, call)
        relay.tell(B.peer_id, call)
        assert RelayCalls.decode(await second).calls == (call, call)


async def test_one_place_does_not_take_all_of_a_relay(monkeypatch: pytest.MonkeyPatch) -> None:
    relay, _ = server()
    monkeypatch.setattr("protocols.relay.server.MAX_WAITING_OF_ONE", 1)
    places = {B.peer_id: "one", C.peer_id: "one", D.peer_id: "another"}
    relay.place_of = lambda peer: places.get(peer, "")
    await begin(relay, B.peer_id)
    await begin(relay, B.peer_id)  # again
    with pytest.raises(RemoteRefused, match="from one"):
        await begin(relay, C.peer_id)
    await begin(relay, D.peer_id)
    for waits in (B, D):
        await relay.dial(A.peer_id, RelayDial(waits.peer_id, b"", (), False).encode())
    with pytest.raises(RemoteRefused, match="absent"):
        await relay.dial(A.peer_id, RelayDial(C.peer_id, b"", (), False).encode())


async def test_places_calls_and_circuits_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    relay, clock = server()
    monkeypatch.setattr("protocols.relay.server.MAX_WAITING", 2)
    await begin(relay, B.peer_id)
    await begin(relay, D.peer_id)
    with pytest.raises(RemoteRefused, match="full"):
        await begin(relay, A.peer_id)
    await begin(relay, B.peer_id)  # who is there already may begin anew
    calls = [RelayCall(caller.peer_id, b"t" * 16, ()) for caller in (C, D)]
    for call in calls:
        for _ in range(MAX_CALLS_OF_ONE):
            relay.tell(B.peer_id, call)
        if call is calls[0]:  # the others are heard all the same
            with pytest.raises(RemoteRefused, match="your last calls"):
                relay.tell(B.peer_id, call)
    assert 2 * MAX_CALLS_OF_ONE == MAX_CALLS
    with pytest.raises(RemoteRefused, match="its last calls"):
        relay.tell(B.peer_id, RelayCall(A.peer_id, b"t" * 16, ()))
    answer: RelayCalls = RelayCalls.decode(
        await relay.wait(B.peer_id, RelayWait(begin=False).encode())
    )
    assert answer.calls == tuple(call for call in calls for _ in range(MAX_CALLS_OF_ONE))
    for number in range(MAX_CIRCUITS_OF_ONE):
        await relay.dial(C.peer_id, RelayDial(B.peer_id, b"", (), False).encode())
        if number % MAX_CALLS_OF_ONE == MAX_CALLS_OF_ONE - 1:
            await relay.wait(B.peer_id, RelayWait(begin=False).encode())
    with pytest.raises(RemoteRefused, match="of one peer"):
        await relay.dial(C.peer_id, RelayDial(B.peer_id, b"", (), False).encode())
    clock[0] = 2
    await begin(relay, D.peer_id)
    clock[0] = 4
    await begin(relay, D.peer_id)
    clock[0] = 11  # nobody came for them
    await relay.dial(C.peer_id, RelayDial(D.peer_id, b"", (), False).encode())


async def test_connections_of_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each caller keeps to its own bound, and there may be any number of them."""
    relay, clock = server()
    monkeypatch.setattr("protocols.relay.server.MAX_CIRCUITS", 2)
    for hidden in (B, D, E):
        await begin(relay, hidden.peer_id)
    for caller, hidden in ((A, B), (C, D)):
        await relay.dial(caller.peer_id, RelayDial(hidden.peer_id, b"", (), False).encode())
    stranger = Identity.from_seed(b"s" * 32).peer_id
    with pytest.raises(RemoteRefused, match="2 connections are carried already"):
        await relay.dial(stranger, RelayDial(E.peer_id, b"", (), False).encode())
    clock[0] = 11  # nobody came for them
    await begin(relay, E.peer_id)
    await relay.dial(stranger, RelayDial(E.peer_id, b"", (), False).encode())


async def test_who_makes_keys_takes_no_relay_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has most connections, by key or by address, gives up the longest quiet of them."""
    relay, clock = server()
    monkeypatch.setattr("protocols.relay.server.MAX_CIRCUITS", 6)
    keys = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(10, 16)]
    relay.place_of = lambda peer: "evil" if peer in keys else peer[-8:]
    hidden = B.peer_id
    await begin(relay, hidden)

    async def carried(caller: PeerId, target: PeerId = hidden) -> _Circuit:
        before = set(relay._circuits)
        await begin(relay, target)
        await relay.dial(caller, RelayDial(target, b"", (), False).encode())
        (new,) = relay._circuits - before
        new.met.set()  # as when both have come
        new.until, new.moved = math.inf, clock[0]
        return new

    honest = [await carried(one.peer_id, D.peer_id) for one in (A, C)]
    clock[0] = 5
    evil = [await carried(key, keys[5]) for key in keys[:4]]
    with pytest.raises(RemoteRefused, match="6 connections are carried already"):
        await carried(E.peer_id)  # something has just moved on each
    clock[0] = 20
    evil[0].moved, evil[1].moved, evil[2].moved = 19, 7, 6  # the last one 5
    honest += [await carried(E.peer_id)]
    assert relay._circuits == {*honest, *evil[:3]}
    clock[0] = 40
    evil += [await carried(keys[4], keys[5])]
    assert relay._circuits == {*honest, evil[0], evil[1], evil[4]}, (
        "its own makes way, and no other"
    )


async def test_calls_of_many_that_lead_nowhere_are_bounded_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Names cost nothing: each of a thousand callers would keep to its own bound."""
    dialled: list[str] = []

    async def nobody(names: Names, address: str, whose: str, **how: Any) -> socket.socket:
        dialled.append(address)
        raise OSError("nobody is there")

    def told(*hosts: str) -> bytes:
        callers = [Identity.from_seed(host.encode() * 32).peer_id for host in hosts]
        calls = zip(callers, hosts, strict=True)
        return RelayCalls(
            0.0, tuple(RelayCall(peer, bytes(16), (f"{host}:1",)) for peer, host in calls)
        ).encode()

    answers = iter([told(*"abcde"), told(*"fghij")])

    async def relay(*_: object, **__: object) -> bytes:
        if opening := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(opening)  # there is room again
        if answer := next(answers, None):
            return answer
        raise TransportError("it is gone")

    monkeypatch.setattr("protocols.relay.client.MAX_ANSWERING", 3)
    monkeypatch.setattr("protocols.connections.names.Names.connected", nobody)
    hidden = Relays(
        B.peer_id,
        relay,
        RelayServer(TransportStats()),
        book=AddressBook(),
        names=Names(),
        limits=QUICK,
        serve=lambda sock, peer: None,
        mine=list,
    )
    with pytest.raises(TransportError, match="gone"):
        await hidden.attend(A.peer_id, "a:1")
    assert dialled == ["a:1", "b:1", "c:1", "f:1", "g:1", "h:1"]


async def test_a_relay_takes_half_of_a_slow_link_at_the_most() -> None:
    async with HttpTransport(A) as transport:
        link, relay = transport._reactor.pacer, transport.relay
        relay.offer(2.5e6)
        for speed, carried in ((None, 2.5e6), (1.6e6, 0.8e6), (1e9, 2.5e6), (0.7e6, 0.35e6)):
            link.speed = speed
            relay._moved(1)
            assert relay._bucket.take(1 << 20) == carried * 0.005  # seconds of a grant
            link.speed = 1e9
            relay._moved(1)
            await asyncio.sleep(relay._bucket.wait())
