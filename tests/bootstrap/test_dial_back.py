"""The dial-back: whoever asks is told whether it can be dialled, and has nobody else dialled."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator

import pytest
from identity_kit import identity

from bootstrap import dial_back
from bootstrap.dial_back import Allowance, Reach, dialled_back, outside, reach
from bootstrap.handshake import Gate, greet
from protocols.errors import RemoteRefused
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.messages import DialBackAt
from protocols.whereabouts import Whereabouts

RUN = b"\x01" * 32
QUICK_S = 0.5  # until a "no"


class Host:
    """A node as far as a dial-back needs one. ``dialled``: every connection that it has opened."""

    def __init__(self, number: int) -> None:
        self.identity = identity(number)
        self.transport = HttpTransport(self.identity, listen="127.0.0.1:0")
        self.whereabouts = Whereabouts(self.transport, self.identity, self.transport.book)
        self.sees = ""  # where callers come from, in the place of what is seen
        self.dialled: list[str] = []

    def open(self) -> None:
        Gate(
            self.transport,
            self.whereabouts,
            software="1",
            run=lambda: RUN,
            observed=lambda peer: self.sees or self.transport.observed(peer),
        )
        real = self.transport.dial

        async def dial(address: str, expected: PeerId | None = None) -> PeerId:
            self.dialled.append(address)
            return await real(address, expected)

        self.transport.dial = dial  # type: ignore[method-assign]

    @property
    def where(self) -> str:
        assert self.transport.listening is not None
        return "{}:{}".format(*self.transport.listening)

    @property
    def port(self) -> int:
        assert self.transport.listening is not None
        return self.transport.listening[1]

    async def introduces(self, to: Host, *addresses: str) -> PeerId:
        """Greet, and say that this node is dialled at these addresses."""
        self.whereabouts.publish(addresses)
        peer = await self.transport.dial(to.where)
        await greet(self.transport, self.whereabouts, peer, software="1")
        self.dialled.clear()
        return peer

    async def asks(self, to: Host, *addresses: str) -> Reach:
        """Whether it can be dialled there."""
        return await dialled_back(self.transport, await self.introduces(to, *addresses))


@pytest.fixture
async def hosts() -> AsyncIterator[tuple[Host, Host, Host]]:
    made = Host(1), Host(2), Host(3)
    async with made[0].transport, made[1].transport, made[2].transport:
        for host in made:
            host.open()
        yield made


@pytest.fixture
def quick_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dial_back, "TIMEOUT_S", QUICK_S)


async def test_whoever_asks_is_told_whether_it_can_be_dialled(
    hosts: tuple[Host, Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, newcomer, _ = hosts
    peer = await newcomer.transport.dial(seed.where)
    assert await dialled_back(newcomer.transport, peer) is Reach.UNKNOWN  # not greeted yet
    with monkeypatch.context() as patched:
        patched.setattr(dial_back, "TIMEOUT_S", QUICK_S)
        assert await newcomer.asks(seed, "127.0.0.1:1") is Reach.NO
    assert await newcomer.asks(seed, newcomer.where) is Reach.YES
    assert await newcomer.asks(seed, "127.0.0.1:1", newcomer.where) is Reach.YES
    port = newcomer.where.rpartition(":")[2]
    assert await newcomer.asks(seed, f"localhost:{port}") is Reach.YES, "by its name"


@pytest.mark.parametrize(
    "address",
    ["192.0.2.8:4390", "127.0.0.1:22", "169.254.169.254:80", "10.0.0.1:80", "[::1]:22"],
)
async def test_no_address_is_dialled_but_the_callers_own(
    hosts: tuple[Host, Host, Host], address: str
) -> None:
    seed, newcomer, _ = hosts
    seed.sees = "192.0.2.7:50000"
    assert await newcomer.asks(seed, address, f"localhost:{newcomer.where[-5:]}") in (
        Reach.ELSEWHERE,
        Reach.UNKNOWN,
    )
    assert seed.dialled == []


async def test_a_caller_has_few_of_its_addresses_dialled(hosts: tuple[Host, Host, Host]) -> None:
    """Else one question would be a scan of its machine's ports, or of who shares its address."""
    seed, newcomer, _ = hosts
    closed = [f"127.0.0.1:{port}" for port in range(1, 6)]
    assert await newcomer.asks(seed, newcomer.where, *closed) is Reach.YES
    assert len(seed.dialled) == dial_back.MAX_TRIED


async def test_who_is_not_seen_is_not_dialled(hosts: tuple[Host, Host, Host]) -> None:
    """A node behind a relay sees the relay in the place of who calls."""
    seed, newcomer, _ = hosts
    seed.sees = "nowhere"
    assert await newcomer.asks(seed, newcomer.where) is Reach.ELSEWHERE
    assert seed.dialled == []


async def test_a_relay_is_dialled_where_it_was_reached_before(
    hosts: tuple[Host, Host, Host],
) -> None:
    seed, newcomer, relay = hosts
    waits = await newcomer.introduces(relay)
    await newcomer.transport.relays.reserve(waits)
    attending = asyncio.create_task(newcomer.transport.relays.attend(waits, relay.where))
    at = f"relay/{relay.where}/{waits}"
    try:
        assert await newcomer.asks(relay, at) is Reach.YES, "the relay itself knows"
        assert await newcomer.asks(seed, at) is Reach.ELSEWHERE, "it may be anything"
        assert seed.dialled == []
        await seed.introduces(relay)
        assert await newcomer.asks(seed, at) is Reach.YES
        moved = f"relay/127.0.0.1:1/{waits}"
        assert await newcomer.asks(seed, moved) is Reach.ELSEWHERE
    finally:
        attending.cancel()


@pytest.mark.usefixtures("quick_no")
async def test_a_no_tells_nothing_of_what_was_found(hosts: tuple[Host, Host, Host]) -> None:
    """A closed port, another node's and one that says nothing: one answer, after one time."""
    seed, newcomer, other = hosts
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mute = f"127.0.0.1:{silent.getsockname()[1]}"
        for address in ("127.0.0.1:1", other.where, mute):
            peer = await newcomer.introduces(seed, address)
            began = time.monotonic()
            assert await newcomer.transport.call(peer, "reach", b"", timeout=5) == b"no"
            assert time.monotonic() - began >= QUICK_S - 0.05


async def test_who_asks_too_often_is_put_off(
    hosts: tuple[Host, Host, Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial_back, "OF_ONE", 2)
    seed, newcomer, _ = hosts
    peer = await newcomer.introduces(seed, newcomer.where)
    for _ in range(2):
        assert await newcomer.transport.call(peer, "reach", b"", timeout=5) == b"yes"
    with pytest.raises(RemoteRefused, match="busy"):
        await newcomer.transport.call(peer, "reach", b"", timeout=5)
    assert len(seed.dialled) == 2
    assert await dialled_back(newcomer.transport, peer) is Reach.UNKNOWN


def test_dial_backs_are_counted_by_place_and_in_all() -> None:
    allowance = Allowance()
    assert sum(allowance.take("one", 100.0) for _ in range(100)) == dial_back.OF_ONE
    assert not allowance.take("one", 100.0 + dial_back.ONE_EVERY_S / 2)
    assert allowance.take("one", 101.0 + dial_back.ONE_EVERY_S)
    places = (str(number) for number in range(10 * dial_back.MAX_PLACES))
    taken = sum(allowance.take(place, 200.0) for place in places)
    assert taken == dial_back.OF_ALL
    assert allowance.take("another", 201.0)


@pytest.mark.usefixtures("quick_no")
async def test_one_that_says_nothing_does_not_hide_a_no(hosts: tuple[Host, Host, Host]) -> None:
    seed, newcomer, other = hosts
    one = await newcomer.introduces(seed, "127.0.0.1:1")
    mute = await newcomer.transport.dial(other.where)  # not greeted
    assert await reach(newcomer.transport, [mute, one]) is Reach.NO
    assert await reach(newcomer.transport, [mute]) is Reach.UNKNOWN
    assert await reach(newcomer.transport, []) is Reach.UNKNOWN


@pytest.mark.usefixtures("quick_no")
async def test_a_caller_is_dialled_where_it_is_seen_at_a_port_that_it_names(
    hosts: tuple[Host, Host, Host],
) -> None:
    """Whatever its record says: behind a translator it has another address than is seen."""
    seed, newcomer, _ = hosts
    peer = await newcomer.introduces(seed, "192.0.2.8:4390")
    assert await dialled_back(newcomer.transport, peer) is Reach.ELSEWHERE
    assert await dialled_back(newcomer.transport, peer, newcomer.port) is Reach.YES
    assert await dialled_back(newcomer.transport, peer, 1) is Reach.NO
    assert seed.dialled == [newcomer.where, "127.0.0.1:1"]
    seed.sees = "nowhere"
    assert await dialled_back(newcomer.transport, peer, newcomer.port) is Reach.ELSEWHERE
    seed.sees = ""
    for port in (0, 65536, 1 << 62):
        with pytest.raises(RemoteRefused, match="there is no port"):
            await newcomer.transport.call(peer, "reach", DialBackAt(port).encode(), timeout=5)
    assert len(seed.dialled) == 2


@pytest.mark.usefixtures("quick_no")
async def test_where_a_translator_lets_peers_in_is_what_most_of_them_see(
    hosts: tuple[Host, Host, Host],
) -> None:
    """And one of these has got through; what a single one claims is not tried."""
    one, newcomer, two = hosts
    peers = [await newcomer.introduces(host, "192.0.2.8:4390") for host in (one, two)]
    here, there = "127.0.0.1:50000", "198.51.100.9:50000"
    liar = identity(9).peer_id
    for seen, port, found in (
        ({peers[0]: here, peers[1]: here}, newcomer.port, newcomer.where),
        ({peers[0]: here, peers[1]: here, liar: there}, newcomer.port, newcomer.where),
        ({peers[0]: here, liar: ""}, newcomer.port, newcomer.where),
        ({peers[0]: here, liar: there}, newcomer.port, ""),
        ({peers[0]: here, peers[1]: here}, 1, ""),
        ({peers[0]: "nonsense", peers[1]: ""}, newcomer.port, ""),
        ({}, newcomer.port, ""),
    ):
        assert await outside(newcomer.transport, seen, port) == found
