"""The API's listener, and `node status`, which finds it through the state directory."""

import asyncio
import contextlib
import json
import os
import re
import socket
from dataclasses import replace

import aiohttp
import pytest
from api_kit import KEY, PEER, Kit

from node import status
from node.monitor import api
from node.monitor.api import ApiServer, make_app
from node.monitor.events import JoinProgress, RoundDone, Validation
from node.monitor.history import History
from node.monitor.terminal import drawing
from node.monitor.views import GpuView, KnownLinks, LinkView, MachineView, PeerView, RunView
from node.statedir import StateDir
from protocols.bounds import ENDLESS_ROUNDS
from protocols.errors import OperatorError


@pytest.fixture
def kit():
    return Kit()


@pytest.fixture
async def server(kit):
    server = ApiServer(make_app(kit.state, kit.log, History()), "127.0.0.1:0", may_move=False)
    await server.start()
    yield server
    await server.aclose()


async def test_a_port_in_use_is_e303_or_moved(kit, server):
    with pytest.raises(OperatorError) as caught:
        await ApiServer(
            make_app(kit.state, kit.log, History()), server.address, may_move=False
        ).start()
    assert caught.value.code == "E303"
    assert f"process {os.getpid()} listens" in caught.value.why
    assert "--api 127.0.0.1:" in caught.value.fix
    other = ApiServer(make_app(kit.state, kit.log, History()), server.address, may_move=True)
    try:
        assert await other.start() != server.address
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{other.address}/metrics") as answer,
        ):
            assert answer.status == 200
    finally:
        await other.aclose()


async def connected(address):
    """Whether a connection is kept open for as long as an answer takes; it stays open."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        async with asyncio.timeout(20):
            return writer, (await reader.read(9)) == b"HTTP/1.1 "
    except ConnectionError:
        return writer, False


async def test_connections_are_bounded_and_those_that_end_make_room(server, monkeypatch):
    monkeypatch.setattr(api, "MAX_CONNECTIONS", 3)
    held = [await connected(server.address) for _ in range(3)]
    assert all(there for _, there in held)
    more, there = await connected(server.address)
    assert not there
    more.close()
    held[0][0].close()
    async with asyncio.timeout(20):
        while True:
            another, there = await connected(server.address)
            another.close()
            if there:
                break
            await asyncio.sleep(0.01)
    for writer, _ in held[1:]:
        writer.close()


async def test_half_a_request_is_not_waited_for(kit, monkeypatch):
    monkeypatch.setattr(api, "IDLE_S", 0.2)
    server = ApiServer(make_app(kit.state, kit.log, History()), "127.0.0.1:0")
    reader, writer = await asyncio.open_connection(*(await server.start()).split(":"))
    try:
        writer.write(b"GET / HTTP/1.1\r\nHost: loc")
        async with asyncio.timeout(20):
            assert await reader.read() == b""
    finally:
        writer.close()
        await server.aclose()


async def test_what_is_no_http_leaves_no_traceback_of_ours(server, caplog):
    for sent in (b"\x16\x03\x01\x00\x05hello", b"GET /\0 HTTP/1.1\r\nHost: localhost\r\n\r\n"):
        reader, writer = await asyncio.open_connection(*server.address.split(":"))
        writer.write(sent)
        async with asyncio.timeout(20):
            assert (await reader.read()).startswith(b"HTTP/1.0 400 ")
        writer.close()
    assert not caplog.records


async def test_a_host_that_is_not_ours(kit):
    server = ApiServer(make_app(kit.state, kit.log, History()), "nowhere.invalid:0", may_move=False)
    with pytest.raises(OperatorError) as caught:
        await server.start()
    assert caught.value.code == "E102"


async def test_status_finds_the_daemon(tmp_path, kit, server):
    kit.live()
    directory = StateDir(tmp_path)
    directory.lock()
    directory.publish_api(server.address)
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


async def test_links_of_all_are_asked_for_apart_and_short(kit, server):
    views = [LinkView("a", "b", 1e6, 0.25, 3.2), LinkView("b", "a", None, 0.25)]
    kit.state.providers.all_links = lambda: KnownLinks(views)
    found = await asyncio.to_thread(status.ask, server.address, "", "/api/v1/links", "links")
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
    server = ApiServer(
        make_app(kit.state, kit.log, History(), key=KEY), "127.0.0.1:0", may_move=False
    )
    await server.start()
    try:
        with pytest.raises(OperatorError, match="key"):
            await asyncio.to_thread(status.fetch, tmp_path, api=server.address)
        state = await asyncio.to_thread(status.fetch, tmp_path, api=server.address, key=KEY)
        assert state["node"]["name"] == "alps"
    finally:
        await server.aclose()


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


async def test_a_node_that_fails_is_not_said_to_be_something_else(kit, server):
    kit.state.providers.peers = None
    with pytest.raises(OperatorError, match="fails to answer") as caught:
        await asyncio.to_thread(status.fetch, None, api=server.address)
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


# --- the state directory ----------------------------------------------------------------------


def test_one_daemon_a_directory(tmp_path):
    first, second = StateDir(tmp_path / "s"), StateDir(tmp_path / "s")
    first.lock()
    with pytest.raises(OperatorError, match="in use") as caught:
        second.lock()
    assert caught.value.code == "E105"
    first.unlock()
    second.lock()
    second.unlock()


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError) as caught:
        StateDir(tmp_path / "file" / "s").lock()
    assert caught.value.code == "E105"


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"address": 1}', '{"address":"a:1","pid":"x"}', "[" * 4096]
)
def test_a_damaged_api_file_is_as_good_as_none(tmp_path, text):
    (tmp_path / "api.json").write_text(text)
    assert StateDir(tmp_path).find_api() is None


async def test_of_a_node_that_was_killed_nobody_else_is_taken_for_it(tmp_path, server):
    """Its file is still there, and another node has its port now."""
    killed = StateDir(tmp_path)
    killed.lock()
    killed.publish_api(server.address)
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
