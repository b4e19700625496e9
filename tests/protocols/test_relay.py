"""Nodes that nobody can dial: real transports on loopback, of which one is told to nobody."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
from http_kit import QUICK, A, B, C, address, echo, wait_for

from protocols.address_book import AddressBook
from protocols.addresses import is_relayed, relay_address, relay_of
from protocols.bodies import BufferFeed
from protocols.bucket import Bucket
from protocols.connections.names import Names
from protocols.errors import OperatorError, RemoteRefused, TransportError, Unreachable, Why
from protocols.http.transport import HttpTransport
from protocols.identity import Identity, PeerId
from protocols.limits import Limits
from protocols.relay.server import BRIEF_S, MAX_CIRCUITS_OF_ONE
from protocols.relay.splice import splice
from protocols.relay.turns import Turns
from protocols.relay.wire import (
    PREAMBLE,
    RelayDial,
)
from protocols.transport import Incoming

D, E = (Identity.from_seed(bytes([n]) * 32) for n in (4, 5))
MEGABYTE = bytes(range(256)) * 4096


@dataclass
class Place:
    """A hidden node, its relay, one that can be dialled and one more that cannot."""

    relay: HttpTransport
    hidden: HttpTransport
    open: HttpTransport
    closed: HttpTransport
    attending: asyncio.Task[None]

    @property
    def where(self) -> str:
        return relay_address(address(self.relay), self.relay.peer_id)


async def take(peer: PeerId, header: bytes, incoming: Incoming) -> bytes:
    data = b"".join([bytes(piece) async for piece in incoming])
    return len(data).to_bytes(8, "big") + bytes([data == MEGABYTE])


async def give(peer: PeerId, header: bytes) -> BufferFeed:
    return BufferFeed(MEGABYTE)


@asynccontextmanager
async def place(
    rate: float = 1e9,
    *,
    tls: bool = True,
    limits: Limits = QUICK,
    max_upload: float | None = None,
    punch: bool = False,
) -> AsyncIterator[Place]:
    """With ``punch`` hidden nodes meet past the relay, which on loopback they always can."""

    def made(identity: Identity) -> HttpTransport:
        bounds, limit = limits if identity is B else QUICK, max_upload if identity is A else None
        return HttpTransport(
            identity, listen="127.0.0.1:0", limits=bounds, tls=tls, max_upload=limit
        )

    async with made(A) as relay, made(B) as hidden, made(C) as open_, made(D) as closed:
        relay.relay.offer(rate)
        for one in (hidden, closed):
            one.relays.mine, one.relays.punches = list, punch
        for one in (hidden, open_):
            one.on_call("echo", echo)
            one.on_push("take", take, max_length=len(MEGABYTE))
            one.on_pull("give", give)
        hidden.book.add(relay.peer_id, address(relay))
        await hidden.relays.reserve(relay.peer_id)

        async def attend() -> None:
            with suppress(TransportError):  # at the end the relay goes away
                await hidden.relays.attend(relay.peer_id, address(relay))

        attending = asyncio.create_task(attend())
        try:
            here = Place(relay, hidden, open_, closed, attending)
            for one in (relay, open_, closed):
                one.book.add(hidden.peer_id, here.where)
            yield here
        finally:
            attending.cancel()
            await asyncio.gather(attending, return_exceptions=True)


async def everything(caller: HttpTransport, peer: PeerId) -> None:
    """All three verbs."""
    assert await caller.call(peer, "echo", b"hello", timeout=5) == b"hello"
    answer = await caller.push(peer, "take", b"", BufferFeed(MEGABYTE), timeout=5)
    assert answer == len(MEGABYTE).to_bytes(8, "big") + b"\x01"
    async with caller.pull(peer, "give", b"", max_length=len(MEGABYTE), timeout=5) as incoming:
        assert b"".join([bytes(piece) async for piece in incoming]) == MEGABYTE


# --- calls that arrive --------------------------------------------------------------------------


@pytest.mark.parametrize("made_up", ["no address", "", "0.0.0.0:1", "x" * 128, "a.b:70000"])
async def test_an_address_that_is_none_ends_nothing(made_up: str) -> None:
    """The caller says where it can be dialled, and the relay passes it on as it is."""
    async with place() as here:
        asked = RelayDial(here.hidden.peer_id, bytes(16), (made_up,), False)
        here.closed.book.add(here.relay.peer_id, address(here.relay))
        await here.closed.call(here.relay.peer_id, "relay-dial", asked.encode(), timeout=5)
        await everything(here.open, here.hidden.peer_id)
        assert not here.attending.done()


@pytest.mark.parametrize("tls", [True, False])
async def test_who_can_be_dialled_is_dialled_back(tls: bool) -> None:
    """The relay tells and carries nothing: neither to others nor where it calls itself."""
    async with place(rate=0, tls=tls) as here:
        await everything(here.open, here.hidden.peer_id)
        await everything(here.relay, here.hidden.peer_id)
        assert here.relay.stats.out_by_name["relay"] == 0
        assert not here.relay.relay._circuits


@pytest.mark.parametrize("tls", [True, False])
async def test_between_two_that_are_hidden_the_relay_carries(tls: bool) -> None:
    async with place(tls=tls) as here:
        await everything(here.closed, here.hidden.peer_id)
        assert here.relay.stats.out_by_name["relay"] > 2 * len(MEGABYTE)
        assert here.relay.relay._circuits
        await here.closed.aclose()
        await wait_for(lambda: not here.relay.relay._circuits)


@pytest.mark.parametrize("dialled_back", [True, False])
async def test_a_relayed_call_tells_of_no_place(dialled_back: bool) -> None:
    """Neither end sees more of the other than what may be the relay."""
    async with place() as here:
        caller = here.open if dialled_back else here.closed
        await caller.call(here.hidden.peer_id, "echo", b"x", timeout=5)
        assert caller.reached(here.hidden.peer_id) == ""
        assert here.hidden.observed(caller.peer_id) == ""
        assert here.hidden.reached(here.relay.peer_id) == address(here.relay)


async def test_what_is_carried_is_read_by_the_two_ends_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All bytes that pass the relay, looked at: the bodies are not among them."""
    seen = bytearray()
    receive = asyncio.SelectorEventLoop.sock_recv_into

    async def spied(self: asyncio.SelectorEventLoop, sock: socket.socket, room: memoryview) -> int:
        count = await receive(self, sock, room)
        seen.extend(room[:count])
        return count

    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_recv_into", spied)
    async with place() as here:
        assert (
            await here.closed.call(here.hidden.peer_id, "echo", b"a secret of these two", timeout=5)
            == b"a secret of these two"
        )
        await here.closed.push(here.hidden.peer_id, "take", b"", BufferFeed(MEGABYTE), timeout=5)
    assert len(seen) > len(MEGABYTE)
    assert b"a secret of these two" not in seen
    assert MEGABYTE[:64] not in seen


async def test_the_relay_cannot_answer_in_the_place_of_a_hidden_node() -> None:
    """Where somebody else attends, its key is not the one that was called."""
    async with place() as here:
        stranger = Identity.from_seed(b"s" * 32)
        here.open.book.add(stranger.peer_id, here.where)
        waiting = here.relay.relay._hidden
        waiting[stranger.peer_id] = waiting[here.hidden.peer_id]  # the relay lies
        with pytest.raises(TransportError, match="expected"):
            await here.open.call(stranger.peer_id, "echo", b"", timeout=5)


async def test_who_says_it_can_be_dialled_and_cannot_is_carried_after_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("protocols.relay.client.BACK_S", 0.2)
    async with place() as here:
        here.closed.relays.mine = lambda: ["127.0.0.1:1"]  # nothing listens there
        assert await here.closed.call(here.hidden.peer_id, "echo", b"x", timeout=5) == b"x"
        assert here.relay.stats.out_by_name["relay"] > 0


async def test_calls_that_lead_nowhere_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller may give addresses at which a connection opens only after a while, or never."""
    dialled: list[str] = []

    connected = Names.connected

    async def never(names: Names, address: str, whose: str, **how: Any) -> socket.socket:
        if not address.startswith("192.0.2.1:"):
            return await connected(names, address, whose, **how)
        dialled.append(address)
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async with place() as here:
        monkeypatch.setattr("protocols.relay.client.MAX_CALLS_OF_ONE", 2)
        with monkeypatch.context() as patched:
            patched.setattr("protocols.connections.names.Names.connected", never)
            here.closed.book.add(here.relay.peer_id, address(here.relay))
            for number in range(8):
                where = (f"192.0.2.1:{1000 + number}",)
                asked = RelayDial(here.hidden.peer_id, bytes(16), where, False)
                await here.closed.call(here.relay.peer_id, "relay-dial", asked.encode(), timeout=5)
            await wait_for(lambda: len(dialled) == 2)
        await everything(here.open, here.hidden.peer_id)  # who else calls is answered
        assert len(dialled) == 2


async def test_where_a_relay_is_said_to_be_is_dialled_last() -> None:
    """By whoever waits there: the relay's own address has failed, as it is being started again."""
    async with place() as here:
        relay = here.relay.peer_id
        here.open.book.succeeded(relay, address(here.relay))
        here.open.book.failed(relay, address(here.relay))
        here.open.book.add(D.peer_id, relay_address("127.0.0.1:1", relay))
        with pytest.raises(Unreachable, match="does not wait here"):
            await here.open.call(D.peer_id, "echo", b"", timeout=5)
        assert here.open.book.addresses(relay) == [address(here.relay), "127.0.0.1:1"]
        here.open.book.failed(relay, address(here.relay))
        assert here.open.book.addresses(relay) == [address(here.relay), "127.0.0.1:1"]


async def test_where_a_relay_is_said_to_be_tells_of_no_place() -> None:
    """Whoever waits there may have named a place of its own that leads on to the relay."""
    async with place() as here:
        relay, caller = here.relay.peer_id, here.closed
        await caller.call(here.hidden.peer_id, "echo", b"x", timeout=5)
        assert caller.book.has_worked(relay, address(here.relay))
        assert caller.reached(relay) == ""
        caller.book.add(relay, address(here.relay))  # the relay itself says so
        assert caller.reached(relay) == address(here.relay)


async def test_connections_of_one_caller_are_bounded() -> None:
    async with place(limits=replace(QUICK, per_ip=1)) as here:
        for caller in (here.open, here.closed):  # each by its own count
            assert await caller.call(here.hidden.peer_id, "echo", b"hello", timeout=5) == b"hello"
        with pytest.raises(TransportError):  # that would be a second connection
            await here.open.push(here.hidden.peer_id, "take", b"", BufferFeed(b"body"), timeout=5)
        assert here.hidden.stats.capped_connections > 0


async def test_many_calls_at_once() -> None:
    async with place() as here:
        callers = [here.open, here.closed, here.relay] * 8
        answers = await asyncio.gather(
            *[
                caller.call(here.hidden.peer_id, "echo", bytes([n]), timeout=10)
                for n, caller in enumerate(callers)
            ]
        )
        assert answers == [bytes([n]) for n in range(len(callers))]


async def test_what_is_carried_keeps_to_the_limit() -> None:
    async with place(rate=1e6) as here:
        loop = asyncio.get_running_loop()
        await here.closed.call(here.hidden.peer_id, "echo", b"", timeout=5)
        began = loop.time()
        await here.closed.push(here.hidden.peer_id, "take", b"", BufferFeed(MEGABYTE), timeout=5)
        assert loop.time() - began > 0.9 * len(MEGABYTE) / 1e6


async def test_what_is_carried_gets_half_of_an_upload_limit_at_the_most() -> None:
    async with place(rate=1e9, max_upload=2e6) as here:
        loop = asyncio.get_running_loop()
        await here.closed.call(here.hidden.peer_id, "echo", b"", timeout=5)
        began = loop.time()
        await here.closed.push(here.hidden.peer_id, "take", b"", BufferFeed(MEGABYTE), timeout=5)
        assert loop.time() - began > 0.9 * len(MEGABYTE) / 1e6


# --- calls that do not --------------------------------------------------------------------------


async def test_a_relay_that_dies_is_noticed_and_calls_fail_with_the_reason() -> None:
    async with place() as here:
        where = here.where
        await here.open.call(here.hidden.peer_id, "echo", b"", timeout=5)
        await here.relay.aclose()
        async with asyncio.timeout(5):
            await here.attending
        async with HttpTransport(E, listen="127.0.0.1:0", limits=QUICK) as late:
            late.book.add(here.hidden.peer_id, where)
            with pytest.raises(Unreachable):
                await late.call(here.hidden.peer_id, "echo", b"", timeout=5)
        # who was dialled back has a connection of its own
        assert await here.open.call(here.hidden.peer_id, "echo", b"x", timeout=5) == b"x"


async def test_a_hidden_node_that_dies_is_absent_at_once() -> None:
    async with place() as here:
        hidden = here.relay.relay._hidden
        await wait_for(lambda: hidden[B.peer_id].left is None)  # it has asked who calls
        began = asyncio.get_running_loop().time()
        await here.hidden.aclose()
        await wait_for(lambda: not hidden)
        assert asyncio.get_running_loop().time() - began < BRIEF_S / 2
        for caller in (here.open, here.closed, here.relay):
            with pytest.raises(Unreachable, match="does not wait here") as caught:
                await caller.call(here.hidden.peer_id, "echo", b"", timeout=5)
            assert caught.value.why is Why.RELAY


async def test_without_a_limit_for_it_nothing_is_carried() -> None:
    async with place(rate=0) as here:
        with pytest.raises(Unreachable, match="carries nothing"):
            await here.closed.call(here.hidden.peer_id, "echo", b"", timeout=5)


async def test_only_those_who_were_let_in_may_wait() -> None:
    async with place() as here:
        here.relay.relay.may_wait = lambda peer: False
        here.closed.book.add(here.relay.peer_id, address(here.relay))
        with pytest.raises(RemoteRefused, match="stranger"):
            await here.closed.relays.reserve(here.relay.peer_id)


async def test_a_relay_behind_a_relay_is_refused() -> None:
    """Else two hostile records could send a caller round in circles."""
    async with place() as here:
        one, other = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (8, 9))
        here.open.book.add(one, relay_address("127.0.0.1:1", other))
        here.open.book.add(other, relay_address("127.0.0.1:1", one))
        with pytest.raises(Unreachable):
            await here.open.call(one, "echo", b"", timeout=5)


@pytest.mark.parametrize(
    "said", [PREAMBLE + b"x" * 16, PREAMBLE[:-1] + b"9" + b"x" * 16, PREAMBLE[:1], PREAMBLE + b"x"]
)
async def test_a_connection_that_nobody_waits_for_is_cut(said: bytes) -> None:
    async with place() as here:
        before = here.relay.stats.garbage_connections
        host, port = here.relay.listening or ("", 0)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(said)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await wait_for(lambda: here.relay.stats.garbage_connections == before + 1)


async def test_one_peer_leaves_room_for_others_at_a_hidden_node() -> None:
    """Who comes when all connections of a node are one other's has one of these."""
    async with place() as here:
        relay, hidden = here.relay.relay, here.hidden.peer_id
        await everything(here.closed, hidden)  # kept for the next use
        carried = next(c for c in relay._circuits if c.met.is_set())
        while len(relay._circuits) < MAX_CIRCUITS_OF_ONE:
            relay._circuits.add(replace(carried, ends=[], met=asyncio.Event()))
        waiting = replace(carried, peers=(E.peer_id, hidden))
        before = set(relay._circuits)
        assert relay._in_the_way(hidden, waiting.peers) in before
        relay.tell = lambda target, call: None  # type: ignore[method-assign]
        await relay.dial(E.peer_id, RelayDial(hidden, b"", (), False).encode())
        assert len(relay._circuits) == MAX_CIRCUITS_OF_ONE
        assert len(before - relay._circuits) == 1
        relay._cut(carried)  # one that is carried ends at both ends
        await wait_for(carried.over.is_set)


async def test_a_silent_circuit_ends() -> None:
    ends = [socket.socketpair() for _ in range(2)]
    for pair in ends:
        for one in pair:
            one.setblocking(False)
    moved: list[int] = []
    async with asyncio.timeout(5):
        take = partial(Turns(Bucket(None)).take, "pair")
        await splice(ends[0][1], ends[1][0], take, idle=0.05, moved=moved.append)
    assert moved == []
    for pair in ends:
        for one in pair:
            one.close()


# --- addresses ------------------------------------------------------------------------------------


def test_addresses_of_relays() -> None:
    where = relay_address("[2001:db8::1]:4390", A.peer_id)
    assert is_relayed(where)
    assert (relay_of(where).hostport, relay_of(where).peer) == ("[2001:db8::1]:4390", A.peer_id)
    for bad in ("relay/", "relay/host:1", "relay/relay/host:1/" + A.peer_id, f"relay/{A.peer_id}"):
        with pytest.raises(OperatorError):
            AddressBook().add(B.peer_id, bad)
    with pytest.raises(OperatorError):
        relay_address("h" * 100 + ":4390", A.peer_id)
