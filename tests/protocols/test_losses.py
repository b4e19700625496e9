"""When a connection is left to BBR: packets are lost and no queue was on the way."""

from __future__ import annotations

from collections import Counter

from protocols.lanes.losses import HOSTS, OFTEN, QUEUE_S, SETTLED, SHORT_S, Losses
from protocols.lanes.socket import Told
from protocols.lanes.streams import FAR_S

FAR, HERE = 0.08, SHORT_S / 2  # seconds, of round trips


def asks(told: list[Told]) -> list[bool]:
    losses = Losses()
    return [losses.look(one) for one in told]


def lossy(round_trip: float, queue: float, looks: int) -> list[Told]:
    """Each look finds one more segment that was sent again."""
    return [Told(round_trip, 0, round_trip + queue, again) for again in range(1, looks + 1)]


def test_a_far_way_that_loses_without_a_queue_is_left_to_bbr_once() -> None:
    assert asks(lossy(FAR, QUEUE_S / 2, OFTEN + 3)) == [False] * (OFTEN - 1) + [True] + [False] * 3


def test_what_a_full_queue_drops_is_nobodys_fault() -> None:
    assert not any(asks(lossy(FAR, QUEUE_S, 20)))


def test_nearby_what_is_lost_is_soon_made_good() -> None:
    assert not any(asks(lossy(HERE, 0.0, 20)))


def test_only_looks_that_find_more_lost_count() -> None:
    assert not any(asks([Told(FAR, 0, FAR, OFTEN)] * 20))


def test_a_system_that_tells_nothing_changes_nothing() -> None:
    assert not any(asks([Told()] * 20))


def test_a_connection_that_was_opened_behind_a_queue_goes_by_the_others_to_its_host() -> None:
    shortest: dict[str, float] = {}
    assert not Losses("peer", shortest).look(Told(HERE, 0, HERE, 0))
    late, elsewhere = Losses("peer", shortest), Losses("other", shortest)
    looks = lossy(FAR, 0.0, OFTEN)
    assert not any(late.look(one) for one in looks)
    assert any(elsewhere.look(one) for one in looks)


def test_what_is_remembered_of_hosts_is_bounded() -> None:
    shortest: dict[str, float] = {}
    for number in range(HOSTS + 2):
        Losses(str(number), shortest).look(Told(FAR, 0, FAR, 0))
    assert len(shortest) <= HOSTS


def test_a_way_is_long_once_by_the_shortest_round_trip_to_its_host() -> None:
    shortest: dict[str, float] = {}
    near, behind, far = (Losses(host, shortest) for host in ("near", "near", "far"))
    found = Counter[str]()
    for _ in range(2 * SETTLED):
        near.look(Told(HERE, 0, HERE, 0))
        behind.look(Told(2 * FAR_S, 0, 2 * FAR_S, 0))  # it was opened behind a queue
        far.look(Told(FAR_S, 0, FAR_S, 0))
        found.update(near=near.far(), behind=behind.far(), far=far.far())
    assert found == {"near": 0, "behind": 0, "far": 1}


def test_a_first_round_trip_may_be_that_of_a_queue() -> None:
    one = Losses()
    waits = [2 * FAR_S] * (SETTLED - 1) + [HERE] * SETTLED
    assert not any(one.look(Told(wait, 0, wait, 0)) or one.far() for wait in waits)
