"""A host of an island that only trains is asked to stop."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from helper_kit import following, training
from hub_kit import WAIT_S, hub, quicken, until
from signals_kit import signals_kept

from node import directories
from node.hosts.remote import HOST_LOST


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quicken(monkeypatch)


async def test_ctrl_c_stops_a_helper_and_a_second_one_ends_it_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A thread that is at something long, as hashing tokens, does not hold that up."""
    statuses: list[int] = []
    monkeypatch.setattr("node.hosts.helper.os._exit", statuses.append)
    monkeypatch.setattr("node.interrupts.ECHO_S", 0.0)
    async with hub() as (made, _), following(tmp_path, made.port) as running:
        await until(lambda: "host 0 is there" in capsys.readouterr().out)
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGINT)
        assert await running == 0
    assert statuses == [130]
    assert "leaving: SIGINT (Ctrl-C again stops now)" in capsys.readouterr().out


async def test_a_signal_that_comes_with_its_echo_stops_a_helper_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As from ``timeout``, which sends it to its child and then to the group."""
    statuses: list[int] = []
    monkeypatch.setattr("node.hosts.helper.os._exit", statuses.append)
    async with hub() as (made, _), following(tmp_path, made.port) as running:
        await until(lambda: "host 0 is there" in capsys.readouterr().out)
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(0)
        signal.raise_signal(signal.SIGTERM)
        assert await running == 0
    assert not statuses


async def test_node_stop_and_node_runs_know_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "user"))
    async with hub() as (made, _), following(tmp_path, made.port) as running:
        await until(lambda: made.hosts)
        (found,) = directories.noted()
        assert found == tmp_path / "host-1"
        assert directories.look(found).role == "host 1"
        ended = asyncio.to_thread(directories.stop, tmp_path, timeout_s=WAIT_S, now=False)
        assert await ended == os.getpid()
        assert await asyncio.wait_for(running, WAIT_S) == 0


async def test_where_all_hosts_are_stopped_at_once_ranks_run_until_host_0_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs them for its last checkpoint. Slurm and Kubernetes stop all hosts together."""
    monkeypatch.setattr("node.hosts.hub.LEAVING_S", 0.01)
    async with training(tmp_path, monkeypatch) as (made, running, rank, started):
        asked = asyncio.Event()

        def leaving() -> bool:
            asked.set()
            return True

        made.leaving = leaving
        signal.raise_signal(signal.SIGTERM)
        await asyncio.wait_for(asked.wait(), WAIT_S)
        assert started[0].running
        assert not running.done()
        rank.signal(signal.SIGTERM)  # as it leaves
        assert await asyncio.wait_for(rank.wait(), WAIT_S) == -signal.SIGKILL
        assert not running.done()
        await made.aclose()
        assert await asyncio.wait_for(running, WAIT_S) == 0


async def test_where_the_terminals_of_all_hosts_are_closed_ranks_run_until_host_0_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ssh to all of them goes down. SIGHUP comes of the kernel, and of the shell."""
    statuses: list[int] = []
    monkeypatch.setattr("node.hosts.helper.os._exit", statuses.append)
    monkeypatch.setattr("node.interrupts.ECHO_S", 0.0)
    with signals_kept():
        # to be seen by this test where nobody catches it, and caught also under nohup
        signal.signal(signal.SIGHUP, lambda *_: None)
        async with training(tmp_path, monkeypatch) as (made, running, _, started):
            signal.raise_signal(signal.SIGHUP)
            await until(made.hosts[1].leaving.is_set)
            signal.raise_signal(signal.SIGHUP)
            assert started[0].running
            await made.aclose()
            assert await asyncio.wait_for(running, WAIT_S) == 0
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
    assert not statuses


async def test_under_nohup_a_closed_terminal_stops_no_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with signals_kept():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        async with training(tmp_path, monkeypatch):
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


async def test_a_host_that_is_stopped_alone_is_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.hosts.hub.LEAVING_S", 0.01)
    async with training(tmp_path, monkeypatch) as (_, running, rank, started):
        signal.raise_signal(signal.SIGTERM)
        assert await asyncio.wait_for(rank.wait(), WAIT_S) == HOST_LOST
        assert rank.tail() == "it was stopped"
        assert await asyncio.wait_for(running, WAIT_S) == 0
        assert not started[0].running


async def test_a_host_that_is_leaving_gets_no_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with training(tmp_path, monkeypatch) as (made, *_):
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: not made.ready)
        assert "host 1 (is leaving) is missing" in made._missing()
        assert not made.grown


async def test_a_host_that_waits_for_host_0_ends_at_the_second_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr("node.hosts.helper.os._exit", statuses.append)
    monkeypatch.setattr("node.interrupts.ECHO_S", 0.0)
    async with training(tmp_path, monkeypatch) as (made, *_):
        signal.raise_signal(signal.SIGTERM)
        await until(made.hosts[1].leaving.is_set)
        assert statuses == []
        signal.raise_signal(signal.SIGTERM)
        await until(lambda: statuses)
    assert statuses == [130]
