"""Past the relay: two nodes behind translators that meet. Real sockets on loopback.

With real translators in namespaces: tests/swarm/test_swarm_nat.py.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from http_kit import address
from test_relay import MEGABYTE, everything, place

from protocols.errors import Malformed, TransportError, Unreachable
from protocols.relay import client
from protocols.relay.punching import MOST_TRIES, inside, meeting_places, punched, reusable
from protocols.relay.wire import RelayDial, RelayEnd, RelayMeeting, heard, introduce, say

LOOPBACK = (socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 0))


@pytest.fixture
def relay() -> Iterator[socket.socket]:
    """A socket that is dialled from both ends, as a relay is."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


async def at_relay(relay: socket.socket) -> tuple[socket.socket, str]:
    """The connection of one end with it, and where the relay sees it."""
    sock = reusable(LOOPBACK)
    await asyncio.get_running_loop().sock_connect(sock, relay.getsockname())
    return sock, inside(sock)


# --- through transports -------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [1e9, 0.0])
@pytest.mark.parametrize("tls", [True, False])
async def test_two_that_are_hidden_meet_and_the_relay_carries_nothing(
    rate: float, tls: bool
) -> None:
    """Also where it carries nothing at all."""
    async with place(rate, tls=tls, punch=True) as here:
        await everything(here.closed, here.hidden.peer_id)
        assert here.relay.stats.out_by_name["relay"] == 0
        assert here.closed.relays.met == here.hidden.relays.met > 0
        for transport in (here.closed, here.hidden, here.relay):
            assert transport.stats.garbage_connections == 0


@pytest.mark.parametrize("unwilling", ["closed", "hidden"])
async def test_who_does_not_try_is_carried(unwilling: str) -> None:
    async with place(punch=True) as here:
        getattr(here, unwilling).relays.punches = False
        await everything(here.closed, here.hidden.peer_id)
        assert here.relay.stats.out_by_name["relay"] > 2 * len(MEGABYTE)
        assert here.closed.relays.met == here.hidden.relays.met == 0


async def test_where_no_way_opens_the_relay_carries_and_it_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not for the next connections; after some minutes, when either may be elsewhere, it is."""
    tried: list[bool] = []

    async def closed(sock: object, addresses: object, *, listens: bool, seconds: float) -> None:
        tried.append(listens)

    monkeypatch.setattr(client, "punched", closed)
    async with place(punch=True) as here:
        await here.closed.call(here.hidden.peer_id, "echo", b"", timeout=5)
        assert sorted(tried) == [False, True]
        await everything(here.closed, here.hidden.peer_id)
        assert len(tried) == 2
        assert here.relay.stats.out_by_name["relay"] > 2 * len(MEGABYTE)
        here.closed.relays._apart = dict.fromkeys(here.closed.relays._apart, 0.0)  # it is over
        both = (here.closed.call(here.hidden.peer_id, "echo", b"", timeout=5) for _ in range(2))
        await asyncio.gather(*both)  # one has to open a connection
        assert sorted(tried) == [False, False, True, True]


async def test_without_a_way_a_relay_that_carries_nothing_is_not_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def closed(sock: object, addresses: object, *, listens: bool, seconds: float) -> None:
        return None

    monkeypatch.setattr(client, "punched", closed)
    async with place(rate=0, punch=True) as here:
        for _ in range(2):  # the second time it is not even tried
            with pytest.raises(Unreachable, match="carries nothing"):
                await here.closed.call(here.hidden.peer_id, "echo", b"", timeout=5)
        assert not here.relay.relay._circuits


async def test_a_caller_that_has_not_noticed_the_way_is_served_through_the_relay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last packet may be lost, or come after the caller's time."""

    async def blind(
        sock: socket.socket, addresses: tuple[str, ...], *, listens: bool, seconds: float
    ) -> socket.socket | None:
        found = await punched(sock, addresses, listens=listens, seconds=seconds)
        assert found is not None
        if listens:
            return found
        found.close()
        return None

    monkeypatch.setattr(client, "punched", blind)
    async with place(punch=True) as here:
        await everything(here.closed, here.hidden.peer_id)
        assert here.hidden.relays.met == 1
        assert here.closed.relays.met == 0
        assert here.relay.stats.out_by_name["relay"] > 2 * len(MEGABYTE)


@pytest.mark.parametrize("said", [b"\x00", b"\x05abcde", b"\xff" + b"x" * 255, b""])
async def test_an_end_that_does_not_say_what_it_wants_is_cut(said: bytes) -> None:
    async with place() as here:
        here.closed.book.add(here.relay.peer_id, address(here.relay))
        asked = RelayDial(here.hidden.peer_id, b"", (), False).encode()
        token = await here.closed.call(here.relay.peer_id, "relay-dial", asked, timeout=5)
        reader, writer = await asyncio.open_connection(*(here.relay.listening or ("", 0)))
        await introduce(writer.get_extra_info("socket")._sock, token)
        writer.write(said)
        writer.write_eof()
        assert await reader.read() == b""
        writer.close()
        await everything(here.closed, here.hidden.peer_id)


async def test_a_relay_that_says_something_else_is_no_way(monkeypatch: pytest.MonkeyPatch) -> None:
    async def nonsense(sock: socket.socket, kind: type) -> object:
        raise Malformed("not a word")

    async with place(punch=True) as here:
        with monkeypatch.context() as patched:
            patched.setattr(client, "heard", nonsense)
            with pytest.raises(TransportError):
                await here.closed.call(here.hidden.peer_id, "echo", b"", timeout=5)
        assert not here.attending.done()
        await everything(here.closed, here.hidden.peer_id)


# --- the two ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", [(True, False), (False, True)])
async def test_two_ends_have_one_connection(
    relay: socket.socket, listens: tuple[bool, bool]
) -> None:
    ends = [await at_relay(relay) for _ in range(2)]
    ways = [
        punched(sock, [other], listens=one, seconds=5.0)
        for (sock, _), (_, other), one in zip(ends, reversed(ends), listens, strict=True)
    ]
    one, other = await asyncio.gather(*ways)
    assert one is not None
    assert other is not None
    assert (one.getsockname(), one.getpeername()) == (other.getpeername(), other.getsockname())
    await asyncio.get_running_loop().sock_sendall(one, b"here")
    assert await asyncio.get_running_loop().sock_recv(other, 4) == b"here"
    for sock in (one, other, *(sock for sock, _ in ends)):
        sock.close()


async def test_nobody_comes(relay: socket.socket) -> None:
    sock, here = await at_relay(relay)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert await punched(sock, [inside(closed)], listens=True, seconds=0.3) is None
    with socket.create_connection(relay.getsockname(), 5):  # nobody listens at its port any more
        pass
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(here.rpartition(":")[2])), 1)
    sock.close()


async def test_a_relay_that_lies_makes_nobody_flood_another(
    relay: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is said to be there refuses at once; that is dialled a bounded number of times."""
    dialled = 0
    connect = asyncio.SelectorEventLoop.sock_connect

    async def counted(loop: asyncio.SelectorEventLoop, sock: socket.socket, where: Any) -> None:
        nonlocal dialled
        dialled += 1
        await connect(loop, sock, where)

    sock, _ = await at_relay(relay)
    monkeypatch.setattr(asyncio.SelectorEventLoop, "sock_connect", counted)
    async with asyncio.timeout(30):
        assert await punched(sock, ["127.0.0.1:1"], listens=False, seconds=60.0) is None
    assert dialled == MOST_TRIES
    sock.close()


async def test_only_the_other_end_is_let_in(relay: socket.socket) -> None:
    """Somebody else's connection to the port is cut, and the other end's is taken after it."""
    sock, here = await at_relay(relay)
    port = int(here.rpartition(":")[2])
    with socket.socket() as nobody, socket.socket() as comes:
        nobody.bind(("127.0.0.2", 0))
        way = asyncio.create_task(punched(sock, [inside(nobody)], listens=True, seconds=5.0))
        stranger = reusable(LOOPBACK)
        comes.setblocking(False)
        comes.bind(("127.0.0.2", 0))
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            while True:
                try:
                    await loop.sock_connect(stranger, ("127.0.0.1", port))
                    break
                except ConnectionRefusedError:  # it does not listen yet
                    stranger.close()
                    stranger = reusable(LOOPBACK)
            assert await loop.sock_recv(stranger, 1) == b""
            await loop.sock_connect(comes, ("127.0.0.1", port))
            found = await way
        assert found is not None
        assert found.getpeername() == comes.getsockname()
        for one in (found, stranger, sock):
            one.close()


async def test_a_way_that_is_given_up_leaves_nothing_open(relay: socket.socket) -> None:
    sock, _ = await at_relay(relay)
    way = asyncio.create_task(punched(sock, ["127.0.0.1:1"], listens=True, seconds=5.0))
    await asyncio.sleep(0)
    way.cancel()
    with pytest.raises(asyncio.CancelledError):
        await way
    sock.close()


@pytest.mark.parametrize(
    "address",
    ["", "example.org:80", "127.0.0.1:22", "0.0.0.0:1", "224.0.0.1:5", "[::1]:1", "[fe80::1]:9"],
)
async def test_what_no_relay_should_say_is_not_dialled(address: str) -> None:
    """A relay sends nobody to its own services, to names, or to everybody at once."""
    with socket.socket() as sock:
        sock.bind(("0.0.0.0", 0))
        async with asyncio.timeout(5):
            assert await punched(sock, [address], listens=True, seconds=60.0) is None


# --- what a relay tells -------------------------------------------------------------------------


class Seen:
    """A socket as the relay has it."""

    def __init__(self, host: str, port: int) -> None:
        self.getpeername = lambda: (host, port)


def places(theirs: str, said: str, ours: str) -> tuple[str, ...]:
    other, towards = Seen(theirs, 1000), Seen(ours, 2000)
    return meeting_places(other, said, towards)  # type: ignore[arg-type]


def test_each_is_told_where_the_other_is_seen() -> None:
    assert places("198.51.100.7", "192.168.1.5:1000", "203.0.113.9") == ("198.51.100.7:1000",)
    assert places("::ffff:198.51.100.7", "", "203.0.113.9") == ("198.51.100.7:1000",)
    assert places("2001:db8::7", "", "2001:db8:1::9") == ("[2001:db8::7]:1000",)
    assert places("2001:db8::7", "", "203.0.113.9") == (), "they cannot dial each other"


def test_behind_one_translator_each_is_told_of_the_address_inside() -> None:
    """Most translators do not bring two of their inside together by their outer address."""
    both = ("198.51.100.7:1000", "192.168.1.5:4000")
    assert places("198.51.100.7", both[1], "198.51.100.7") == both


@pytest.mark.parametrize(
    "said",
    ["", "x", "127.0.0.1:80", "[::1]:80", "169.254.169.254:80", "8.8.8.8:53", "0.0.0.0:1", "a.b:1"],
)
def test_an_address_inside_is_one_of_a_private_network(said: str) -> None:
    """Else an end could have another dial what it likes."""
    assert places("198.51.100.7", said, "198.51.100.7") == ("198.51.100.7:1000",)


@pytest.mark.parametrize(
    "word",
    [
        RelayEnd(True, "[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535"),
        RelayMeeting(True, ("[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535",) * 2),
    ],
)
async def test_words_are_heard_as_they_were_said(word: RelayEnd | RelayMeeting) -> None:
    one, other = socket.socketpair()
    for sock in (one, other):
        sock.setblocking(False)
    with one, other:
        await say(one, word)
        await asyncio.get_running_loop().sock_sendall(one, b"and more")
        assert await heard(other, type(word)) == word
        assert await asyncio.get_running_loop().sock_recv(other, 99) == b"and more"
