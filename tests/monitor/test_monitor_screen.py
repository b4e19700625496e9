"""How ``node monitor`` draws its pictures, and what keys do."""

import asyncio
from dataclasses import replace

import pytest
from monitor_kit import ME, PEERS, done, written_log

from node.monitor.events import PeerJoined, PeerLeft, PeerSuspected, Record, Started
from node.monitor.plain import table
from node.monitor.terminal import drawing
from node.monitor.terminal.app import Monitor
from node.monitor.terminal.source import Replay, ReplaySource, read_log
from node.monitor.views import PeerView


@pytest.fixture
def log(tmp_path):
    return written_log(tmp_path)


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


def test_the_loss_is_of_one_kind_where_not_every_round_is_evaluated():
    """Else its line is a comb: training and validation loss are far apart."""
    columns = {"loss": [2.0] * 8, "validation_loss": [None, 4.0, None, None, 3.0, None, None, None]}
    told = str(drawing.loss(columns, 20, 2))
    carried = [None, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0, 3.0]
    assert told == str(drawing.curve("validation loss", carried, 20, 2))
    assert told.startswith("validation loss  3   3 to 4\n")
    unknown = str(drawing.loss(columns | {"validation_loss": [None] * 8}, 20, 2))
    assert unknown.startswith("training loss  2   2 to 2\n")
    assert str(drawing.loss({"loss": [], "validation_loss": []}, 20, 2)).endswith("nothing yet")


def test_the_newest_figures_are_of_no_other_round():
    """In a run with more rounds than points."""
    replay = Replay()
    for number in range(1000):
        more = {"validation_loss": 2.0 if number % 5 == 0 else None}
        replay.take(Record(number + 1, 1.0 + number, done(number, consensus=0.1, **more)))
    bad = {"validation_loss": 7.5, "consensus": 0.9}
    replay.take(Record(1001, 1001.0, done(1000, **bad)))
    replay.take(Record(1002, 1002.0, done(1001, validation_loss=None, consensus=None)))
    picture = replay.picture()
    columns, state = picture["history"]["columns"], picture["state"]
    assert picture["history"]["every"] > 1
    last = state["training"]["validation_loss"]
    assert str(drawing.loss(columns, 20, 2, last)).startswith("validation loss  7.5   2 to 7.5\n")
    assert str(drawing.curve("apart", columns["consensus"], 20, 2)).startswith("apart  -   0.1 to")


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
        assert text_of(app, "loss").startswith("validation loss  2.25   2.25 to 5")
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


async def test_a_table_says_how_much_of_it_is_left_out(log):
    app = Monitor(ReplaySource(log, 0))
    async with app.run_test(size=(120, 46)) as pilot:
        await shown(app, pilot)
        table = app.query_one("#peers")
        assert table.border_title == "islands by merged tokens"
        many = app._picture["state"]["peers"] * 100
        app._picture["state"]["peers"] = many
        app._picture["links"] = {"peers": PEERS, "links": [[0, 1, 2e6, 0.1, 0]], "left_out": 5000}
        app.draw(app._picture)
        assert table.border_title == f"islands by merged tokens, 256 of {len(many)}"
        await pilot.press("v")
        assert table.border_title == "links, the slowest first, 1 of 5,001"


class Claiming:
    """Of three islands one was merged less than the others, and says that it has trained most."""

    title = "claiming"

    def __init__(self, role):
        self.replay = Replay()
        node = replace(self.replay.state.node, peer=ME, role=role)
        self.replay.state.node = node
        islands = {peer: {"tokens": 5 if peer == PEERS[2] else 100} for peer in PEERS[1:]}
        self.replay.take(Record(1, 1.0, done(0, islands=islands)))
        views = self.replay.state.providers.peers
        claims = {PEERS[1]: 200, PEERS[2]: 9000}
        self.replay.state.providers.peers = lambda: (
            [replace(view, total_tokens=claims[view.peer]) for view in views()]
            + [PeerView(peer="12D3KooWnew-here", total_tokens=7777)]
        )

    async def pictures(self):
        yield self.replay.picture()


@pytest.mark.parametrize(
    ("role", "head", "shown_tokens"),
    [
        ("island", "merged", {PEERS[1]: "100", PEERS[2]: "5", "12D3KooWnew-here": "0"}),
        ("observer", "claimed", {PEERS[2]: "9,000", "12D3KooWnew-here": "7,777", PEERS[1]: "200"}),
    ],
)
async def test_tokens_are_those_that_were_merged_where_these_are_known(role, head, shown_tokens):
    """And an observer, whose rounds have none by island, says whose words they are."""
    app = Monitor(Claiming(role))
    async with app.run_test(size=(160, 46)) as pilot:
        await shown(app, pilot)
        table = app.query_one("#peers")
        at = [str(column.label) for column in table.columns.values()].index(head)
        rows = [[str(cell) for cell in table.get_row_at(i)] for i in range(table.row_count)]
        assert [(row[0], row[at]) for row in rows] == [
            (f"…{peer[-8:]}", tokens) for peer, tokens in shown_tokens.items()
        ]
        assert table.border_title == f"islands by {head} tokens"


def test_the_speed_of_all_islands_is_that_of_those_who_live():
    """What the dead and those who left said last is known for ten minutes more."""
    told = {"active": 1000.0, "joining": 200.0, "leaving": 1.0, "suspect": 10, "dead": 7, "left": 5}
    peers = [
        {"role": "island", "status": status, "tokens_per_second": speed}
        for status, speed in told.items()
    ]
    peers.append({"role": "seed", "status": "active", "tokens_per_second": 4000.0})
    state = {"node": {"role": "observer"}, "peers": peers}
    assert drawing.node(state).plain.endswith("all islands: 1,200 tokens/s")


def test_the_speed_and_loss_of_who_is_gone_are_not_shown():
    """Nor is a table sorted by them."""
    said = {"round": 3, "loss": 2.5, "tokens_per_second": 900.0}
    views = [PeerView(peer=peer, **said) for peer in PEERS]
    lives, joins, dead = (
        {**table(view), "status": status, "merged_tokens": 0}
        for view, status in zip(views, ("active", "joining", "dead"), strict=True)
    )
    shown = [drawing.peer_row(peer)[4:6] for peer in (lives, joins, dead)]
    assert shown == [("2.50", "900"), ("2.50", "900"), ("-", "-")]
    for name, key in Monitor.SORTS[1:3]:
        assert key(lives) < key(dead), name


def test_the_join_line_says_that_an_invitation_is_needed():
    """Without one whoever follows it ends with E203."""
    for needed in (False, True):
        replay = Replay()
        said = {"peer": ME, "run": "r", "version": "0.1.0", "join_address": f"a:1/{ME}"}
        replay.take(Record(1, 1.0, Started(**said, invitation_needed=needed)))
        shown = str(drawing.node(replay.picture()["state"])).splitlines()[-1]
        assert shown.startswith(f"join: node start --peers a:1/{ME}")
        assert shown.endswith(" --invitation …") == needed


def test_a_replay_says_of_a_join_line_that_few_can_use_it():
    replay = Replay()
    said = {"peer": ME, "run": "r", "version": "0.1.0", "listen": "127.0.0.1:1"}
    replay.take(Record(1, 1.0, Started(**said, join_address=f"127.0.0.1:1/{ME}")))
    shown = str(drawing.node(replay.picture()["state"])).splitlines()[-1]
    assert shown.strip() == "(on this machine only)"


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


def test_an_empty_round_is_not_said_to_have_merged_nobody():
    common = {"round": 1, "fragments": 1, "utilisation": None, "consensus": None, "islands": {}}
    empty = common | {"members": 0, "live": 2, "dropped": {}, "phases": {"ready": 1.0}}
    failed = empty | {"dropped": {PEERS[1]: "silent"}}
    shown = [str(drawing.rounds([row], 80, {})).splitlines()[-1] for row in (empty, failed)]
    assert shown[0].endswith("s lets in 2")
    assert shown[1].endswith("s 0/2 without 1")
    seen = str(drawing.rounds([empty | {"phases": {}}], 80, {}))  # by an observer
    assert seen.endswith("lets in 2 islands")


def test_peers_of_one_name_are_told_apart_in_the_terminal():
    named = zip(PEERS, ("alps", "alps", "\u200b"), strict=True)
    state = {"peers": [{"peer": peer, "name": name} for peer, name in named]}
    first, second, third = (f"…{peer[-8:]}" for peer in PEERS)
    found = {"peers": PEERS, "links": [[0, 1, 1.0, None, 0], [1, 2, 2.0, None, 0]]}
    rows = drawing.link_rows({"state": state, "links": found})
    assert [row[:2] for row in rows] == [
        (f"alps {first}", f"alps {second}"),
        (f"alps {second}", third),
    ]


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
