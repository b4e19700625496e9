"""The dashboard's routes: page, policy, key, first picture, stream."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
from collections.abc import AsyncIterator
from importlib.resources import files
from typing import Any

import pytest
from aiohttp import ClientResponse
from aiohttp.test_utils import TestClient, TestServer
from dashboard_kit import Imagined

from node.config import NodeConfig, resolve
from node.daemon import Daemon
from node.monitor import dashboard
from node.monitor.api import make_app
from node.monitor.console import render
from node.monitor.dashboard import POLICY, STATIC, Cursor, Feed
from node.monitor.events import CheckpointSaved, Notice, Started
from node.statedir import StateDir
from protocols.errors import OperatorError

KEY = "k" * 20
WEB = files("node.monitor").joinpath("web")
Browser = TestClient[Any, Any]


@pytest.fixture
def swarm() -> Imagined:
    return Imagined(4, 30)


@pytest.fixture
async def client(swarm: Imagined) -> AsyncIterator[Browser]:
    async with TestClient(TestServer(make_app(swarm.state, swarm.log, swarm.history))) as client:
        yield client


@pytest.fixture
async def guarded(swarm: Imagined) -> AsyncIterator[Browser]:
    app = make_app(swarm.state, swarm.log, swarm.history, key=KEY)
    async with TestClient(TestServer(app)) as client:
        yield client


async def event(answer: ClientResponse) -> dict[str, str]:
    """The next event of a stream that is one."""
    while True:
        block = (await asyncio.wait_for(answer.content.readuntil(b"\n\n"), 20)).decode()
        lines = dict(line.split(": ", 1) for line in block.strip().splitlines())
        if "data" in lines:
            return lines


# --- the page ------------------------------------------------------------------------------------


async def test_the_page_and_all_it_names(client: Browser) -> None:
    answer = await client.get("/")
    assert answer.status == 200
    assert answer.content_type == "text/html"
    text = await answer.text()
    named = set(re.findall(r'(?:src|href)="/static/([^"]+)"', text))
    assert named == set(STATIC)
    for name in named:
        asset = await client.get(f"/static/{name}")
        assert asset.status == 200, name
        assert asset.content_type == STATIC[name]
        assert await asset.read() == WEB.joinpath(name).read_bytes()


async def test_scripts_import_only_what_is_served() -> None:
    for name in STATIC:
        text = WEB.joinpath(name).read_text()
        assert set(re.findall(r'from "\./([^"]+)"', text)) <= set(STATIC)


async def test_nothing_comes_from_elsewhere() -> None:
    for file in WEB.iterdir():
        if file.name.endswith((".html", ".js", ".css")) and file.name != "uplot.js":
            assert "//" not in re.sub(
                r"(^|\s)//.*|http://www\.w3\.org\S*", "", file.read_text(), flags=re.M
            ), file.name


def test_scripts_are_small() -> None:
    total = sum(len(WEB.joinpath(name).read_bytes()) for name in STATIC if name.endswith(".js"))
    assert total < 150_000


async def test_the_policy_allows_nothing_inline(client: Browser) -> None:
    answer = await client.get("/")
    assert answer.headers["Content-Security-Policy"] == POLICY
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY
    text = await answer.text()
    assert not re.search(r"<script(?![^>]*\ssrc=)", text)
    assert not re.search(r"\s(style|on\w+)=", text)
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_what_has_not_changed_is_not_sent_again(client: Browser) -> None:
    first = await client.get("/static/app.js")
    again = await client.get("/static/app.js", headers={"If-None-Match": first.headers["ETag"]})
    assert again.status == 304
    other = await client.get("/static/app.js", headers={"If-None-Match": '"other"'})
    assert other.status == 200


@pytest.mark.parametrize(
    "path", ["README.md", "..%2fapi.py", "%2e%2e/api.py", "index.html2", "uplot.LICENSE"]
)
async def test_no_other_file_is_served(client: Browser, path: str) -> None:
    assert (await client.get(f"/static/{path}")).status == 404


# --- the key -------------------------------------------------------------------------------------


async def test_the_page_needs_no_key_and_all_else_does(guarded: Browser) -> None:
    for path in ("/", "/static/app.js", "/healthz"):
        assert (await guarded.get(path)).status != 401, path
    for path in ("dashboard", "history", "stream", "state", "events"):
        assert (await guarded.get(f"/api/v1/{path}")).status == 401, path
        wrong = {"Authorization": "Bearer " + "x" * 20}
        assert (await guarded.get(f"/api/v1/{path}", headers=wrong)).status == 401, path
        answer = await guarded.get(f"/api/v1/{path}?key={KEY}")
        assert answer.status == 401, "a key in an address ends up in logs"
    right = {"Authorization": f"Bearer {KEY}"}
    assert (await guarded.get("/api/v1/dashboard", headers=right)).status == 200


async def test_it_is_read_only(client: Browser) -> None:
    for path in ("/", "/api/v1/dashboard", "/api/v1/stream"):
        assert (await client.post(path)).status == 405
    # a stream has no end, whoever asks for its headers alone would hold a place in it
    assert (await client.head("/api/v1/stream")).status == 405


def daemon(tmp_path: Any, **settings: str) -> Daemon:
    return Daemon(NodeConfig(dir=tmp_path, **settings), None)


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({}, False),
        ({"dashboard": "127.0.0.1:0"}, False),
        ({"dashboard": "[::1]:0"}, False),
        ({"dashboard": "127.0.0.1:0", "api_key": KEY}, True),
        ({"dashboard": "0.0.0.0:4392"}, True),
        ({"dashboard": "watch.example:4392", "api_key": KEY}, True),
    ],
)
def test_others_need_a_key(tmp_path: Any, settings: dict[str, str], needed: bool) -> None:
    key = daemon(tmp_path, **settings)._dashboard_key()
    assert bool(key) == needed
    assert key == settings.get("api_key", key)
    assert len(key) >= 16 or not needed


def test_the_key_that_is_made_stays_and_is_private(tmp_path: Any) -> None:
    first = daemon(tmp_path, dashboard="0.0.0.0:1")._dashboard_key()
    assert StateDir(tmp_path).dashboard_key() == first
    assert (tmp_path / "dashboard.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "dashboard.key").write_text("short")
    assert len(StateDir(tmp_path).dashboard_key()) >= 16


def test_the_key_is_printed_for_people_and_not_into_a_journal(tmp_path: Any) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    one = daemon(tmp_path, dashboard="0.0.0.0:1")
    one.dashboard_key = one._dashboard_key()
    assert one.printed_key(Terminal()) == one.dashboard_key
    assert one.printed_key(io.StringIO()) == ""
    assert one.dashboard_key not in one.where_key_is()
    assert str(tmp_path / "dashboard.key") in one.where_key_is()
    given = daemon(tmp_path, dashboard="0.0.0.0:1", api_key=KEY)
    assert KEY not in given.where_key_is()


def test_the_banner_shows_the_address_and_the_log_no_key() -> None:
    event = Started(peer="p", run="r", version="1", api="127.0.0.1:1", dashboard="203.0.113.7:4392")
    assert f"http://203.0.113.7:4392/#key={KEY}" in render(event, KEY)
    assert "http://203.0.113.7:4392/\n" in render(event) + "\n"
    assert "#key=ab%2Bcd%26ef%2541%23%2F\n" in render(event, "ab+cd&ef%41#/") + "\n"
    assert "for others" not in render(Started(peer="p", run="r", version="1", api="127.0.0.1:1"))


def test_a_bad_address_is_told(tmp_path: Any) -> None:
    with pytest.raises(OperatorError, match="dashboard"):
        resolve({"dashboard": "nowhere", "dir": str(tmp_path)}, {})
    given = resolve({}, {"ATOLL_DASHBOARD": "0.0.0.0:4392", "ATOLL_DIR": str(tmp_path)})
    assert given.dashboard == "0.0.0.0:4392"


# --- the first picture ---------------------------------------------------------------------------


async def test_the_picture_has_all_panels(client: Browser, swarm: Imagined) -> None:
    picture = await (await client.get("/api/v1/dashboard?points=10")).json()
    assert picture["state"]["run"]["label"] == "deep-sea-8c41"
    assert picture["history"]["columns"]["round"] == [*range(3, 28, 4), 28, 29]  # of at most 10
    assert len(picture["history"]["islands"]) == 4
    assert len(picture["rounds"]) == dashboard.SHOWN_ROUNDS
    assert picture["state"]["peers"][1]["merged_tokens"] == swarm.history.totals[swarm.ids[1]] > 0
    assert [event["kind"] for event in picture["events"]] == ["peer_joined", "checkpoint"]
    assert picture["state"]["machine"]["cores"] == 64
    assert picture["state"]["alarms"] == []
    assert Cursor.parse(picture["cursor"]) is not None


async def test_a_name_that_is_no_utf_8_stops_nothing(client: Browser, swarm: Imagined) -> None:
    name = os.fsdecode(b"/data/caf\xe9.jpg")
    swarm.log.emit(Notice(text=f"leaves out {name}"))
    swarm.log.emit(CheckpointSaved(round=5, path=name))
    for path in ("dashboard", "events", "state", "links", "history"):
        answer = await client.get(f"/api/v1/{path}")
        assert (answer.status, answer.content_type) == (200, "application/json"), path
    assert "/data/caf?.jpg" in str(await (await client.get("/api/v1/events")).json())
    update = await event(await client.get(f"/api/v1/stream?since={swarm.log.instance}.0.0"))
    assert "/data/caf?.jpg" in str(json.loads(update["data"])["events"])


async def test_the_history_by_itself(client: Browser) -> None:
    found = await (await client.get("/api/v1/history?last=5")).json()
    assert found["columns"]["round"] == [25, 26, 27, 28, 29]
    for query in ("points=x", "last=-1", "points=1e3", "last=" + "9" * 20):
        assert (await client.get(f"/api/v1/history?{query}")).status == 400


def test_what_an_island_brought_is_counted_when_it_is_known_no_more(swarm: Imagined) -> None:
    feed, views = Feed(swarm.state, swarm.log, swarm.history), swarm.peers
    before = feed.picture(10)["state"]["merged_tokens"]
    assert before == sum(swarm.history.totals.values()) == sum(swarm.merged)
    swarm.state.providers.peers = lambda: views()[:2]
    assert feed.picture(10)["state"]["merged_tokens"] == before


# --- the stream ----------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "INTERVAL_S", 0.02)


async def test_an_update_has_the_form_of_server_sent_events(client: Browser) -> None:
    async with client.get("/api/v1/stream") as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        assert await answer.content.readuntil(b"\n\n") == b"retry: 2000\n\n"
        first = await event(answer)
        assert first["event"] == "update"
        assert Cursor.parse(first["id"]) is not None
        assert json.loads(first["data"])["rows"] == []


@pytest.mark.usefixtures("quick")
async def test_a_reader_that_comes_back_misses_nothing(client: Browser, swarm: Imagined) -> None:
    async with client.get("/api/v1/stream") as answer:
        seen = await event(answer)
    swarm.step()
    swarm.log.emit(Notice(text="meanwhile"))
    swarm.step()
    async with client.get("/api/v1/stream", headers={"Last-Event-ID": seen["id"]}) as answer:
        news = json.loads((await event(answer))["data"])
        assert [row["round"] for row in news["rows"]] == [30, 31]
        assert [item["round"] for item in news["rounds"]] == [30, 31]
        assert [item["kind"] for item in news["events"]] == ["notice"]
        assert json.loads((await event(answer))["data"])["rows"] == []
        swarm.step()
        while not (news := json.loads((await event(answer))["data"]))["rows"]:
            pass
        assert [row["round"] for row in news["rows"]] == [32]


@pytest.mark.parametrize("cursor", ["0123abcd.1.1", "x", "..", "ffffffffffffffff.999.999"])
async def test_a_reader_of_another_process_starts_anew(client: Browser, cursor: str) -> None:
    async with client.get(f"/api/v1/stream?since={cursor}") as answer:
        assert (await event(answer))["event"] == "restart"


def test_who_was_away_too_long_starts_anew(swarm: Imagined) -> None:
    feed = Feed(swarm.state, swarm.log, swarm.history)
    cursor = feed.cursor()
    for number in range(3000):
        swarm.log.emit(Notice(text=str(number)))
    assert feed.update(cursor)[1].startswith(b"event: restart")


def test_the_state_is_put_into_words_once_a_second(swarm: Imagined) -> None:
    now = [0.0]
    feed = Feed(swarm.state, swarm.log, swarm.history, clock=lambda: now[0])
    asked = []
    views = swarm.peers
    swarm.state.providers.peers = lambda: asked.append(1) or views()  # type: ignore[func-returns-value]
    for _ in range(20):
        feed.update(feed.cursor())
    assert len(asked) == 1
    now[0] = dashboard.INTERVAL_S
    feed.update(feed.cursor())
    assert len(asked) == 2


def test_links_are_looked_up_once_for_all_readers_of_a_moment(swarm: Imagined) -> None:
    now, looks = 100.0, []
    swarm.state.providers.all_links = lambda: looks.append(now) or swarm.all_links()  # type: ignore[func-returns-value]
    feed = Feed(swarm.state, swarm.log, swarm.history, clock=lambda: now)
    assert feed.links() == feed.links() == swarm.state.links()
    assert looks == [100.0, 100.0]
    now += dashboard.LINKS_S
    feed.links()
    assert len(looks) == 3
    # which nobody reads in each second's state
    assert "links" not in feed.picture(10)["state"]["network"]
    assert len(swarm.state.snapshot()["network"]["links"]) == 6


async def test_too_many_readers_are_told(client: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dashboard, "MAX_READERS", 1)
    async with client.get("/api/v1/stream") as answer:
        await event(answer)
        assert (await client.get("/api/v1/stream")).status == 503


@pytest.mark.usefixtures("quick")
async def test_readers_that_left_are_forgotten(swarm: Imagined) -> None:
    app = make_app(swarm.state, swarm.log, swarm.history)
    async with TestClient(TestServer(app)) as client:
        async with client.get("/api/v1/stream") as answer:
            await event(answer)
            assert app[dashboard.FEED].readers == 1
            answer.close()
        async with asyncio.timeout(20):
            while app[dashboard.FEED].readers:  # noqa: ASYNC110 - a number, not an event
                await asyncio.sleep(0.01)


@pytest.mark.usefixtures("quick")
async def test_who_reads_no_more_gives_its_place_up(
    swarm: Imagined, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard, "STUCK_S", 0.2)
    monkeypatch.setattr(dashboard.Feed, "update", lambda feed, cursor: (cursor, bytes(2**22)))
    app = make_app(swarm.state, swarm.log, swarm.history)
    async with TestServer(app) as server, asyncio.timeout(20):
        _, writer = await asyncio.open_connection(server.host, server.port)  # reads 64 KB at most
        writer.write(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        for readers in (1, 0):
            while app[dashboard.FEED].readers != readers:  # noqa: ASYNC110 - a number, not an event
                await asyncio.sleep(0.01)
        writer.close()


async def test_the_stream_ends_with_the_node(swarm: Imagined) -> None:
    server = TestServer(make_app(swarm.state, swarm.log, swarm.history))
    async with TestClient(server) as client, client.get("/api/v1/stream") as answer:
        await event(answer)
        async with asyncio.timeout(20):
            await server.close()
            await answer.content.read()
