"""``node monitor`` over some time: pictures that are held, nodes and logs with several starts."""

import asyncio

from node.monitor.dashboard import Feed
from node.monitor.event_log import EventLog
from node.monitor.events import (
    AlarmEnded,
    AlarmRaised,
    Notice,
    PeerJoined,
    Problem,
    RoundDone,
    Started,
    Stopping,
)
from node.monitor.history import History
from node.monitor.state import NodeState
from node.monitor.terminal.app import Monitor
from node.monitor.terminal.source import Replay, ReplaySource, read_log
from node.monitor.views import NodeView

ME, OTHER = "12D3KooWme", "12D3KooWother"


def process(*texts):
    """A picture of a node that has just said these."""
    log = EventLog()
    feed = Feed(NodeState(NodeView(peer=ME), log=log), log, History())
    for text in texts:
        log.emit(Notice(text=text))
    return feed.picture(10)


class Restarted:
    """A node that had said much, and then is another process that has said little."""

    title = "a node"

    async def pictures(self):
        for texts in (["once"] * 30, ["up again", "and on"]):
            yield process(*texts)
            await asyncio.sleep(0)


async def test_what_a_node_says_after_its_restart_is_told():
    app = Monitor(Restarted())
    async with app.run_test(size=(120, 46)) as pilot:
        async with asyncio.timeout(30):
            while app.shown < 2:
                await pilot.pause(0.02)
        await pilot.pause()
        told = [str(line.text) for line in app.query_one("#events").lines]
    assert told.count("once") == 30
    assert "and on" in told


class Counting:
    """A node that says one thing more in each picture, when it is let."""

    title = "a node"

    def __init__(self):
        self.more = asyncio.Event()

    async def pictures(self):
        yield process("first")
        await self.more.wait()
        yield process("first", "second")
        self.more.clear()
        await self.more.wait()


async def test_a_picture_that_is_held_stays_whatever_is_asked_of_it():
    source = Counting()
    app = Monitor(source)

    def told():
        return [str(line.text) for line in app.query_one("#events").lines]

    async with app.run_test(size=(120, 46)) as pilot:
        async with asyncio.timeout(30):
            while not app.shown:
                await pilot.pause(0.02)
            await pilot.press("p")
            source.more.set()
            while source.more.is_set():
                await pilot.pause(0.02)
            await pilot.press("s", "v")
            assert told() == ["first"]
            await pilot.press("p")
            await pilot.pause()
            assert "second" in told()


# --- logs ---------------------------------------------------------------------------------------


def replayed(path, *processes):
    """How it stands at the end of a log of processes that each said these, a second apart."""
    now = [1000.0]
    for events in processes:
        log = EventLog(path, clock=lambda: now[0])
        for event in events:
            now[0] += 1.0
            log.emit(event)
        log.close()
    replay = Replay()
    for record in read_log(path):
        replay.take(record)
    return replay.picture()


def started(run="tiny-docs-8c41"):
    return Started(peer=ME, run=run, version="0.1.0")


def done(number, *peers, **more):
    return RoundDone(round=number, islands={peer: {"tokens": 100} for peer in peers}, **more)


def test_a_process_knows_nothing_of_whom_the_one_before_met(tmp_path):
    full = Problem(code="E402", what="full", why="w", fix="f", fatal=True)
    before = [started(), PeerJoined(peer=OTHER), done(0, ME, OTHER), full, Stopping(reason="x")]
    third = PeerJoined(peer="12D3KooWthird", name="alps")  # met before it says that it is up
    after = [third, started(), done(1, ME)]
    picture = replayed(tmp_path / "events.jsonl", before, after)
    state = picture["state"]
    assert {peer["peer"]: peer["name"] for peer in state["peers"]} == {ME: "", third.peer: "alps"}
    assert state["status"] == "active"
    assert state["health"]["healthy"]
    assert picture["history"]["columns"]["round"] == [0, 1]
    assert "problem" in [event["kind"] for event in picture["events"]]


def test_rounds_of_another_run_are_not_added_to(tmp_path):
    first = [started(), done(0, ME), done(1, ME)]
    second = [started("deep-sea-77aa"), done(40, ME), done(41, ME)]
    picture = replayed(tmp_path / "events.jsonl", first, second)
    assert picture["history"]["columns"]["round"] == [40, 41]
    [mine] = picture["state"]["peers"]
    assert mine["merged_tokens"] == 200


def test_the_alarms_of_a_log_stand_until_they_end(tmp_path):
    split = AlarmRaised(alarm="split", level="critical", what="w", fix="f", peers=[OTHER])
    lag = AlarmRaised(alarm="lag", level="warning", what="w", fix="f", peers=[OTHER])
    log = [started(), done(0, ME, OTHER), lag, split]
    alarms = replayed(tmp_path / "a.jsonl", log)["state"]["alarms"]
    assert [(alarm["kind"], alarm["level"]) for alarm in alarms] == [
        ("split", "critical"), ("lag", "warning"),
    ]  # fmt: skip
    log += [AlarmEnded(alarm="split"), AlarmEnded(alarm="lag")]
    assert replayed(tmp_path / "b.jsonl", log)["state"]["alarms"] == []


def test_rounds_are_counted_as_the_node_itself_does(tmp_path):
    whole = replayed(tmp_path / "a.jsonl", [started(), done(0, ME), done(1, ME)])
    assert whole["state"]["rounds"]["committed"] == 2
    parts = [done(number, ME, fragment=f, fragments=2) for number, f in ((0, 0), (0, 1), (1, 0))]
    pieces = replayed(tmp_path / "b.jsonl", [started(), *parts])
    assert pieces["state"]["rounds"]["committed"] == 1  # that both have come through


async def test_a_clock_that_was_set_back_holds_no_replay(tmp_path):
    now = [9000.0]
    log = EventLog(tmp_path / "events.jsonl", clock=lambda: now[0])
    log.emit(started())
    now[0] = 1000.0
    for number in range(12):
        now[0] += 1.0
        log.emit(done(number, ME))
    log.close()
    source = ReplaySource(tmp_path / "events.jsonl", 3.0, interval_s=0.0)
    seen = [len(p["history"]["columns"]["round"]) async for p in source.pictures()]
    assert seen == [4, 8, 12]
