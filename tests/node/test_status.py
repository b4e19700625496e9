"""`node status`: it finds a node through the state directory, asks it, and says what it is told."""

import asyncio
import contextlib
import json
import os
import re
import socket
from dataclasses import replace

import pytest
from api_kit import KEY, PEER, listening

from node import outermost, status
from node.monitor.events import (
    CheckpointSaved,
    CheckpointSkipped,
    JoinProgress,
    RoundDone,
    Validation,
)
from node.monitor.terminal import drawing
from node.monitor.views import GpuView, KnownLinks, LinkView, MachineView, PeerView, RunView
from node.statedir import StateDir
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import OperatorError


async def test_status_finds_the_daemon(tmp_path, kit, api_server):
    kit.live()
    directory = StateDir(tmp_path)
    directory.lock()
    directory.publish_api(api_server.address)
    assert directory.api_file.stat().st_mode & 0o077 == 0
    state = await asyncio.to_thread(status.fetch, tmp_path)
    text = status.render(state)
    for expected in (
        "alps  island  active  up 1m  cpu",
        "run       tiny-docs-8c41  round 4/100  ETA 2m",
        "step 40  loss 2.50  val 2.45  14,021 tokens/s",
        "consensus 0.500 -> 0.100  2/3 merged  3 agree bit for bit",
        "compressed 8.0x  codec int4",
        "20 ms",
        "health    ok",
        f"join      node start --peers a:1/{PEER}",
    ):
        assert expected in text
    assert "\x1b" not in text
    assert all(len(line) <= 100 for line in text.splitlines())
    directory.withdraw_api()
    directory.unlock()
    with pytest.raises(OperatorError) as caught:
        status.fetch(tmp_path)
    assert caught.value.code == "E106"


async def test_status_of_a_fresh_node_renders(kit):
    assert "it is starting\n" in status.render(kit.state.snapshot())


def test_health_does_not_hide_a_critical_alarm(kit):
    """/healthz stays as it is: a node that trains on a full disk is not to be restarted."""
    kit.live()
    kit.log.emit(CheckpointSkipped(round=4, reason="no room (E402)"))
    assert not kit.state.unhealthy()
    state = json.loads(json.dumps(kit.state.snapshot()))
    assert "\nhealth    ok, but for the alarm (checkpoint)\n" in status.render(state)
    assert drawing.node(state).plain.startswith("this node  ok, but for the alarm (checkpoint)\n")
    kit.log.emit(CheckpointSaved(round=5, path="x"))
    assert "\nhealth    ok\n" in status.render(json.loads(json.dumps(kit.state.snapshot())))


async def test_a_seed_without_a_run_says_what_it_waits_for(kit):
    """It may do so for days, and an alert points at the reason."""
    kit.state.node, kit.state.run = replace(kit.state.node, role="seed"), None
    assert kit.state.unhealthy() == ["it is starting: it waits for an island to bring the run"]
    kit.live()
    assert not kit.state.unhealthy()


def test_status_shows_who_is_in_trouble_before_all_others(kit):
    kit.state.providers.peers = lambda: [
        PeerView(peer="me", name="me", status="active", round=9, link="self"),
        *(
            PeerView(
                peer=f"p{n}",
                name=f"p{n}",
                status="suspect" if n == 30 else "active",
                round=5 if n == 40 else 9,
                agrees=n != 50,
            )
            for n in range(63)
        ),
    ]
    kit.state.status = "active"
    lines = status.render(kit.state.snapshot()).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("peer "))
    assert [line.split()[0] for line in lines[first + 1 : first + 5]] == ["me", "p50", "p30", "p40"]
    assert "… and 48 more: 48 active" in lines
    assert next(i for i, line in enumerate(lines) if line.startswith("ALARM")) < first


def test_the_time_left_passes_between_rounds(kit):
    """No further than to the next one: where that is late, so is the end."""

    def left():
        return kit.state.brief()["training"]["eta_s"]

    assert left() is None
    kit.log.emit(RoundDone(round=4, total_rounds=7, eta_s=7200.0))  # two of an hour each
    assert left() == 7200.0
    kit.now += 1500
    assert left() == 5700.0
    kit.now += 86_400
    assert left() == 3600.0


def test_status_tells_how_far_joining_has_come(kit):
    kit.state.status = "joining"
    kit.log.emit(JoinProgress(step=4, name="discover", text="5 islands"))
    kit.log.emit(JoinProgress(step=5, name="sync", text="12%, 1.2 of 10.4 GB, 7m left"))
    text = status.render(kit.state.snapshot())
    assert "joining   [5/6] sync 12%, 1.2 of 10.4 GB, 7m left" in text
    kit.state.status = "active"
    assert "joining" not in status.render(kit.state.snapshot())


def test_status_of_gpus_and_of_a_run_without_an_end(kit):
    card = GpuView(
        index=0, name="NVIDIA H100", utilisation=0.87, memory_used=21_500_000_000,
        memory_total=85_900_000_000, temperature_c=61.0, power_w=350.5,
    )  # fmt: skip
    kit.state.providers.machine = lambda: MachineView(gpus=(card, GpuView(index=1, name="Idle")))
    kit.state.run = RunView(id="ab", label="x", total_rounds=ENDLESS_ROUNDS, manifest={})
    state = json.loads(json.dumps(kit.state.snapshot()))
    text = status.render(state)
    assert "gpu       0 NVIDIA H100  87% used  21.5 of 85.9 GB  61 °C  350 W" in text
    assert "gpu       1 Idle\n" in text
    assert re.search(r"^run       x  round 0$", text, re.MULTILINE)


def test_the_newest_validation_stays_until_there_is_another(kit):
    kit.log.emit(Validation(round=0, step=0, validation_loss=5.5))
    assert kit.state.snapshot()["training"]["validation_loss"] == 5.5
    kit.log.emit(RoundDone(round=0, validation_loss=4.5))
    kit.log.emit(RoundDone(round=1))  # eval_every is 2
    assert kit.state.snapshot()["training"]["validation_loss"] == 4.5


async def test_links_of_all_are_asked_for_apart_and_short(kit, api_server):
    views = [LinkView("a", "b", 1e6, 0.25, 3.2), LinkView("b", "a", None, 0.25)]
    kit.state.providers.all_links = lambda: KnownLinks(views)
    found = await asyncio.to_thread(status.ask, api_server.address, "", "/api/v1/links", "links")
    assert found == {
        "peers": ["a", "b"],
        "links": [[0, 1, 1000000, 0.25, 3], [1, 0, None, 0.25, 0]],
    }


def test_the_join_line_says_that_an_invitation_is_needed(kit):
    kit.state.node = replace(kit.state.node, invitation_needed=True)
    assert f"--peers a:1/{PEER} --invitation" in status.render(kit.state.snapshot())


def test_the_join_line_says_that_text_is_to_be_brought(kit):
    said = status.render(kit.state.snapshot())
    assert "--data" not in said
    run = kit.state.run
    kit.state.run = replace(run, manifest=run.manifest | {"data": {"recipe": "text"}})
    assert f"--peers a:1/{PEER} --data …" in status.render(kit.state.snapshot())
    assert "--data …" in str(drawing.node(kit.state.snapshot()))


def test_a_join_line_that_few_can_use_says_so(kit):
    kit.state.node = replace(kit.state.node, join_address=f"192.168.1.20:4390/{PEER}")
    lines = status.render(kit.state.snapshot()).splitlines()
    assert [line.startswith("          (in your own network only") for line in lines].count(True)
    drawn = drawing.node(kit.state.snapshot()).plain.splitlines()
    assert drawn[-2].startswith("      (in your own network only; for others forward port 4390 ")
    kit.state.node = replace(kit.state.node, public_addr="192.168.1.20:4390")
    assert "own network only" not in status.render(kit.state.snapshot())
    assert "own network only" not in drawing.node(kit.state.snapshot()).plain


def test_a_run_of_scripts_is_joined_by_a_script(kit):
    run = replace(kit.state.run, manifest={"script": {"layout": "ab" * 32}})
    kit.state.run = run
    line = status.render(kit.state.snapshot()).splitlines()[-1]
    assert line == f'join      node.join(model, optimizer, peers="a:1/{PEER}"), in a script'
    drawn = drawing.node(kit.state.snapshot()).plain.splitlines()[-1]
    assert drawn == line.replace("join      ", "join: ")


async def test_status_with_a_key(tmp_path, kit):
    async with listening(kit, key=KEY) as server:
        with pytest.raises(OperatorError, match="key"):
            await asyncio.to_thread(status.fetch, tmp_path, api=server.address)
        state = await asyncio.to_thread(status.fetch, tmp_path, api=server.address, key=KEY)
        assert state["node"]["name"] == "alps"


def test_status_when_nobody_listens(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(OperatorError) as caught:
            status.fetch(tmp_path, api=f"127.0.0.1:{port}")
    assert caught.value.code == "E106"
    assert "refused" in caught.value.why


@pytest.mark.parametrize("body", [b"[]", b"[" * 100_000, b'{"schema":' * 100_000])
async def test_status_of_something_else(tmp_path, body):
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(OperatorError, match="not an Atoll node"):
            await asyncio.to_thread(status.fetch, tmp_path, api=f"{host}:{port}")


async def test_a_node_that_fails_is_not_said_to_be_something_else(kit, api_server):
    kit.state.providers.peers = None
    with pytest.raises(OperatorError, match="fails to answer") as caught:
        await asyncio.to_thread(status.fetch, None, api=api_server.address)
    assert "status 500" in caught.value.why
    assert "logs/daemon.log" in caught.value.fix


@pytest.mark.parametrize("head", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"])
async def test_an_answer_that_drips_is_not_waited_for(monkeypatch, head):
    monkeypatch.setattr(status, "WHOLE_S", 0.5)
    left = asyncio.Event()

    async def answer(reader, writer):
        with contextlib.suppress(ConnectionError):
            writer.write(head)
            while not writer.is_closing():
                writer.write(b"H")
                await writer.drain()
                await asyncio.sleep(0.02)
        writer.close()
        left.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        async with asyncio.timeout(20):
            with pytest.raises(OperatorError) as caught:
                await asyncio.to_thread(status.fetch, None, api=f"{host}:{port}")
            await left.wait()
    assert caught.value.code == "E106"
    assert "takes more than 0.5 s" in caught.value.why


async def test_of_a_node_that_was_killed_nobody_else_is_taken_for_it(tmp_path, api_server):
    """Its file is still there, and another node has its port now."""
    killed = StateDir(tmp_path)
    killed.lock()
    killed.publish_api(api_server.address)
    assert await asyncio.to_thread(status.fetch, tmp_path)
    killed.unlock()
    with pytest.raises(OperatorError) as caught:
        await asyncio.to_thread(status.fetch, tmp_path)
    assert caught.value.code == "E106"
    assert str(tmp_path) in caught.value.what


def test_a_node_that_has_just_started_is_not_said_to_be_none(tmp_path):
    node = StateDir(tmp_path)
    node.lock()
    for left in ("", '{"address": "127.0.0.1:1", "pid": 999999999}'):  # the other: of one killed
        if left:
            node.api_file.write_text(left)
        with pytest.raises(OperatorError) as caught:
            status.fetch(tmp_path)
        assert caught.value.code == "E106"
        assert f"process {os.getpid()} has just started" in caught.value.why
        assert "node start" not in caught.value.fix


def test_a_host_of_an_island_that_only_trains_is_not_said_to_be_just_starting(tmp_path, capsys):
    """The image looks at its containers by this command."""
    host = StateDir(tmp_path / "host-1")
    host.lock(1)
    said = f"host 1 of an island, process {os.getpid()}; its state: node status on host 0\n"
    for where in (tmp_path, host.root):
        assert outermost.run(["status", "--dir", str(where)]) == 0
        assert capsys.readouterr().out == said
        assert outermost.run(["status", "--dir", str(where), "--json"]) == 0
        assert json.loads(capsys.readouterr().out) == {"role": "host 1", "pid": os.getpid()}
        with pytest.raises(OperatorError) as caught:
            status.find(where)
        assert caught.value.code == "E106"
        assert caught.value.what.endswith("but host 1 of an island")
        assert caught.value.fix == "ask on host 0"
    host.unlock()
    with pytest.raises(OperatorError, match="no node runs with the state directory"):
        status.report(host.root)


def test_of_several_hosts_in_one_directory_none_is_meant(tmp_path):
    hosts = [StateDir(tmp_path / f"host-{number}") for number in (1, 2)]
    for number, host in enumerate(hosts, 1):
        host.lock(number)
    with pytest.raises(OperatorError) as caught:
        status.report(tmp_path)
    assert caught.value.what == f"no node runs with the state directory {tmp_path}"
    assert status.report(hosts[1].root)["role"] == "host 2"


@pytest.mark.parametrize("elsewhere", [True, False])
def test_on_a_shared_disk_a_host_is_told_from_host_0_of_another_machine(tmp_path, elsewhere):
    node, host = StateDir(tmp_path), StateDir(tmp_path / "host-1")
    node.lock()
    host.lock(1)
    if elsewhere:
        (tmp_path / "daemon.lock").write_text("7 another boot/pid:[1]\n")
        assert status.report(tmp_path)["role"] == "host 1"
        (host.root / "daemon.lock").write_text("7 a third boot/pid:[1]\nhost-1\n")
    with pytest.raises(OperatorError, match="does not answer yet"):  # asks host 0
        status.report(tmp_path)


def test_on_a_shared_disk_a_host_of_another_machine_is_not_what_runs_here(tmp_path):
    """Where the node of this machine is dead, its container is to be found unhealthy."""
    host = StateDir(tmp_path / "host-1")
    host.lock(1)
    (host.root / "daemon.lock").write_text("7 another boot/pid:[1]\nhost-1\n")
    node = StateDir(tmp_path)
    node.lock()
    node.unlock()
    for ask in (status.report, status.find):
        with pytest.raises(OperatorError) as caught:
            ask(tmp_path)
        assert caught.value.what == f"no node runs with the state directory {tmp_path}"


@pytest.mark.parametrize("lost", ["training", "peers", "rounds"])
async def test_a_node_of_another_version_is_no_defect(kit, lost):
    """As after an upgrade under a node that goes on."""
    kit.live()
    state = kit.state.snapshot()
    state["node"]["version"] = "0.0.9"
    del state[lost]
    with pytest.raises(OperatorError) as caught:
        status.render(state)
    assert caught.value.code == "E202"
    assert "Atoll 0.0.9" in caught.value.why
    assert "node stop" in caught.value.fix
