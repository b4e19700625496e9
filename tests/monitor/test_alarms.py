"""When the operator is called: splits, silence, drift, lag, stalls; and when not."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import Literal

import pytest
from alarms_kit import peers

from node.monitor.alarm_watch import AGAIN_LOOKS, ENDED_LOOKS, NAMED_LOOKS, Watch
from node.monitor.alarms import (
    DRIFT_FACTOR,
    DRIFT_ROUNDS,
    FIRST_FLOOR_S,
    HEARD_S,
    STALL_FACTOR,
    STALL_FLOOR_S,
    Alarm,
    Here,
    raised,
)
from node.monitor.console import render
from node.monitor.event_log import EventLog
from node.monitor.events import (
    AlarmEnded,
    AlarmRaised,
    RoundDone,
    Step,
)
from node.monitor.state import NodeState
from node.monitor.views import NodeView, PeerView, RunView


def rounds(*distances: tuple[float, ...], every: float = 10.0) -> list[tuple[float, RoundDone]]:
    return [
        (
            every * number,
            RoundDone(
                round=number,
                islands={p.peer: {"apart": d} for p, d in zip(peers(), apart, strict=False)},
            ),
        )
        for number, apart in enumerate(distances)
    ]


def kinds(views: list[PeerView], last: list[tuple[float, RoundDone]], now: float) -> list[str]:
    return [alarm.kind for alarm in raised(views, last, now)]


def test_all_is_well() -> None:
    assert raised(peers(), rounds((0.1,) * 4, (0.1,) * 4, (0.1,) * 4), 30.0) == []
    assert raised([], [], 0.0) == []


def test_a_split_is_critical_and_named() -> None:
    views = peers()
    views[2] = replace(views[2], agrees=False)
    (alarm,) = raised(views, [], 0.0)
    assert (alarm.kind, alarm.level) == ("split", "critical")
    assert "mesa has another state" in alarm.what
    assert alarm.peers == (views[2].peer,)


def test_islands_of_one_name_and_of_none_that_can_be_seen_are_told_apart() -> None:
    views = [replace(p, agrees=False) for p in peers()]
    names = ("alps", "alps", "\u200b", "reef")
    views = [replace(view, name=name) for view, name in zip(views, names, strict=True)]
    [split] = raised(views, [], 0.0)
    assert "split: alps …KooWalps, alps …ooWfjord, …KooWmesa, reef have" in split.what


def test_a_peer_at_another_round_is_no_split() -> None:
    views = peers()
    views[2] = replace(views[2], agrees=None, round=8)
    assert raised(views, [], 0.0) == []


@pytest.mark.parametrize(("silent", "expected"), [(1, []), (2, ["silence"]), (3, ["silence"])])
def test_half_of_the_islands_silent(silent: int, expected: list[str]) -> None:
    views = peers()
    for index in range(1, 1 + silent):
        views[index] = replace(views[index], status="dead", agrees=None)
    assert kinds(views, [], 0.0) == expected


def test_who_said_farewell_is_not_silent() -> None:
    views = [replace(view, status="left") for view in peers()[1:]]
    assert raised([peers()[0], *views], [], 0.0) == []


@pytest.mark.parametrize("count", [3, 4])
def test_an_island_drifts(count: int) -> None:
    usual, far = (0.1,) * (count - 1), (0.1 * DRIFT_FACTOR * 1.1,)
    enough = [usual + far] * DRIFT_ROUNDS
    assert kinds(peers(), rounds(*enough), 20.0) == ["drift"]
    assert kinds(peers(), rounds(*enough[1:], (*usual, 0.1)), 20.0) == [], "it has come back"
    assert kinds(peers(), rounds(*enough[1:]), 0.0) == []


def test_of_two_nobody_drifts() -> None:
    assert kinds(peers(2), rounds(*[(0.1, 0.9)] * DRIFT_ROUNDS), 20.0) == []


def test_a_node_that_does_not_catch_up_is_told_why() -> None:
    assert raised(peers(), [], 0.0, here=Here()) == []
    (alarm,) = raised(peers(), [], 0.0, here=Here(narrow=(61.0, 0.52)))
    assert (alarm.kind, alarm.level) == ("narrow", "warning")
    assert "a round takes 61 s to fetch, and the others make one in 0.5 s." in alarm.what


def test_a_copy_of_a_checkpoint_hangs() -> None:
    (alarm,) = raised(peers(), [], 0.0, here=Here(copy_still=7200.0))
    assert (alarm.kind, alarm.level) == ("checkpoint", "warning")
    assert "has moved for 2h00m" in alarm.what


def test_nobody_is_there_who_decides() -> None:
    views = peers()
    names = [view.peer for view in views]
    gone = [*views[:2], replace(views[2], status="dead"), replace(views[3], status="left")]

    def office(*rosters: list[str], now: float = HEARD_S) -> list[Alarm]:
        alarms = raised(gone, [], now, here=Here(me=names[0], offices=rosters, began=0.0))
        return [alarm for alarm in alarms if alarm.kind == "office"]

    assert office() == [], "islands gossip"
    assert office(names[2:], now=HEARD_S / 2) == [], "it may have yet to hear of them"
    assert office(names[1:]) == [], "one is there"
    assert office([names[0], *names[2:]]) == [], "this node is one of them, and can go on alone"
    (alarm,) = office(names[2:])
    assert (alarm.level, alarm.peers) == ("critical", tuple(names[2:]))
    assert "decides on rounds: mesa, reef" in alarm.what
    (alarm,) = office(names, [*names[2:], "12D3KooWnever-heard-of"])
    assert "rounds of fragment 1: mesa, reef, …heard-of" in alarm.what


def test_lag() -> None:
    views = peers()
    views[3] = replace(views[3], round=6, agrees=None)
    (alarm,) = raised(views, [], 0.0)
    assert alarm.kind == "lag"
    assert "reef is" in alarm.what
    views[3] = replace(views[3], status="joining")
    assert raised(views, [], 0.0) == [], "it is catching up"


def test_one_that_claims_any_round_does_not_make_the_others_lag() -> None:
    views = peers()
    views[0] = replace(views[0], round=2**62)
    assert raised(views, [], 0.0) == []
    views[3] = replace(views[3], round=6, agrees=None)
    assert [alarm.peers for alarm in raised(views, [], 0.0)] == [(views[3].peer,)]


def test_of_two_islands_the_slower_one_lags() -> None:
    views = peers(2)
    views[1] = replace(views[1], round=6, agrees=None)
    assert [alarm.kind for alarm in raised(views, [], 0.0)] == ["lag"]


def test_islands_that_count_rounds_of_their_own_do_not_lag() -> None:
    views = [replace(view, agrees=None) for view in peers()]
    views[3] = replace(views[3], round=400)
    assert raised(views, [], 0.0) == []


def test_a_stall_is_measured_by_the_usual_round() -> None:
    last = rounds(*[(0.1,) * 4] * 5)
    assert kinds(peers(), last, 40.0 + STALL_FLOOR_S) == []
    assert kinds(peers(), last, 41.0 + STALL_FLOOR_S) == ["stall"]
    slow = rounds(*[(0.1,) * 4] * 5, every=600.0)
    assert kinds(peers(), slow, 2400.0 + 2900.0) == []
    assert kinds(peers(), slow, 2400.0 + 3100.0) == ["stall"]
    assert raised(peers(), slow, 9999.0, training=False) == []


def test_rounds_that_a_node_repeats_do_not_make_the_usual_one_short() -> None:
    """A machine returns, replays fifteen rounds in seconds, and goes on with long ones."""
    here = Here(began=0.0, steps_s=600.0)
    replayed = [(20.0 + n, RoundDone(round=n, repeated=True)) for n in range(15)]

    def kinds_at(now: float, *live: float) -> list[str]:
        last = [*replayed, *((when, RoundDone(round=15 + n)) for n, when in enumerate(live))]
        return [alarm.kind for alarm in raised(peers(), last, now, here=here)]

    assert kinds_at(634.0) == []
    assert kinds_at(3035.0) == ["stall"], "five times what its inner steps take"
    assert kinds_at(1000.0, 300.0) == [], "it has come in the midst of a round"
    assert kinds_at(3800.0, 300.0, 900.0) == []
    assert kinds_at(3901.0, 300.0, 900.0) == ["stall"]


@pytest.mark.parametrize("status", ["active", "joining"])
def test_who_trains_and_never_merges_anything_is_told_of(status: Literal["active", "joining"]):
    times = iter([0.0, 5.0])
    log = EventLog(clock=lambda: next(times))
    manifest = {"rounds": {"inner_steps": 100}}
    now = 0.0
    run = RunView(id="ab", label="slow", total_rounds=9, manifest=manifest)
    state = NodeState(NodeView(peer="me"), log=log, run=run, clock=lambda: now)
    state.status = status
    now = 10_000.0
    assert state.alarms_now() == [], "it has not begun to train"
    log.emit(Step(step=1, round=0, loss=2.0, seconds=0.1))
    now = FIRST_FLOOR_S
    assert state.alarms_now() == []
    now = FIRST_FLOOR_S + 1
    assert [alarm.kind for alarm in state.alarms_now()] == ["stall"]
    log.emit(Step(step=2, round=0, loss=2.0, seconds=2.0))
    assert state.alarms_now() == [], "its rounds are long"
    now = STALL_FACTOR * 200 + 1
    (alarm,) = state.alarms_now()
    assert alarm.what == "No round for 1001 s; the inner steps of one take 200 s."
    assert alarm.fix.startswith("This island has taken no inner step for ")


def test_who_trains_no_more_where_no_round_comes_is_told_so() -> None:
    """As with a script that hangs in its own loop: nothing else in the log speaks of it."""
    last = rounds(*[(0.1,) * 4] * 5)
    now = 41.0 + STALL_FLOOR_S

    def told(stepped: float | None, step_s: float = 1.0) -> str:
        here = Here(stepped=stepped, step_s=step_s)
        (alarm,) = raised(peers(), last, now, here=here)
        return alarm.fix

    assert told(40.0).startswith("This island has taken no inner step for 61 s: see whether its")
    for training in (told(None), told(now - 5.0), told(40.0, step_s=30.0)):
        assert training.startswith("Islands train on meanwhile.")


def test_an_island_drifts_where_fragments_take_turns() -> None:
    """The same fragment's rounds are compared: a round of another one between them is no answer."""
    usual, far = (0.1,) * 3, (0.4,)
    last = [
        (when, replace(done, round=number // 2, fragment=number % 2))
        for number, (when, done) in enumerate(rounds(*[usual + far] * 2 * DRIFT_ROUNDS))
    ]
    assert kinds(peers(), last, 40.0) == ["drift"]
    assert kinds(peers(), last[:-1], 30.0) == ["drift"]
    assert kinds(peers(), last[: DRIFT_ROUNDS + 1], 20.0) == [], "of one fragment they are too few"


def test_a_watch_says_what_begins_and_ends_and_nothing_twice() -> None:
    log, now = EventLog(), list[Alarm]()
    watch = Watch(lambda: now, log, list)
    split = Alarm("split", "critical", "mesa has another state", "look", ("mesa",))

    def told(*alarms: Alarm) -> list[tuple[str, str]]:
        now[:] = alarms
        before = len(log.recent)
        watch.look()
        return [(r.event.kind, getattr(r.event, "alarm", "")) for r in list(log.recent)[before:]]

    assert told() == []
    assert told(split) == [("alarm", "split")]
    assert told(split) == []
    assert told(replace(split, peers=("mesa", "reef"))) == [("alarm", "split")]
    assert [told() for _ in range(ENDED_LOOKS - 1)] == [[]] * (ENDED_LOOKS - 1)
    assert told(replace(split, peers=("mesa", "reef"))) == [], "it has only flickered"
    assert [told() for _ in range(ENDED_LOOKS)][-1] == [("alarm_ended", "split")]
    assert told() == []


def test_a_worse_alarm_is_said_while_a_lesser_one_of_its_kind_stands() -> None:
    log, now = EventLog(), list[Alarm]()
    watch = Watch(lambda: now, log, list)
    rises, lost = (
        Alarm("loss", "warning", "rises", "f"),
        Alarm("loss", "critical", "no number", "f"),
    )
    for alarms in ([rises], [lost, rises], [lost], *[[rises]] * ENDED_LOOKS, *[[]] * ENDED_LOOKS):
        now[:] = alarms
        watch.look()
    assert [(r.event.kind, getattr(r.event, "level", "")) for r in log.recent] == [
        ("alarm", "warning"),
        ("alarm", "critical"),
        ("alarm_ended", ""),
    ]


def test_an_alarm_whose_peers_come_and_go_is_said_for_those_it_gains() -> None:
    log, now = EventLog(), list[Alarm]()
    watch = Watch(lambda: now, log, list)

    def told(*names: str) -> list[tuple[str, ...]]:
        now[:] = [Alarm("lag", "warning", "behind", "look", names)]
        before = len(log.recent)
        watch.look()
        return [
            r.event.peers for r in list(log.recent)[before:] if isinstance(r.event, AlarmRaised)
        ]

    assert told("mesa") == [("mesa",)]
    assert [told("mesa", "reef") for _ in range(AGAIN_LOOKS)].count([("mesa", "reef")]) == 1
    hover = [told("mesa", *("reef",) * (look % 5 == 0)) for look in range(3 * NAMED_LOOKS)]
    assert not any(hover)
    assert not any(told("mesa") for _ in range(NAMED_LOOKS))
    assert told("mesa", "reef") == [("mesa", "reef")], "it has been well for long"


def test_islands_that_change_with_each_look_are_said_once_a_minute() -> None:
    log, look = EventLog(), count()
    watch = Watch(lambda: [Alarm("lag", "warning", "w", "f", (f"p{next(look)}",))], log, list)
    for _ in range(10 * AGAIN_LOOKS):
        watch.look()
    assert len(log.recent) == 10


def test_alarms_of_one_kind_that_begin_together_are_all_said() -> None:
    log = EventLog()
    drift = [Alarm("drift", "warning", name, "look", (name,)) for name in ("mesa", "reef")]
    watch = Watch(lambda: drift, log, list)
    for _ in range(3):
        watch.look()
    assert [getattr(record.event, "what", "") for record in log.recent] == ["mesa", "reef"]


def test_who_was_silent_and_is_forgotten_is_told_as_such_when_the_alarm_ends() -> None:
    """Ten minutes after two of four have gone nothing is known of them, and they are not back."""
    log, views = EventLog(), peers()
    watch = Watch(lambda: raised(views, [], 0.0), log, lambda: views)
    views[1:3] = [replace(view, status="dead", agrees=None) for view in views[1:3]]
    watch.look()
    gone = views.pop(1)
    for _ in range(ENDED_LOOKS):
        watch.look()
    ended = log.recent[-1].event
    assert ended == AlarmEnded(
        alarm="silence", peers=(gone.peer, views[1].peer), forgotten=(gone.peer,)
    )
    assert render(ended) == (
        "alarm silence has ended; not back, but forgotten after long silence: …ooWfjord"
    )


def test_the_worst_comes_first() -> None:
    views = peers()
    views[1] = replace(views[1], agrees=False)
    views[3] = replace(views[3], round=2, agrees=None)
    assert kinds(views, [], 0.0) == ["split", "lag"]
