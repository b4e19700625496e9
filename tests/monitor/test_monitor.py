"""``node monitor``: pictures from a node, a log and a swarm, and which of them is chosen."""

import json
import math

import pytest
from monitor_kit import ME, PEERS, done, pictures, written_log

from node import outermost
from node.config import resolve
from node.monitor.api import ApiServer, make_app
from node.monitor.event_log import EventLog
from node.monitor.events import Notice, Record, RoundDone, Step
from node.monitor.history import History
from node.monitor.observer import Observer
from node.monitor.reading import read_record
from node.monitor.state import NodeState
from node.monitor.terminal.command import choose
from node.monitor.terminal.source import AttachedSource, Replay, ReplaySource, read_log
from node.monitor.views import NodeView
from protocols.errors import OperatorError


@pytest.fixture
def log(tmp_path):
    return written_log(tmp_path)


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


def test_a_log_that_is_rotated_while_it_is_read_lacks_nothing_in_between(tmp_path):
    path = tmp_path / "events.jsonl"
    events = EventLog(path, max_bytes=1000)
    for number in range(30):
        events.emit(Notice(text=f"{number}" + "x" * 100))
    read, seen = read_log(path), []
    for record in read:
        seen.append(record.seq)
        if len(seen) == 2:
            for _ in range(8):  # one file's
                events.emit(Notice(text="y" * 100))
    assert seen == list(range(seen[0], seen[-1] + 1))
    assert seen[-1] >= 30


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


def test_a_replay_tells_the_rounds_that_all_fragments_have_come_through():
    def told(*rounds):
        replay = Replay()
        for number, (fragment, round_) in enumerate(rounds, start=1):
            event = RoundDone(round=round_, fragment=fragment, fragments=2, total_rounds=9)
            replay.take(Record(number, 1.0, event))
        return replay.picture()["state"]["rounds"]["committed"]

    assert told((0, 0)) == 0
    assert told((0, 0), (1, 0), (0, 1), (0, 2), (0, 3)) == 1
    assert told((0, 5)) == 5, "the log begins in the middle: of the other one nothing is known"


def test_a_node_tells_the_rounds_that_its_reports_have_counted():
    """Where one fragment lags, the round that another has come to is further than that."""
    log = EventLog()
    state = NodeState(NodeView(peer=ME), log=log)
    state.round = 1
    log.emit(RoundDone(round=4, fragment=0, fragments=2))
    assert state.snapshot()["rounds"]["committed"] == 1


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
    state.round = 11
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


# --- the choice --------------------------------------------------------------------------------


def test_what_is_chosen(tmp_path):
    config = resolve({"peers": ["127.0.0.1:1"]}, {})
    assert isinstance(choose(config, None, 1.0), Observer)
    assert isinstance(choose(config, tmp_path / "x", 1.0), ReplaySource)
    (tmp_path / "node.toml").write_text('peers = ["127.0.0.1:1"]\n')  # whom the node here joins
    here = resolve({"dir": str(tmp_path), "api": "127.0.0.1:5"}, {"ATOLL_PEERS": "127.0.0.1:2"})
    assert here.peers
    assert isinstance(choose(here, None, 1.0), AttachedSource)
    given = resolve({"api": "127.0.0.1:5"}, {})
    assert isinstance(choose(given, None, 1.0), AttachedSource)
