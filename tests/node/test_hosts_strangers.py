"""Who comes to host 0 of an island and does not belong there, and where it listens."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from hub_kit import JOB, WAIT_S, Other, alive, hub, place, quicken, ready, until

from node.hosts.gate import GONE_BEATS
from node.hosts.hub import Hub
from node.hosts.wire import (
    Challenge,
    Farewell,
    HostConnection,
    HostLostError,
    Welcome,
)
from protocols.errors import OperatorError

ON_ALL = "listens for this island's hosts on all addresses, not on"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


@pytest.mark.parametrize("came_to", ["fe80::1", "fe80::1%eth0"])
async def test_who_comes_by_a_link_local_address_is_told(
    monkeypatch: pytest.MonkeyPatch, came_to: str
) -> None:
    """Ranks of all hosts are to meet where hosts come to: it failed when they were started."""
    monkeypatch.setattr(HostConnection, "own_address", came_to)
    async with hub() as (made, said):
        other = await Other.dial(made)
        answer = await other.greet()
        assert isinstance(answer, Farewell)
        assert answer.code == "E410"
        assert "link-local" in answer.what
        assert "another address of host 0 with --rdzv-endpoint" in answer.fix
        await until(lambda: said)
        assert "host 1 was turned away" in said[0]


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


@pytest.mark.parametrize(
    ("greeting", "text"),
    [({"version": "0.0.0"}, "different versions"), ({"device": "cuda"}, "different devices")],
)
async def test_host_0_does_not_wait_for_a_host_that_it_has_turned_away(
    greeting: dict[str, Any], text: str
) -> None:
    async with hub() as (made, said):
        waiting = asyncio.ensure_future(made.muster(again=False))
        for _ in range(2):
            await (await Other.dial(made)).greet(**greeting)
        with pytest.raises(OperatorError, match=text) as caught:
            await asyncio.wait_for(waiting, WAIT_S)
        assert caught.value.code == "E410"
        await until(lambda: not made._connections)
    assert len([line for line in said if "host 1 was turned away" in line]) == 1


@pytest.mark.parametrize(
    ("greeting", "text"),
    [
        ({"key": "another"}, "host 1 was turned away: the rendezvous id differs"),
        ({"number": 2}, "a host of another number was turned away: host 2 is not of this island"),
    ],
)
async def test_a_stranger_is_told_of_and_is_not_one_of_the_islands_hosts(
    greeting: dict[str, Any], text: str
) -> None:
    async with hub(wait_s=0.3) as (made, said):
        await (await Other.dial(made)).greet(**greeting)
        with pytest.raises(OperatorError) as caught:
            await made.muster(again=False)
        assert caught.value.code == "E409"
        assert text in caught.value.why
        assert any(line.startswith(text) for line in said)
        made.offer(JOB)
        async with alive(await ready(made)):
            await made.muster(again=False)
            assert ("number" in greeting) is (text in made._whys())  # the other one is in now


async def test_two_machines_of_one_number_do_not_throw_each_other_out() -> None:
    async with hub() as (made, _):
        made.offer(JOB)
        first = await ready(made)
        async with alive(first):
            [host] = await made.muster(again=False)
            refused = await (await Other.dial(made)).greet(name="another")
            assert isinstance(refused, Farewell)
            assert refused.code == "E410"
            assert "other has that number and is there, and another comes with it" in refused.why
            assert made.hosts == {1: host}
        # it says nothing from here on: another machine may have come in its place
        await until(lambda: host.connection.silent >= GONE_BEATS)
        assert isinstance(await (await Other.dial(made)).greet(name="another"), Welcome)
        assert made.hosts[1].name == "another"


async def test_nor_do_two_whose_machines_have_one_name() -> None:
    """As containers and cloned machines have."""
    async with hub() as (made, said):
        made.offer(JOB)
        first = await ready(made, process=b"one")
        async with alive(first):
            [host] = await made.muster(again=False)
            refused = await (await Other.dial(made)).greet(process=b"another")
            assert isinstance(refused, Farewell)
            assert refused.code == "E410"
            assert "two processes come with that number, and the machines of both" in refused.why
            assert "--node-rank" in refused.fix
            assert made.hosts == {1: host}
            await until(lambda: any("host 1 was turned away" in line for line in said))
            assert not any("is lost" in line for line in said)


async def test_who_was_restarted_on_a_machine_that_went_dark_has_its_place_again() -> None:
    """Nothing has told of the end of the process before."""
    async with hub() as (made, _):
        made.offer(JOB)
        first = await ready(made, process=b"one")
        async with alive(first):
            [host] = await made.muster(again=False)
        assert host.connection.silent < GONE_BEATS
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await (await Other.dial(made)).greet(process=b"two"), Welcome)
        assert made.hosts[1].process == b"two"


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


async def test_those_who_have_not_shown_who_they_are_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They may say nothing and stay; the island's own hosts find room once they are gone."""
    monkeypatch.setattr("node.hosts.gate.MAX_STRANGERS", 2)
    async with hub() as (made, _):
        made.offer(JOB)
        silent = [await Other.dial(made) for _ in range(2)]
        for stranger in silent:
            await stranger.receive(Challenge)
        with pytest.raises(HostLostError):
            await (await Other.dial(made)).connection.receive()
        silent[0].connection.close()
        await until(lambda: len(made._connections) == 1)
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


async def test_a_taken_port_is_told() -> None:
    async with hub() as (made, _):
        second = Hub(place(made.port), "cpu", print)
        with pytest.raises(OperatorError) as caught:
            await second.open()
        assert caught.value.code == "E303"


@pytest.mark.parametrize(("name", "everywhere"), [("node0", True), ("localhost", False)])
async def test_host_0_whose_own_name_leads_to_loopback_listens_on_all_addresses(
    monkeypatch: pytest.MonkeyPatch, name: str, everywhere: bool
) -> None:
    ask = socket.getaddrinfo

    def resolver(host: Any, *words: Any, **more: Any) -> Any:
        return ask("127.0.1.1" if host == "node0" else host, *words, **more)

    monkeypatch.setattr("socket.getaddrinfo", resolver)
    async with hub(address=name) as (made, said):
        assert made._server is not None
        bound = {str(one.getsockname()[0]) for one in made._server.sockets}
        assert ("0.0.0.0" in bound) is everywhere
        assert said == (
            [f"{ON_ALL} {name} alone: that name is loopback here"] if everywhere else []
        )
        assert bound <= ({"0.0.0.0", "::"} if everywhere else {"127.0.0.1", "::1"})


async def test_an_address_that_is_not_host_0s_has_it_listen_on_all_and_say_so() -> None:
    async with hub(address="192.0.2.1") as (made, said):
        assert made._server is not None
        assert "0.0.0.0" in {str(one.getsockname()[0]) for one in made._server.sockets}
        assert [line.startswith(f"{ON_ALL} 192.0.2.1 alone: ") for line in said] == [True]


async def test_a_loopback_address_that_cannot_be_had_opens_no_others() -> None:
    with pytest.raises(OperatorError) as caught:
        await Hub(place(address="::1%nowhere"), "cpu", print).open()
    assert caught.value.code == "E303"
