"""``node monitor``: pictures from a node, a log and a swarm; how they are drawn; what keys do."""

import asyncio
import json
import math
from dataclasses import replace

import pytest

from node import outermost
from node.config import resolve
from node.monitor.api import ApiServer, make_app
from node.monitor.event_log import EventLog
from node.monitor.events import (
    Notice,
    PeerJoined,
    PeerLeft,
    PeerSuspected,
    Problem,
    Record,
    RoundDone,
    RoundFailed,
    Started,
    Step,
)
from node.monitor.history import History
from node.monitor.observer import Observer
from node.monitor.reading import read_record
from node.monitor.state import NodeState
from node.monitor.terminal import drawing
from node.monitor.terminal.app import Monitor
from node.monitor.terminal.command import choose
from node.monitor.terminal.source import AttachedSource, Replay, ReplaySource, read_log
from node.monitor.views import NodeView
from protocols.errors import OperatorError
from protocols.identity import Identity

ME = str(Identity.from_seed(bytes(32)).peer_id)
PEERS = [ME, *(str(Identity.from_seed(bytes([n]) * 32).peer_id) for n in range(1, 3))]


def done(number, loss=3.0, **more):
    islands = {
        peer: {"loss": loss + i / 10, "tokens": 100, "distance": 0.1 + i / 100}
        for i, peer in enumerate(PEERS)
    }
    phases = {"compute": 1.0, "ready": 0.2, "match": 0.1, "exchange": 0.4, "certify": 0.05}
    values = {
        "round": number, "total_rounds": 50, "members": 3, "live": 3, "loss": loss,
        "validation_loss": loss, "consensus": 1 / (number + 1),
        "consensus_after": 0.25 / (number + 1), "agreeing": 3, "eta_s": 60.0,
        "phases": phases, "islands": islands, "sent_bytes": 1000, "raw_bytes": 8000,
    }  # fmt: skip
    return RoundDone(**(values | more))


@pytest.fixture
def log(tmp_path):
    """A log of twelve rounds, one second apart, with what may happen between."""
    now = [1000.0]
    events = EventLog(tmp_path / "events.jsonl", clock=lambda: now[0])
    events.emit(Started(peer=ME, run="tiny-docs-8c41", version="0.1.0", device="cpu"))
    for number in range(12):
        now[0] += 1.0
        events.emit(Step(step=number, round=number, loss=3.0, tokens=64))
        events.emit(done(number, loss=5.0 - number / 4, dropped={PEERS[2]: "late"}))
    events.emit(PeerJoined(peer=PEERS[1], name="beta"))
    events.emit(RoundFailed(round=12, reason="no majority"))
    events.emit(Problem(code="E402", what="full", why="w", fix="f"))
    events.emit(Notice(text="so it ends"))
    events.close()
    return tmp_path / "events.jsonl"


async def pictures(source, count=100):
    found = []
    stream = source.pictures()
    async for picture in stream:
        found.append(picture)
        if len(found) == count:
            break
    await stream.aclose()
    return found


# --- logs ---------------------------------------------------------------------------------------


def test_events_come_back_as_they_were_written(log):
    records = list(read_log(log))
    assert len(records) == 29
    assert [record.seq for record in records] == list(range(1, 30))
    assert records[2].event == done(0, loss=5.0, dropped={PEERS[2]: "late"})
    assert records[-1].event == Notice(text="so it ends")


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "nothing"}, {"kind": None}, {"time": "soon"}, {"seq": "1"}, {"round": "one"},
        {"outcome": "splendid"}, {"islands": {"a": 1}}, {"phases": 3},
        {"time": 10**400}, {"time": 1e300}, {"seq": True}, {"round": None}, {"round": 10**400},
        {"fragment": 1.5}, {"sent_bytes": None}, {"loss": "low"}, {"loss": 10**400}, {"codec": 3},
        {"phases": {"match": None}}, {"islands": {"a": {"loss": "low"}}}, {"dropped": {"a": None}},
    ],
)  # fmt: skip
def test_what_is_no_event_is_passed_over(change):
    values = Record(1, 5.0, done(0)).plain()
    assert read_record(values) is not None
    assert read_record(values | change) is None


def test_numbers_that_were_none_come_back_as_such():
    """They are written as null, which is no number for whoever adds them up."""
    step = Step(step=1, round=0, loss=float("nan"), seconds=float("inf"))
    read = read_record(Record(1, 5.0, step).plain())
    assert read.event.loss is None
    assert math.isnan(read.event.seconds)


def test_another_version_may_say_more_or_less():
    values = Record(1, 5.0, done(0)).plain()
    assert read_record(values | {"new": 1}) is not None
    values.pop("codec")
    assert read_record(values).event.codec == ""
    values.pop("round")
    assert read_record(values) is None
    assert read_record(3) is None


def test_a_damaged_log_is_read_as_far_as_it_goes(log):
    text = log.read_text()
    log.write_text('{"torn": \n[[[[\n' + text + '{"seq": 99, "ti')
    assert len(list(read_log(log))) == 29


def test_rotated_logs_come_first(log):
    log.rename(log.with_name("events.jsonl.1"))
    events = EventLog(log, clock=lambda: 2000.0)
    events.emit(Notice(text="later"))
    events.close()
    records = list(read_log(log))
    assert len(records) == 30
    assert records[-1].event == Notice(text="later")


@pytest.mark.parametrize("content", [None, "", "hello\n", "{}\n"])
def test_a_file_that_is_no_log_is_refused(tmp_path, content):
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(OperatorError) as error:
        list(read_log(path))
    assert error.value.code == "E204"


async def test_a_replay_ends_where_the_log_does(log):
    [last] = await pictures(ReplaySource(log, 0))
    state = last["state"]
    assert state["run"]["label"] == "tiny-docs-8c41"
    assert state["rounds"] == {"committed": 12, "outcomes": {"committed": 12, "failed": 1}}
    assert [peer["round"] for peer in state["peers"]] == [12, 12, 12]
    assert last["history"]["columns"]["round"] == list(range(12))
    assert last["problem"] == "the log ends here"


async def test_a_replay_may_be_slower(log):
    seen = await pictures(ReplaySource(log, 3.0, interval_s=0.0))
    assert [len(one["history"]["columns"]["round"]) for one in seen] == [3, 7, 11, 12]


def test_without_a_terminal_it_says_what_to_use(log, capsys, tmp_path):
    assert outermost.run(["monitor", "--replay", str(log)]) == 2
    err = capsys.readouterr().err
    assert "needs a terminal" in err
    assert "--once" in err
    assert outermost.run(["monitor", "--replay", str(tmp_path / "none")]) == 2
    out, err = capsys.readouterr()
    assert "cannot replay" in err
    assert out == ""  # no screen was opened for it


def test_once_prints_one_picture(log, capsys):
    assert outermost.run(["monitor", "--replay", str(log), "--once"]) == 0
    assert json.loads(capsys.readouterr().out)["state"]["rounds"]["committed"] == 12


# --- a node -------------------------------------------------------------------------------------


@pytest.fixture
async def api(log):
    """A node's API with a key; returns its server."""
    events = EventLog()
    state, history = NodeState(NodeView(peer=ME), log=events), History()
    events.subscribe(history)
    for record in read_log(log):
        events.emit(record.event)
    key = "k" * 16
    server = ApiServer(make_app(state, events, history, key=key), "127.0.0.1:0")
    await server.start()
    yield server, key
    await server.aclose()


async def test_a_node_is_watched_through_its_api(api):
    server, key = api
    first, second = await pictures(AttachedSource(server.address, key, interval_s=0.0), 2)
    assert first["state"]["rounds"]["committed"] == 11
    assert second["state"]["instance"] == first["state"]["instance"]


async def test_a_node_that_stops_answering_may_come_back(api):
    server, key = api
    stream = AttachedSource(server.address, key, interval_s=0.0).pictures()
    first = await anext(stream)
    await server.aclose()
    later = await anext(stream)
    assert "no node answers" in later["problem"]
    assert later["state"] == first["state"]
    await stream.aclose()


async def test_no_node_or_no_key_is_told(api):
    server, _ = api
    with pytest.raises(OperatorError, match="asks for a key"):
        await pictures(AttachedSource(server.address, "", interval_s=0.0), 1)


def test_without_a_node_it_ends_with_e106(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("ATOLL_DIR", str(tmp_path))
    assert outermost.run(["monitor"]) == 1
    assert "error E106" in capsys.readouterr().err


# --- drawing ------------------------------------------------------------------------------------


def test_a_chart_has_its_size_and_its_ends():
    rising = drawing.chart([float(i) for i in range(40)], 20, 4)
    assert [len(row) for row in rising] == [20] * 4
    assert rising[0][-1] != "⠀"
    assert rising[-1][0] != "⠀"
    assert rising[0][0] == rising[-1][-1] == "⠀"
    assert drawing.chart([], 5, 2) == ["     "] * 2
    assert set("".join(drawing.chart([1.0], 3, 1))) != {"⠀"}
    assert len(drawing.chart([1.0, None, 2.0], 8, 2)) == 2


def test_what_peers_wrote_cannot_move_the_cursor():
    evil = "\x1b[2J\x07evil"
    replay = Replay()
    replay.state.providers.peers = lambda: [
        replace(view, name=evil, region=evil, role=evil) for view in replay._peers.values()
    ]
    replay.take(Record(1, 1.0, done(0)))
    picture = replay.picture()
    shown = "".join(cell for peer in picture["state"]["peers"] for cell in drawing.peer_row(peer))
    assert "evil" in shown
    assert "\x1b" not in shown


# --- the screen ---------------------------------------------------------------------------------


def text_of(app, name):
    return str(app.query_one(f"#{name}").render())


async def shown(app, pilot):
    async with asyncio.timeout(30):
        while not app.shown:
            await pilot.pause(0.02)
    await pilot.pause()


@pytest.mark.parametrize("size", [(120, 46), (60, 24)])
async def test_the_screen_shows_all_panels(log, size):
    app = Monitor(ReplaySource(log, 0))
    async with app.run_test(size=size) as pilot:
        await shown(app, pilot)
        assert "tiny-docs-8c41  round 12/50" in text_of(app, "header")
        assert "3 agree bit for bit  0.083 -> 0.021 apart" in text_of(app, "header")
        assert "rounds: 1 failed" in text_of(app, "header")
        assert "loss" in text_of(app, "loss")
        assert "consensus" in text_of(app, "consensus")
        assert "without 1" in text_of(app, "rounds")
        assert "this node" in text_of(app, "node")
        table = app.query_one("#peers")
        assert table.row_count == 3
        log_lines = "\n".join(str(line.text) for line in app.query_one("#events").lines)
        assert "E402" in log_lines
        assert "so it ends" in log_lines


async def test_keys_sort_pause_and_quit(log):
    app = Monitor(ReplaySource(log, 0))
    async with app.run_test(size=(120, 46)) as pilot:
        await shown(app, pilot)
        order = [str(app.query_one("#peers").get_row_at(i)[0]) for i in range(3)]
        await pilot.press("s")
        await pilot.press("s")
        await pilot.press("s")
        by_name = [str(app.query_one("#peers").get_row_at(i)[0]) for i in range(3)]
        assert sorted(order) == sorted(by_name)
        await pilot.press("p")
        assert "(paused)" in text_of(app, "header")
        await pilot.press("p")
        assert "(paused)" not in text_of(app, "header")
        await pilot.press("q")
    assert app.return_code == 0
    assert app.failure is None


async def test_the_table_shows_links_and_fragments_as_well(log):
    app = Monitor(ReplaySource(log, 0))
    async with app.run_test(size=(120, 46)) as pilot:
        await shown(app, pilot)
        table = app.query_one("#peers")
        app._picture["links"] = {
            "peers": PEERS,
            "links": [[0, 1, 2e6, 0.1, 0], [1, 2, 5e5, None, 12], [2, 0, None, 0.2, 3]],
        }
        await pilot.press("v")
        rows = [[str(cell) for cell in table.get_row_at(i)] for i in range(table.row_count)]
        assert [row[2:] for row in rows] == [
            ["0.50 MB/s", "-", "told 12s ago"],
            ["2.00 MB/s", "100 ms", "here"],
            ["-", "200 ms", "told 3s ago"],
        ]
        assert rows[0][:2] == ["beta", f"…{PEERS[2][-8:]}"]
        await pilot.press("v")
        assert [str(cell) for cell in table.get_row_at(0)][:4] == [
            "1 of 1", "11", "committed", "3 of 3",
        ]  # fmt: skip
        await pilot.press("v")
        assert table.row_count == 3
        assert len(table.columns) == len(drawing.PEER_COLUMNS)


def test_a_replay_knows_names_and_who_left(log):
    replay = Replay()
    for record in read_log(log):
        replay.take(record)
    replay.take(Record(98, 99.0, PeerJoined(peer=PEERS[1], name="alps", region="eu")))
    replay.take(Record(99, 99.0, done(12)))
    by_id = {peer["peer"]: peer for peer in replay.picture()["state"]["peers"]}
    assert (by_id[PEERS[1]]["name"], by_id[PEERS[1]]["region"]) == ("alps", "eu")
    assert by_id[ME]["link"] == "self"
    replay.take(Record(100, 100.0, PeerLeft(peer=PEERS[1])))
    replay.take(Record(101, 100.0, PeerSuspected(peer=PEERS[2])))
    status = {peer["peer"]: peer["status"] for peer in replay.picture()["state"]["peers"]}
    assert status == {ME: "active", PEERS[1]: "left", PEERS[2]: "suspect"}
    replay.take(Record(102, 101.0, done(13)))
    status = {peer["peer"]: peer["status"] for peer in replay.picture()["state"]["peers"]}
    assert set(status.values()) == {"active"}


def test_the_terminal_tells_who_was_waited_for():
    row = done(4).islands
    slow = {**row, PEERS[1]: {**row[PEERS[1]], "ready_s": 3.5}, ME: {**row[ME], "ready_s": 0.0}}
    text = drawing.waited_for({"round": 4, "islands": slow}, {PEERS[1]: "alps"})
    assert text == "round 4: all waited for alps, 3.5 s after the first"
    assert drawing.waited_for({"round": 4, "islands": row}, {}) == ""


class Pouring:
    """Pictures without a pause, whatever happens to who draws them."""

    title = "pouring"

    def __init__(self, log):
        self.replay = Replay()
        for record in read_log(log):
            self.replay.take(record)

    async def pictures(self):
        while True:
            yield self.replay.picture()
            await asyncio.sleep(0)


async def test_it_can_be_left_while_pictures_come(log):
    for _ in range(3):
        app = Monitor(Pouring(log))
        async with app.run_test(size=(120, 46)) as pilot:
            await shown(app, pilot)
            app.exit()  # the pictures go on coming while the screen is taken down
    assert app.failure is None


async def test_an_error_ends_it_with_its_code(tmp_path):
    app = Monitor(ReplaySource(tmp_path / "none", 0))
    async with app.run_test() as pilot:
        async with asyncio.timeout(30):
            while app.failure is None:
                await pilot.pause(0.02)
        await pilot.pause()
    assert app.failure.code == "E204"
    assert app.return_code == 2


# --- the choice --------------------------------------------------------------------------------


def test_what_is_chosen(tmp_path):
    config = resolve({"peers": ["127.0.0.1:1"]}, {})
    assert isinstance(choose(config, None, 1.0), Observer)
    assert isinstance(choose(config, tmp_path / "x", 1.0), ReplaySource)
    given = resolve({"api": "127.0.0.1:5"}, {})
    assert isinstance(choose(given, None, 1.0), AttachedSource)
