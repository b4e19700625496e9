"""What stands in front of a link, and what a sender makes of it."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from pacing_kit import QUEUE_S, Wire

from protocols.lanes.standing_queue import TARGET_S, UNEVEN, StandingQueue, standing


@pytest.mark.parametrize("jitter", [0.0, 0.01, 0.06])
@pytest.mark.parametrize("speed", [2.5e6, 2e7, 6e7])
def test_who_is_told_what_is_under_way_keeps_a_link_busy_and_its_queue_from_overflowing(
    speed: float, jitter: float
) -> None:
    wire = Wire(lambda now: speed, jitter, tells=True)
    wire.play(4.0)
    wire.queues.clear()
    assert wire.play(20.0) > 0.99
    assert wire.pacer.speed == pytest.approx(speed, rel=0.08)
    assert TARGET_S / 2 < fmean(wire.queues) < 0.8 * QUEUE_S
    assert sum(queue < 0.001 for queue in wire.queues) < 0.01 * len(wire.queues)
    assert sum(queue > 0.98 * QUEUE_S for queue in wire.queues) < 0.02 * len(wire.queues)


@pytest.mark.parametrize("late", [0.03, 0.06, 0.1])
def test_a_queue_that_is_none_of_ours_takes_little_of_the_link(late: float) -> None:
    """Acknowledgements wait behind what others send: sending slower does not help."""
    wire = Wire(lambda now: 2.5e6, 0.01, tells=True, others=lambda now: late)
    wire.play(4.0)
    shares = [wire.play(2.0) for _ in range(30)]
    assert fmean(shares) > 0.9
    assert min(shares) > 0.85
    assert wire.pacer.speed == pytest.approx(2.5e6, rel=0.1)


def test_a_queue_that_comes_and_goes_takes_little_of_the_link() -> None:
    draw = random.Random(3)
    others = [draw.uniform(0, 0.08) for _ in range(100)]
    wire = Wire(lambda now: 2.5e6, 0.01, tells=True, others=lambda now: others[int(now)])
    wire.play(4.0)
    assert wire.play(80.0) > 0.95
    assert wire.pacer.speed == pytest.approx(2.5e6, rel=0.1)


def test_a_link_that_was_thought_slow_is_found_though_others_queues_hide_it() -> None:
    """What stands in front of others' links must not keep anybody below his own."""
    wire = Wire(lambda now: 2e6 if now < 10 else 2.5e6, 0.01, tells=True, others=lambda now: 0.025)
    wire.play(10.0)
    wire.play(10.0)
    assert wire.play(10.0) > 0.95


@pytest.mark.parametrize("length", [0.6, 0.8, 1.0, 1.2, 1.5, 1.6, 1.7, 1.75, 1.8, 2.0])
def test_rounds_that_end_with_their_probes_hide_no_faster_link(length: float) -> None:
    """What stands in queues a window after a probe is not heard where the round is over by then."""
    wire = Wire(lambda now: 1e7 if now < 12 else 1.2e7, 0.004, tells=True, others=lambda now: 0.012)
    found = []
    while wire.now < 22.0:
        wire.play(length)
        wire.play(0.1, wanting=False)
        found.append(wire.pacer.speed or 0.0)
    assert found[3] == pytest.approx(1e7, rel=0.02)
    few_windows = length < 1.2
    assert found[-1] == pytest.approx(1.2e7, rel=0.1 if few_windows else 0.03)


@pytest.mark.parametrize("away", [0.02, 0.08, 0.2, 0.3])
@pytest.mark.parametrize("faster", [2.5, 4.0])
def test_a_long_way_that_was_thought_slow_is_found_as_soon(away: float, faster: float) -> None:
    """What is on its way for a round trip is no queue, though it is more than the speed says."""
    wire = Wire(lambda now: 2e6 if now < 10 else faster * 2e6, 0.01, tells=True, away=away)
    wire.play(10.0)
    assert wire.pacer.speed == pytest.approx(2e6, rel=0.1)
    while (wire.pacer.speed or 0.0) < 0.9 * faster * 2e6:
        wire.play(1.0)
        assert wire.now < 20.0
    wire.play(2.0)
    wire.queues.clear()
    assert wire.play(20.0) > 0.95
    assert sum(queue > 0.98 * QUEUE_S for queue in wire.queues) < 0.05 * len(wire.queues)


@pytest.mark.parametrize("away", [0.02, 0.08, 0.2])
def test_rounds_over_a_long_way_tell_its_speed(away: float) -> None:
    """Each begins with a round trip in which nothing arrives."""
    wire = Wire(lambda now: 6e6, 0.01, tells=True, away=away)
    for _ in range(12):
        wire.play(2.5)
        wire.play(1.0, wanting=False)
    assert wire.pacer.speed == pytest.approx(6e6, rel=0.1)


@pytest.mark.parametrize("quick", [0.3, 0.55, 0.8, 1.05])
@pytest.mark.parametrize("last", ["", "other"])
def test_a_slow_peer_in_the_first_windows_slows_nobody_down(quick: float, last: str) -> None:
    wire = Wire(lambda now: 1e7 if now < quick or now > 2 else 5e5, tells=True)
    wire.play(quick - 0.03)
    wire.alone = last  # of the others, which have all they need after a look
    wire.play(0.03)
    wire.alone = "slow"
    wire.play(2 - quick)
    wire.alone = ""
    assert wire.pacer.rate > 6e6
    wire.play(2.0)
    assert wire.pacer.speed == pytest.approx(1e7, rel=0.1)


def test_a_connection_that_ends_leaves_no_queue_behind() -> None:
    """What it was given and never arrived counts as given no more, neither now nor then."""
    stands, trip, speed = StandingQueue(), 0.5, 2e6
    for tick in range(17):
        now = 0.05 * tick
        given = speed * now
        under_way = min(given, speed * trip)
        lost = 600_000 * (2 <= tick < 7)  # under way on a connection that is cut then
        stands.look(now, int(given) + lost, under_way + lost, trip, True)
        if tick in (6, 11, 16):
            stands.over(0.3, speed, came=True)
    assert stands.seconds is not None
    assert stands.seconds < 0.06  # what was given from one look to the next


def test_what_was_sent_before_the_last_round_trip_stands_in_a_queue() -> None:
    stands = StandingQueue()
    for tick in range(11):  # 50 kB in each, of which 80 kB have not arrived
        stands.look(0.025 * tick, 50_000 * tick, 80_000 * (tick > 0), 0.025, True)
        if tick % 5 == 0:
            stands.over(0.125, 2e6, came=True)
    assert stands.seconds == pytest.approx((80_000 - 50_000) / 2e6)


def test_one_peer_that_reads_slowly_is_no_queue() -> None:
    assert standing([]) == standing([0, 0]) == 0.0
    assert standing([40_000, 50_000, 60_000]) == 150_000
    assert standing([40_000, 50_000, 60_000, 4_000_000]) == 150_000 + UNEVEN * 55_000
