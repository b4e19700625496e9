"""When the operator is called: splits, silence, drift, lag, stalls; and when not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from node.monitor.alarms import (
    DRIFT_FACTOR,
    DRIFT_ROUNDS,
    ENDED_LOOKS,
    STALL_FLOOR_S,
    Alarm,
    Watch,
    raised,
)
from node.monitor.event_log import EventLog
from node.monitor.events import RoundDone
from node.monitor.views import PeerView

NAMES = ("alps", "fjord", "mesa", "reef")


def peers(count: int = 4) -> list[PeerView]:
    return [
        PeerView(peer=f"12D3KooW{name}", name=name, status="active", round=9, agrees=True)
        for name in NAMES[:count]
    ]


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


def test_lag() -> None:
    views = peers()
    views[3] = replace(views[3], round=6, agrees=None)
    (alarm,) = raised(views, [], 0.0)
    assert alarm.kind == "lag"
    assert "reef is" in alarm.what
    views[3] = replace(views[3], status="joining")
    assert raised(views, [], 0.0) == [], "it is catching up"


def test_a_stall_is_measured_by_the_usual_round() -> None:
    last = rounds(*[(0.1,) * 4] * 5)
    assert kinds(peers(), last, 40.0 + STALL_FLOOR_S) == []
    assert kinds(peers(), last, 41.0 + STALL_FLOOR_S) == ["stall"]
    slow = rounds(*[(0.1,) * 4] * 5, every=600.0)
    assert kinds(peers(), slow, 2400.0 + 2900.0) == []
    assert kinds(peers(), slow, 2400.0 + 3100.0) == ["stall"]
    assert raised(peers(), slow, 9999.0, training=False) == []


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
    watch = Watch(lambda: now, log)
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


def test_the_worst_comes_first() -> None:
    views = peers()
    views[1] = replace(views[1], agrees=False)
    views[3] = replace(views[3], round=2, agrees=None)
    assert kinds(views, [], 0.0) == ["split", "lag"]
