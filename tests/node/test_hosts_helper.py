"""A host of an island that only trains: whom it follows, its tokens, its end."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from address_kit import DEAD, dead, named
from data_kit import folder, serving
from helper_kit import following, helper, training
from hub_kit import WAIT_S, hub, quicken, until
from trainer_kit import tiny_manifest

import node.hosts.hub
import node.hosts.wire
from node.hosts.helper import Helper
from node.hosts.remote import HOST_LOST
from node.hosts.tokens import fingerprint
from node.hosts.wire import Challenge, HostConnection, HostLostError, Job, Welcome, nonce
from node.statedir import Holder, StateDir
from protocols.errors import OperatorError


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


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


async def test_a_helper_is_the_same_however_often_it_connects(tmp_path: Path) -> None:
    async with hub() as (made, _):
        greeted = list[bytes]()
        one, another = (helper(tmp_path, made.port) for _ in range(2))
        for each in (one, one, another):
            connection = await each._dial()
            greeted.append(made.hosts[1].process)
            connection.close()
            await until(lambda: not made.hosts)
    assert greeted[0] == greeted[1] != greeted[2]


async def test_a_host_0_that_does_not_know_the_id_is_not_followed(tmp_path: Path) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = HostConnection(reader, writer)
        connection.send(Challenge(nonce()))
        await connection.receive()
        connection.send(Welcome(bytes(32)))
        with pytest.raises(HostLostError):
            await connection.receive()
        connection.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(OperatorError, match="host 0 does not know the rendezvous id"):
            await helper(tmp_path, port).main()


async def test_its_folder_says_which_host_it_is(tmp_path: Path) -> None:
    async with hub() as (made, _), following(tmp_path, made.port) as running:
        await until(lambda: made.hosts or running.done())
        holder = StateDir(tmp_path / "host-1").held_by()
        assert holder == Holder(os.getpid(), here=True, host=1)


async def test_host_0_is_found_at_whichever_of_its_addresses_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where its name has an IPv6 address as well, which leads nowhere."""
    monkeypatch.setattr("node.hosts.helper.DIAL_S", 3.0)
    named(monkeypatch, "host0.example", DEAD, "127.0.0.1")
    where = {"address": "host0.example", "wait_s": 1.0}
    async with hub() as (made, _):
        with dead(made.port):
            async with following(tmp_path, made.port, **where) as running:
                await until(lambda: made.hosts or running.done())
                assert made.hosts


def slow_tokens(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[str]:
    """Making tokens takes so long; the list grows with each time that it is begun."""
    begun: list[str] = []

    def made(*given: Any, cache: Path) -> str:
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


async def test_a_run_that_no_version_makes_any_more_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"some text " * 1000)
    slow_tokens(monkeypatch, 0.0)
    usual = tiny_manifest()
    rule = usual.outer.model_copy(update={"optimizer": "adam"})  # with another β₁ at first
    plain = usual.model_copy(update={"outer": rule}).model_dump_json().encode()
    job = Job(plain, b"", b"", str(text), fingerprint(str(text), 256))
    async with hub() as (made, _):
        made.offer(job)
        async with following(tmp_path, made.port):
            assert len(await asyncio.wait_for(made.muster(again=False), WAIT_S)) == 1


async def test_a_server_of_tokens_that_is_away_for_a_while_ends_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that comes back comes while the way to them is just as bad as that to host 0."""
    monkeypatch.setattr("node.data.patience.FIRST_PAUSE_S", 0.001)
    folder(tmp_path / "www" / "data")
    with serving(tmp_path / "www") as server:
        url = f"{server.url}/data"
        job = Job(tiny_manifest().model_dump_json().encode(), b"", b"", url, fingerprint(url, 256))
        for away in (4, 10**6):  # the second time there is a copy of what was read
            server.away = away
            async with hub() as (made, _):
                made.offer(job)
                async with following(tmp_path / "host", made.port):
                    assert len(await asyncio.wait_for(made.muster(again=False), WAIT_S)) == 1


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


SHORT = [  # of memory, processes, files
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable"),
    OSError(errno.EMFILE, "Too many open files"),
]


async def test_a_host_that_cannot_start_a_rank_for_the_moment_starts_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("node.hosts.helper.START_PAUSE_S", 0.01)
    async with training(tmp_path, monkeypatch, SHORT) as (made, running, rank, started):
        assert len(started) == 1
        assert not running.done()
        assert [host.number for host in made.ready] == [1]
        rank.signal(signal.SIGKILL)
        assert await asyncio.wait_for(rank.wait(), WAIT_S) == -signal.SIGKILL
    text = capsys.readouterr().out
    assert [str(failure.strerror) in text for failure in SHORT] == [True] * len(SHORT)


@pytest.mark.parametrize(
    "failures", [SHORT * 2, [PermissionError(errno.EACCES, "Permission denied")]]
)
async def test_a_host_that_cannot_start_ranks_ends_and_tells_host_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: list[OSError]
) -> None:
    monkeypatch.setattr("node.hosts.helper.START_PAUSE_S", 0.01)
    async with training(tmp_path, monkeypatch, failures) as (_, running, rank, started):
        with pytest.raises(OSError, match=str(failures[0].strerror)):
            await running
        assert await asyncio.wait_for(rank.wait(), WAIT_S) == HOST_LOST
        assert started == []


async def test_on_host_0s_machine_ranks_are_met_where_those_of_other_hosts_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By loopback, as this host has come, others would not get to them."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    async with training(tmp_path, monkeypatch, store="192.0.2.7:1") as (_, _, _, started):
        assert len(started) == 1
    assert "no interface of this host is known to have the address 192.0.2.7" in (
        capsys.readouterr().out
    )


async def test_a_host_0_that_stood_still_hears_that_it_was_given_up_and_blames_no_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch) as (made, _, rank, _):
        made.hosts[1].connection.send = lambda word: None  # type: ignore[method-assign]
        assert await asyncio.wait_for(rank.wait(), WAIT_S) == HOST_LOST
        assert rank.tail() == "it has given host 0 up: no sign of life for 0 s"


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


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "cannot take part: the disk is full"),
        (BlockingIOError(errno.EAGAIN, "Resource unavailable"), "BlockingIOError"),
    ],
)
async def test_whatever_ends_a_helper_is_told_to_host_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, text: str
) -> None:
    """Else it would wait for a host that was stopped, as if by its operator."""

    async def fails(self: Helper, job: Job) -> None:
        raise error

    monkeypatch.setattr(Helper, "_prepare", fails)
    async with hub() as (made, _):
        made.offer(Job(b"{}", b"", b"", "", bytes(32)))
        waiting = asyncio.ensure_future(made.muster(again=False))
        with pytest.raises(type(error)):
            await helper(tmp_path, made.port).main()
        with pytest.raises(OperatorError, match=text) as caught:
            await asyncio.wait_for(waiting, WAIT_S)
        assert caught.value.code == "E410"
