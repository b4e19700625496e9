"""Who is suspected when: cables, satellites, loaded machines and closed laptops."""

from __future__ import annotations

import asyncio
import random

import pytest
from exchange_kit import until
from gossip_kit import announce_of
from simulated_swarm import simulated_swarm

from gossip.membership.members import Liveness, Membership
from gossip.membership.silence import MOST_LATE_S, Rhythm, Wakefulness, silence_s
from gossip.membership.trips import RoundTrip
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.memory.transport import Link

ME, A = PeerId("me"), PeerId("a")
BEAT = 1.0


def trip_of(seconds: float) -> RoundTrip:
    trip = RoundTrip.first(seconds)
    for _ in range(60):
        trip.add(seconds)
    return trip


def rhythm_of(gaps: list[float]) -> Rhythm:
    rhythm = Rhythm()
    for gap in gaps:
        rhythm.add(gap, BEAT)
    return rhythm


REGULAR = [BEAT] * 60


def test_a_regular_peer_on_a_short_link_has_a_heartbeat_and_three_time_outs() -> None:
    assert silence_s(BEAT, rhythm_of(REGULAR), trip_of(0.0003), 4.0) == pytest.approx(1.6)


def test_a_satellite_has_as_much_longer_as_its_answers_take() -> None:
    assert silence_s(BEAT, rhythm_of(REGULAR), trip_of(0.6), 4.0) == pytest.approx(2.8, abs=0.1)


def test_nobody_is_judged_by_what_is_not_measured() -> None:
    few = rhythm_of([BEAT] * 3)
    assert silence_s(BEAT, few, trip_of(0.001), 4.0) == 4.0
    assert silence_s(BEAT, rhythm_of(REGULAR), None, 4.0) == 4.0
    assert silence_s(BEAT, rhythm_of([5.0] * 60), None, 4.0) > 5.0  # what is known counts


def test_a_loaded_machine_is_given_what_it_usually_takes_and_loses_it_again() -> None:
    chance = random.Random(1)
    loaded = [BEAT + chance.expovariate(2.0) for _ in range(60)]
    rhythm = rhythm_of(loaded)
    forgiven = silence_s(BEAT, rhythm, trip_of(0.01), 4.0)
    assert sum(gap > forgiven for gap in loaded[20:]) <= 1
    for _ in range(60):
        rhythm.add(BEAT, BEAT)
    assert silence_s(BEAT, rhythm, trip_of(0.01), 4.0) < 1.7


def test_many_announcements_at_once_say_no_more_than_one() -> None:
    """What happened between heartbeats is told as well: the rhythm shall not be lost in it."""
    slow = rhythm_of([3.0] * 60)
    for _ in range(20):
        slow.add(0.01, BEAT)
    assert slow.longest > 2.0


def test_one_outage_is_no_rhythm() -> None:
    rhythm = rhythm_of([*REGULAR, 500.0])
    assert rhythm.longest < 1.5
    assert rhythm_of([*REGULAR, *[6.0] * 8]).longest > 5.0  # this is


def test_nobody_makes_the_others_wait_for_ever() -> None:
    assert silence_s(BEAT, rhythm_of([90.0] * 60), trip_of(30.0), 4.0) == BEAT + MOST_LATE_S


def test_only_what_a_stall_is_more_than_usual_is_a_stall() -> None:
    awake = Wakefulness()
    now = 0.0
    for _ in range(40):
        assert not awake.dazed(0.002)
        assert awake.woke(now, now + 0.002) == 0.0
        now += 0.25
    assert awake.dazed(0.2)
    assert awake.woke(now, now + 0.2) == pytest.approx(0.2)
    for _ in range(40):  # loaded from now on: it is as late as that every time
        now += 0.5
        assert awake.woke(now, now + 0.2) == pytest.approx(0.2)
    assert not awake.dazed(0.2)
    assert awake.dazed(0.4)


def test_one_stall_counts_once_however_many_timers_it_held_up() -> None:
    awake = Wakefulness()
    assert awake.woke(10.0, 13.0) == pytest.approx(3.0)
    assert awake.woke(11.0, 13.0) == 0.0
    assert awake.woke(12.0, 13.5) == pytest.approx(0.5)


def heard_regularly(seconds: float = 0.001) -> tuple[Membership, float]:
    membership = Membership(ME)
    membership.on_announce(announce_of(A), b"", 0, 0.0)
    for number in range(1, 30):
        membership.on_announce(announce_of(A), b"", number, float(number))
        membership.on_answer(A, seconds)
    return membership, 29.0


@pytest.mark.parametrize(("seconds", "silent"), [(0.0003, 1.6), (0.05, 1.6), (0.6, 2.8)])
def test_membership_goes_by_what_it_measured(seconds: float, silent: float) -> None:
    membership, now = heard_regularly(seconds)
    assert membership.liveness(A, now + silent - 0.1) is Liveness.ALIVE
    assert membership.liveness(A, now + silent + 0.1) is Liveness.SUSPECT
    assert membership.liveness(A, now + 4 * silent + 10.0) is Liveness.DEAD


@pytest.mark.parametrize("closed", [0.5, 30.0, 36_000.0])
def test_a_closed_lid_makes_nobody_suspect(closed: float) -> None:
    """The clock ran on, and nothing could be heard: only what comes after it is silence."""
    membership, now = heard_regularly()
    awake = Wakefulness()
    membership.forgive(awake.woke(now + 1.0, now + 1.0 + closed), now + 1.0 + closed)
    now += 1.0 + closed
    assert membership.liveness(A, now + 0.5) is Liveness.ALIVE
    assert membership.liveness(A, now + 0.7) is Liveness.SUSPECT


def test_forgiving_makes_nobody_heard_in_the_future() -> None:
    membership, now = heard_regularly()
    membership.on_contact(A, now + 5.0)
    membership.forgive(4.0, now + 5.0)
    assert membership.liveness(A, now + 5.0 + 1.7) is Liveness.SUSPECT


def test_answers_are_awaited_as_long_as_they_take() -> None:
    membership, _ = heard_regularly(0.0003)
    assert membership.answer_s(A, 1.0) == pytest.approx(0.6)
    membership, _ = heard_regularly(0.6)
    assert membership.answer_s(A, 1.0) == pytest.approx(1.8, rel=0.05)
    assert membership.answer_s(ME, 1.0) == 1.0


@pytest.mark.parametrize(("latency", "least", "most"), [(0.00015, 0.9, 1.8), (0.3, 1.7, 4.0)])
def test_a_silent_member_is_suspected_as_its_link_asks_for(
    latency: float, least: float, most: float
) -> None:
    """Whole swarms, with rounds under way: a cable and a satellite; and nobody without reason."""

    async def main() -> None:
        async with simulated_swarm(3, link=Link(latency=latency), think=(1.0, 1.5)) as swarm:
            members = list(swarm.members.values())
            silent, *others = members
            memberships = [member.swarm.presence.membership for member in others]
            now = asyncio.get_running_loop().time
            suspected: list[bool] = []

            def all_alive() -> bool:
                suspected.extend(
                    view.liveness(member.peer, now()) is not Liveness.ALIVE
                    for view in memberships
                    for member in members
                )
                return now() > began + 40.0

            await until(lambda: min(len(m.replica.history) for m in members) >= 2)
            began = now()
            await until(all_alive, 60.0)
            assert not any(suspected)
            swarm.network.freeze(silent.peer)
            at = now()
            end = await until(
                lambda: all(
                    view.liveness(silent.peer, now()) is Liveness.SUSPECT for view in memberships
                ),
                20.0,
            )
            assert least < end - at < most

    virtual_time.run(main())
