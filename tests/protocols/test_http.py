"""The HTTP transport among friends: links, pools, errors told apart, figures, large bodies."""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncIterator

import pytest
from address_kit import link_local
from http_kit import (
    NOBODY,
    QUICK,
    A,
    B,
    C,
    Hold,
    address,
    answer,
    closes,
    echo,
    fake,
    request,
    silent,
    ssh,
    two,
    wait_for,
)

from protocols.connections import tls
from protocols.errors import (
    IdentityMismatch,
    LocalProtocolError,
    OperatorError,
    RemoteRefused,
    Unreachable,
    Why,
)
from protocols.http.transport import HttpTransport
from protocols.identity import PeerId
from protocols.limits import Limits
from protocols.transport import Buffer, Outgoing

# --- who answers there ------------------------------------------------------------------------


@pytest.mark.usefixtures("quick_resolver")
async def test_reasons_are_told_apart() -> None:
    async def web(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async def old(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(bytes.fromhex("15030300020246"))  # alert, fatal: protocol_version
        await reader.read()

    foreign = tls.server_context(A)
    foreign.sslobject_class = ssl.SSLObject
    foreign.verify_mode = ssl.CERT_NONE
    async with (
        HttpTransport(B, limits=QUICK) as patient,
        HttpTransport(B, limits=Limits(grace=0.1, connect=1.0)) as b,
        fake(silent, None) as mute,
        fake(ssh, None) as ssh_server,
        fake(web, None) as web_server,
        fake(closes, None) as closing,
        fake(old, None) as old_tls,
        fake(other, foreign) as not_atoll,
    ):
        for where, why in [
            ("no-such-host.invalid:4390", Why.DNS),
            (NOBODY, Why.REFUSED),
            (mute, Why.TIMEOUT),
            (ssh_server, Why.NOT_ATOLL),
            (web_server, Why.NOT_ATOLL),
            (closing, Why.RESET),
            (old_tls, Why.TLS),
            (not_atoll, Why.NOT_ATOLL),
        ]:
            with pytest.raises(Unreachable) as error:
                await (b if why is Why.TIMEOUT else patient).dial(where)
            assert error.value.why is why, (where, error.value)
            assert error.value.target == where


async def test_a_bad_address_is_the_operators_error() -> None:
    async with HttpTransport(B) as b:
        with pytest.raises(OperatorError, match="port is missing"):
            await b.dial("127.0.0.1")


async def test_dialling_remembers_and_verifies() -> None:
    async with two(known=False) as (a, b):
        assert await b.dial(f"{address(a)}/{A.peer_id}") == A.peer_id
        assert b.book.addresses(A.peer_id) == [address(a)]
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        with pytest.raises(IdentityMismatch):
            await b.dial(f"{address(a)}/{C.peer_id}")
        assert b.book.peers() == [A.peer_id]


@pytest.mark.parametrize("encrypted", [True, False])
async def test_by_which_end_of_its_own_it_gets_to_a_peer(encrypted: bool) -> None:
    async with HttpTransport(A, tls=encrypted, listen="127.0.0.1:0") as a:
        async with HttpTransport(B, tls=encrypted) as b:
            assert b.own_end(A.peer_id) == ""
            a.on_call("echo", echo)
            b.book.add(A.peer_id, address(a))
            await b.call(A.peer_id, "echo", b"x", timeout=5)
            assert b.own_end(A.peer_id) == a.observed(B.peer_id) != ""
            assert b.own_end(C.peer_id) == ""
        assert b.own_end(A.peer_id) == "", "the connection is gone"


@pytest.mark.parametrize("encrypted", [True, False])
async def test_where_it_has_reached_a_peer(encrypted: bool) -> None:
    async with HttpTransport(A, tls=encrypted, listen="127.0.0.1:0") as a:
        async with HttpTransport(B, tls=encrypted) as b:
            assert b.reached(A.peer_id) == ""
            a.on_call("echo", echo)
            b.book.add(A.peer_id, "127.0.0.1:1")  # which leads nowhere
            b.book.add(A.peer_id, address(a))
            await b.call(A.peer_id, "echo", b"x", timeout=5)
            assert b.reached(A.peer_id) == address(a)
            assert b.reached(C.peer_id) == a.reached(B.peer_id) == ""
        assert b.reached(A.peer_id) == "", "the connection is gone"


async def test_a_node_does_not_talk_to_itself() -> None:
    async with two() as (a, _):
        with pytest.raises(Unreachable) as dialled:
            await a.dial(address(a))
        with pytest.raises(Unreachable) as called:
            await a.call(a.peer_id, "echo", b"", timeout=5)
        assert dialled.value.why is called.value.why is Why.SELF


async def test_addresses_are_tried_in_turn_and_the_good_one_is_kept() -> None:
    async with (
        two(known=False) as (a, b),
        HttpTransport(C, listen="127.0.0.1:0", limits=QUICK) as c,
    ):
        good = address(a)
        for where in (NOBODY, address(c), good):
            b.book.add(A.peer_id, where)
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert b.book.addresses(A.peer_id)[0] == good
        await a.aclose()
        with pytest.raises(Unreachable) as error:
            await b.call(A.peer_id, "echo", b"x", timeout=5)
        assert error.value.why is Why.REFUSED
        for part in (NOBODY, address(c), good, C.peer_id):
            assert part in str(error.value)


async def test_the_resolver_is_asked_when_nothing_known_works() -> None:
    async with two(known=False) as (a, b):
        asked: list[PeerId] = []

        async def resolver(peer: PeerId) -> None:
            asked.append(peer)
            if len(asked) == 2:
                b.book.add(peer, address(a))

        b.book.resolver = resolver
        with pytest.raises(Unreachable) as error:
            await b.call(A.peer_id, "echo", b"", timeout=5)
        assert error.value.why is Why.NO_ADDRESS
        b.book.add(A.peer_id, "127.0.0.1:1")
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert asked == [A.peer_id] * 2


async def test_an_address_that_hangs_is_not_tried_first_for_ever() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    limits = Limits(grace=0.1, connect=30.0)
    async with two(limits, known=False) as (a, b), fake(silent, None) as mute:
        good = address(a)
        b.book.add(A.peer_id, mute)
        b.book.add(A.peer_id, good)
        with pytest.raises(Unreachable) as error:
            await b.call(A.peer_id, "echo", b"", timeout=1.2)
        assert error.value.why is Why.TIMEOUT
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


# --- the pool ---------------------------------------------------------------------------------


async def test_connections_are_reused() -> None:
    async with two() as (a, b):
        for _ in range(20):
            await b.call(A.peer_id, "echo", b"", timeout=5)
        assert a.stats.connections == 1


async def test_a_refusal_keeps_the_connection() -> None:
    async with two() as (a, b):
        for _ in range(5):
            with pytest.raises(RemoteRefused):
                await b.call(A.peer_id, "nobody", b"small", timeout=5)
        assert a.stats.connections == 1
        assert a.stats.refused_requests == 5


async def test_a_restarted_peer_is_found_again() -> None:
    async with two() as (a, b):
        where = address(a)
        await b.call(A.peer_id, "echo", b"", timeout=5)
        await a.aclose()
        async with HttpTransport(A, listen=where, limits=QUICK) as again:
            again.on_call("echo", echo)
            assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"


async def test_a_stale_connection_is_retried_once() -> None:
    """The server answers the first request of a connection and hangs up on the second."""
    seen: list[bytes] = []

    async def one_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request(reader))
        writer.write(answer(b"ok"))
        seen.append(await request(reader))

    async with fake(one_each, tls.server_context(A)) as where, HttpTransport(B, limits=QUICK) as b:
        b.book.add(A.peer_id, where)
        assert await b.call(A.peer_id, "x", b"1", timeout=5) == b"ok"
        assert await b.call(A.peer_id, "x", b"2", timeout=5) == b"ok"  # cut, then made again
        assert len(seen) == 3


async def test_of_several_stale_connections_none_is_tried_but_the_first() -> None:
    """As after a suspend: those in use, which the peer still answers, are let be."""
    seen: list[bytes] = []
    three, go_on = asyncio.Event(), asyncio.Event()

    async def one_each(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request(reader))
        if len(seen) == 3:
            three.set()
        await three.wait()
        writer.write(answer(b"ok"))
        seen.append(await request(reader))
        if b"stay" in seen[-1]:
            await go_on.wait()
            writer.write(answer(b"stayed"))

    async with fake(one_each, tls.server_context(A)) as where, HttpTransport(B, limits=QUICK) as b:
        b.book.add(A.peer_id, where)
        await asyncio.gather(*[b.call(A.peer_id, "x", b"1", timeout=5) for _ in range(3)])
        async with asyncio.TaskGroup() as group:
            stays = group.create_task(b.call(A.peer_id, "stay", b"", timeout=5))
            await wait_for(lambda: len(seen) == 4)
            assert await b.call(A.peer_id, "x", b"2", timeout=5) == b"ok"
            assert len(seen) == 6
            go_on.set()
        assert stays.result() == b"stayed"


async def test_a_fresh_connection_that_breaks_is_not_retried() -> None:
    seen: list[bytes] = []

    async def hangs_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await request(reader))

    async with fake(hangs_up, tls.server_context(A)) as where, HttpTransport(B, limits=QUICK) as b:
        b.book.add(A.peer_id, where)
        with pytest.raises(Unreachable) as error:
            await b.call(A.peer_id, "x", b"", timeout=5)
        assert error.value.why is Why.RESET
        assert len(seen) == 1


@pytest.mark.parametrize("leaver", ["caller", "callee"])
async def test_an_end_that_leaves_ends_the_call_at_both(leaver: str) -> None:
    async with two() as (a, b):
        hold = Hold()
        a.on_call("wait", hold.call)
        await b.call(A.peer_id, "echo", b"", timeout=5)  # so that the link is not fresh
        call = asyncio.ensure_future(b.call(A.peer_id, "wait", b"", timeout=9))
        await asyncio.wait_for(hold.begun.wait(), 5)
        await (b if leaver == "caller" else a).aclose()
        with pytest.raises(Unreachable):
            await asyncio.wait_for(call, 5)
        await asyncio.wait_for(hold.ended.wait(), 5)


async def test_nothing_is_left_running_after_the_end() -> None:
    before = asyncio.all_tasks()
    async with two() as (_, b):
        await asyncio.gather(*(b.call(A.peer_id, "echo", b"", timeout=5) for _ in range(32)))
        task = asyncio.ensure_future(b.push(A.peer_id, "none", b"", _forever(), timeout=5))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    await wait_for(lambda: asyncio.all_tasks() == before)


# --- the port ---------------------------------------------------------------------------------


async def test_a_taken_port_names_the_process_and_a_free_port() -> None:
    async with HttpTransport(A, listen="127.0.0.1:0") as a:
        assert a.listening is not None
        port = a.listening[1]
        second = HttpTransport(B, listen=f"127.0.0.1:{port}")
        with pytest.raises(OperatorError) as error:
            await second.start()
        assert error.value.code == "E303"
        assert str(os.getpid()) in error.value.why
        free = error.value.fix.rpartition(" ")[2]
        async with HttpTransport(B, listen=free) as other:
            assert other.listening is not None
        await second.aclose()


@pytest.mark.parametrize(
    "listen", ["203.0.113.1:4390", "no-such-host.invalid:4390", "127.0.0.1", "a b:1", "::1:x"]
)
async def test_what_cannot_be_listened_on_is_explained(listen: str) -> None:
    with pytest.raises(OperatorError) as error:
        await HttpTransport(A, listen=listen).start()
    assert error.value.code == "E102"


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0", "localhost:0"])
async def test_every_usual_way_to_listen(listen: str) -> None:
    async with HttpTransport(A, listen=listen) as a, HttpTransport(B) as b:
        assert a.listening is not None
        where = f"localhost:{a.listening[1]}"
        assert await b.dial(where) == A.peer_id


async def test_ipv6() -> None:
    async with HttpTransport(A, listen="[::1]:0") as a, HttpTransport(B) as b:
        a.on_call("echo", echo)
        assert await b.dial(address(a)) == A.peer_id
        assert await b.call(A.peer_id, "echo", b"x", timeout=5) == b"x"
        assert b.book.addresses(A.peer_id)[0].startswith("[::1]:")


@pytest.mark.skipif(not link_local(), reason="this machine has no link-local address")
async def test_a_link_local_address_is_told_as_it_can_be_dialled() -> None:
    host = link_local()
    async with HttpTransport(A, listen=f"[{host}]:0") as a, HttpTransport(B) as b:
        assert a.listening is not None
        assert a.listening[0] == host
        assert await b.dial(address(a)) == A.peer_id


async def test_misuse_is_our_own_mistake() -> None:
    transport = HttpTransport(A)
    with pytest.raises(LocalProtocolError, match="not started"):
        await transport.call(B.peer_id, "echo", b"", timeout=1)
    async with transport:
        assert transport.listening is None
        with pytest.raises(LocalProtocolError, match="twice"):
            await transport.start()
        for name in ("", "../etc", "a/b", "ä", "x" * 129):
            with pytest.raises(LocalProtocolError):
                transport.on_call(name, echo)
            with pytest.raises(LocalProtocolError):
                await transport.call(B.peer_id, name, b"", timeout=1)


def _forever() -> Outgoing:
    async def chunks() -> AsyncIterator[Buffer]:
        await asyncio.Event().wait()
        yield b""

    return Outgoing(1, chunks())


async def test_strangers_are_only_let_greet() -> None:
    known: set[PeerId] = set()
    async with two() as (b, a):  # b listens
        b.on_call("hello", echo)
        b.on_call("round", echo)
        b.admit(lambda peer, name: name == "hello" or peer in known)
        assert await a.call(b.peer_id, "hello", b"hi", timeout=5) == b"hi"
        with pytest.raises(RemoteRefused) as refused:
            await a.call(b.peer_id, "round", b"x", timeout=5)
        assert refused.value.code == "stranger"
        known.add(a.peer_id)
        assert await a.call(b.peer_id, "round", b"x", timeout=5) == b"x"
