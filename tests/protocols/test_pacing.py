"""Finding out what a link carries: a simulated link, and whole transfers over loopback."""

from __future__ import annotations

import random
from math import inf
from statistics import fmean

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pacing_kit import QUEUE_S, Wire

from protocols.bucket import Bucket
from protocols.lanes.arrivals import KEPT, WINDOW_S, Burst, IncomingSpeed, Windows
from protocols.lanes.pacing import MOST, Pacer


@pytest.mark.parametrize("jitter", [0.0, 0.01])
@pytest.mark.parametrize("speed", [2.5e5, 2.5e6, 6e7])
def test_a_steady_link_is_used_and_its_queue_stays_short(speed: float, jitter: float) -> None:
    wire = Wire(lambda now: speed, jitter)
    wire.play(3.0)
    wire.queues.clear()
    assert wire.play(20.0) > 0.97
    assert wire.pacer.speed == pytest.approx(speed, rel=0.05)
    assert sum(wire.queues) / len(wire.queues) < QUEUE_S / 2


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_acknowledgements_in_lumps_hide_no_link(seed: int, tells: bool) -> None:
    """They wait behind what comes the other way: a window shows a tenth more or less of it."""
    wire = Wire(lambda now: 2.4e6, jitter=0.06, tells=tells, _random=random.Random(seed))
    wire.play(4.0)
    shares, speeds = [], []
    for _ in range(30):
        shares.append(wire.play(1.0))
        assert wire.pacer.speed is not None
        speeds.append(wire.pacer.speed / 2.4e6)
    assert fmean(shares) > 0.97
    assert min(speeds) > 0.95
    assert fmean(speeds) < 1.05  # a probe may be lucky, for a second


@pytest.mark.parametrize("tells", [False, True])
@pytest.mark.parametrize("times", [2.0, 10.0])
def test_a_link_that_became_faster_is_found_within_seconds(times: float, tells: bool) -> None:
    """Rates that follow from what was measured at the last rate must not lock a link low."""
    wire = Wire(lambda now: 2.5e6 if now < 10 else 2.5e6 * times, tells=tells)
    wire.play(10.0)
    wire.play(5.0)
    assert wire.play(4.0) > 0.9
    assert wire.pacer.speed == pytest.approx(2.5e6 * times, rel=0.1)


def test_a_link_that_became_faster_is_found_where_nothing_tells_of_queues_any_more() -> None:
    wire = Wire(lambda now: 125e3 if now < 30.0 else 12.5e6, tells=True)
    wire.play(30.0)
    wire.tells = False
    wire.play(30.0)
    assert wire.pacer.rate > 6e6


@pytest.mark.parametrize("tells", [False, True])
def test_a_link_that_became_slower_is_believed_after_a_while(tells: bool) -> None:
    wire = Wire(lambda now: 2.4e7 if now < 10 else 2.5e6, tells=tells)
    wire.play(10.0)
    wire.play(KEPT * WINDOW_S + 3.0)
    assert wire.pacer.speed == pytest.approx(2.5e6, rel=0.1)
    assert wire.play(5.0) > 0.97


@pytest.mark.parametrize("tells", [False, True])
def test_a_bad_second_changes_nothing(tells: bool) -> None:
    """Somebody else computes, or a peer reads slowly: the link is as it was."""
    wire = Wire(lambda now: 2.5e6 if not 8 <= now < 9 else 2.5e5, tells=tells)
    wire.play(8.0)
    known = wire.pacer.speed
    assert known is not None
    wire.play(1.0)
    assert wire.play(4.0) > 0.95
    assert wire.pacer.speed is not None
    assert wire.pacer.speed >= 0.97 * known


def test_nothing_is_learned_from_a_sender_with_nothing_to_send() -> None:
    wire = Wire(lambda now: 2.5e6)
    wire.play(5.0)
    known = wire.pacer.speed
    for _ in range(40):
        wire.play(0.2)
        wire.play(0.2, wanting=False)
    assert wire.pacer.speed == known


SHORT = 20_000  # bytes: at the smaller speed below no window is ever full


def widened() -> Wire:
    """A link of 800 kbit that becomes one of 200 Mbit after 10 s, and is known until then."""
    wire = Wire(lambda now: 1e5 if now < 10 else 2.5e7)
    wire.play(10.0)
    assert wire.pacer.speed == pytest.approx(1e5, rel=0.1)
    return wire


def test_short_bodies_find_a_link_that_became_faster() -> None:
    wire = widened()
    took = [wire.body(SHORT) for _ in range(16)]
    assert took[0] > 0.18  # paced as before
    assert took[-1] < 0.03
    # and where more is to be sent it is used, from there on
    for _ in range(20):
        wire.body(50 * SHORT)
    assert wire.body(50 * SHORT) < 0.1


def test_one_short_body_in_seven_is_a_probe_where_the_link_is_as_it_was() -> None:
    wire = Wire(lambda now: 1e5)
    wire.play(10.0)
    rates = []
    for _ in range(70):
        rates.append(wire.pacer.rate)
        wire.body(SHORT)
    assert wire.pacer.speed == pytest.approx(1e5, rel=0.1)
    assert 8 <= sum(rate > 1.5e5 for rate in rates) <= 10
    assert max(rates) < 2.2e5


def test_what_a_router_lets_pass_at_first_is_forgotten_with_the_first_whole_window() -> None:
    wire = Wire(lambda now: 1e5, spare=32 * 1024)
    wire.play(10.0)
    for _ in range(20):
        wire.body(SHORT)
    assert wire.pacer.speed is not None
    assert wire.pacer.speed > 5e5  # such bodies pass so fast indeed
    wire.body(2e5)
    assert wire.pacer.speed < 1.5e5


def test_a_sender_that_has_little_at_a_time_says_nothing_of_the_link() -> None:
    wire = Wire(lambda now: 2.5e6)
    wire.play(10.0)
    known = wire.pacer.speed
    for _ in range(40):
        wire.body(SHORT, source=2e5)
    assert wire.pacer.speed == known


def test_short_bodies_lower_no_speed() -> None:
    wire = Wire(lambda now: 2.5e6 if now < 10 else 2.5e5)
    wire.play(10.0)
    known = wire.pacer.speed
    for _ in range(40):
        wire.body(SHORT)
    assert wire.pacer.speed == known


@example([(9_210_113.0, SHORT, 1), (15_875_050.0, 10 * SHORT, 7), (9_649_924.0, SHORT, 1)])
@given(
    st.lists(
        st.tuples(st.floats(2e4, 5e7), st.sampled_from([SHORT, 10 * SHORT, 0]), st.integers(1, 12)),
        min_size=1,
        max_size=6,
    )
)
def test_no_history_makes_a_speed_that_no_link_had_or_locks_one_low(
    history: list[tuple[float, int, int]],
) -> None:
    carried = history[0][0]
    wire = Wire(lambda now: carried)
    wire.play(3.0)
    fastest = carried
    for speed, size, times in history:
        carried, fastest = speed, max(fastest, speed)
        for _ in range(times):
            if size:
                wire.body(min(size, speed), pause=0.3)
            else:
                wire.play(1.0)
        assert wire.pacer.speed is not None
        assert wire.pacer.speed <= 1.1 * fastest
    wire.play(KEPT * WINDOW_S + 10.0)
    assert wire.play(5.0) > 0.9
    assert wire.pacer.speed == pytest.approx(carried, rel=0.1)


def test_a_burst_counts_from_the_last_look_before_anything_had_arrived() -> None:
    burst = Burst()
    assert burst.note(0.0, 0, True, False) is None
    assert burst.short
    assert burst.note(0.1, 0, True, True) is None  # a long way
    assert burst.note(0.2, 10_000, False, True) is None
    assert burst.note(0.3, 20_000, False, False) == pytest.approx(100_000)
    assert not burst.short
    burst.note(1.0, 20_000, True, False)
    assert burst.note(1.1, 24_000, False, False) is None  # a few packets are one piece
    burst.note(2.0, 24_000, True, False)
    burst.lasts()
    assert burst.note(2.1, 64_000, False, False) is None


def test_connections_that_come_up_to_speed_are_not_taken_for_a_slow_link() -> None:
    """A far peer: what arrives doubles with each round trip, which is as long as a window."""
    pacer, arrived, now = Pacer(), 0.0, 0.0
    link = 256e5  # bytes a second
    for window in range(12):
        speed = min(1e5 * 2**window, link)
        if speed < link:
            assert pacer.rate == inf
        for _ in range(10):
            now += WINDOW_S / 10
            arrived += speed * WINDOW_S / 10
            pacer.note(now, int(arrived), True, under_way=1)
    assert pacer.speed is not None
    assert pacer.speed > 0.9 * link


def test_a_fast_link_is_not_paced() -> None:
    pacer = Pacer()
    for tick in range(100):
        pacer.note(tick * WINDOW_S, int(tick * WINDOW_S * 2 * MOST), True)
    assert pacer.rate == inf
    assert pacer.speed == pytest.approx(2 * MOST)


def test_other_ends_that_do_not_read_say_nothing_of_the_link() -> None:
    pacer = Pacer()
    for tick in range(100):
        pacer.note(tick * WINDOW_S, 0, True)
    assert (pacer.rate, pacer.speed) == (inf, None)


def test_windows_begin_anew_after_a_pause() -> None:
    windows = Windows()
    assert windows.note(0.0, 0, True) is None
    assert windows.note(0.1, 1000, False) is None
    assert windows.note(0.2, 1000, True) is None
    assert windows.note(0.4, 3000, True) is None
    assert windows.note(0.6, 5000, True) == pytest.approx(10_000)


def test_what_comes_in_is_judged_by_its_best_windows() -> None:
    speeds = IncomingSpeed()
    total = 0
    for tick in range(40):
        total += 250_000 if tick % 4 == 0 else 25_000
        speeds.note(tick * WINDOW_S, total, True)
    assert speeds.speed == pytest.approx(1e6)


def test_a_limit_that_changes() -> None:
    now = 0.0
    bucket = Bucket(None, clock=lambda: now)
    assert bucket.take(1 << 30) == 1 << 30
    now = 100.0
    bucket.change(1e6)
    sent = 0
    for _ in range(1000):
        now += 0.001
        while count := bucket.take(1 << 20):
            sent += count
    assert sent == pytest.approx(1e6, rel=0.03)
    bucket.change(None)
    assert bucket.wait() == 0


@pytest.mark.parametrize("alone", [True, False])
def test_who_helps_a_slow_peer_is_not_slow_to_the_others_after_it(alone: bool) -> None:
    wire = Wire(lambda now: 1e6 if now < 10.0 or now >= 40.0 else 5e4)
    wire.play(10.0)
    wire.alone = "slow" if alone else ""
    wire.play(30.0)  # only one is sent to, whose link is twenty times slower
    assert wire.pacer.speed is not None
    if not alone:
        assert wire.pacer.speed < 1e5  # where there is nobody else that is the node's own link
        return
    wire.alone = ""
    assert wire.pacer.speed > 8e5
    assert wire.play(1.0) > 0.8


def test_one_after_the_other_that_are_all_slow_tell_of_the_own_link() -> None:
    wire = Wire(lambda now: 1e6 if now < 10.0 else 5e4)
    wire.play(10.0)
    for peer in ("a", "b", "c"):
        wire.alone = peer
        wire.play(4.0)
    assert wire.pacer.speed is not None
    assert wire.pacer.speed < 1e5


def test_a_slow_peer_between_quick_ones_stays_the_slow_one() -> None:
    speeds = {"slow": 5e4}
    wire = Wire(lambda now: speeds.get(wire.alone, 1e6))
    wire.play(10.0)
    for peer in ("slow", "quick", "slow", "other", "slow") * 3:
        wire.alone = peer
        wire.play(3.0)
    wire.alone = ""
    assert wire.pacer.speed is not None
    assert wire.pacer.speed > 8e5


def test_the_speed_of_the_only_one_that_is_sent_to_is_learnt_and_followed_upwards() -> None:
    wire = Wire(lambda now: 1e5 if now < 10.0 else 4e5, alone="one")
    wire.play(10.0)
    assert wire.pacer.speed == pytest.approx(1e5, rel=0.15)
    wire.play(15.0)
    assert wire.pacer.speed == pytest.approx(4e5, rel=0.15)
