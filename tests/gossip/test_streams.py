"""Over long ways a member's share is several parts, each with connections of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import pytest
from exchange_kit import until
from gossip_kit import SHAPE, announce_of, roster_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_kit import fresh
from simulated_swarm import SimulatedSwarm, simulated_swarm

from gossip.membership.trips import LATE, RoundTrip
from gossip.plans.dividing import ALL, LEAST, by_owner, divided, in_turn, parts_of
from gossip.plans.mix import Mix
from gossip.plans.partition import ALIGN, MemberLink
from gossip.plans.planning import MAX_PRODUCTS
from gossip.plans.rules import Rules
from protocols.identity import Identity, PeerId
from protocols.lanes.streams import MOST
from protocols.memory import virtual_time
from protocols.memory.transport import Link

FAST = 6e6  # bytes a second


def link(name: str = "a", speed: float = FAST) -> MemberLink:
    return MemberLink(PeerId(name), speed, speed)


def test_one_over_short_ways_and_more_the_longer_they_are() -> None:
    trips = (0.0, 0.03, 0.05, 0.08, 0.14, 0.3)
    assert [parts_of(link(), trip, 4) for trip in trips] == [1, 1, 1, 4, 7, MOST]


def test_as_many_as_the_link_fills_and_a_member_can_serve() -> None:
    assert parts_of(link(speed=1e6), 0.15, 4) == 3  # 50 kB for each of the others are under way
    assert parts_of(link(speed=1e5), 0.15, 4) == 1
    many = [parts_of(link(speed=1e9), 0.3, members) for members in (1, 2, 4, 9, 25, 100)]
    assert many == [1, MOST, MOST, ALL // 8, 1, 1]


def test_whoever_plans_is_as_far_away_as_half_of_the_others() -> None:
    members = [link(name) for name in "abcd"]
    trips = {PeerId("b"): 0.1, PeerId("c"): 0.02, PeerId("d"): 0.16}
    assert list(by_owner(PeerId("a"), members, trips).values()) == [5, 5, 1, 8]
    assert set(by_owner(PeerId("a"), members, {}).values()) == {1}


def test_the_shortest_round_trip_of_late_counts() -> None:
    trip = RoundTrip.first(0.5)  # behind a queue
    trip.add(0.1)
    trip.add(0.4)
    assert trip.shortest == 0.1
    for _ in range(LATE):  # the way has become longer
        trip.add(0.3)
    assert trip.shortest == 0.3


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 2_000_000), min_size=1, max_size=5), count=st.integers(0, 20))
def test_parts_cover_what_was_one(sizes: list[int], count: int) -> None:
    starts = [sum(sizes[:n]) // ALIGN * ALIGN for n in range(len(sizes))]
    ends = [*starts[1:], sum(sizes)]
    pieces = [(a, b, PeerId(str(n))) for n, (a, b) in enumerate(zip(starts, ends, strict=True))]
    found = divided(pieces, {owner: count for _, _, owner in pieces})
    assert found[0][0] == 0
    assert found[-1][1] == sum(sizes)
    assert all(a[1] == b[0] for a, b in pairwise(found))
    largest = max(stop - start for start, stop, _ in pieces)
    for start, stop, owner in pieces:
        own = [(a, b) for a, b, whose in found if whose == owner]
        assert (own[0][0], own[-1][1]) == (start, stop)
        assert stop - start < largest or len(own) == max(1, min(count, largest // LEAST))
        assert len(own) == 1 or min(b - a for a, b in own) > LEAST - 2 * ALIGN
        assert max(b - a for a, b in own) < max(largest / max(1, count), 2 * LEAST) + 2 * ALIGN


def test_shares_that_differ_are_cut_into_parts_of_one_size() -> None:
    """All connections have as much of a link, so no owner's slices are over before the others'."""
    pieces = [(0, 2**19, PeerId("a")), (2**19, 2**21, PeerId("b")), (2**21, 2**22, PeerId("c"))]
    found = divided(pieces, dict.fromkeys("abc", 8))
    assert Counter(owner for _, _, owner in found) == {"a": 2, "b": 6, "c": 8}
    assert {stop - start for start, stop, _ in found} == {2**18}


def test_near_members_shares_stay_whole_and_make_those_of_far_ones_no_fewer() -> None:
    pieces = [(0, 2**21, PeerId("near")), (2**21, 3 * 2**20, PeerId("far"))]
    found = divided(pieces, {PeerId("near"): 1, PeerId("far"): 8})
    assert Counter(owner for _, _, owner in found) == {"near": 1, "far": 8}


def test_slices_go_to_one_owner_after_the_other_each_member_in_an_order_of_its_own() -> None:
    owners = [PeerId(owner) for owner in "aaabccd"]
    orders = {me: [owners[n] for n in in_turn(owners, PeerId(me))] for me in "abcd"}
    assert {me: "".join(order) for me, order in orders.items()} == {
        "a": "acbdaca",
        "b": "acdabca",
        "c": "acdabca",
        "d": "acabdca",
    }


def planned(members: list[Identity], mix: Mix, away_s: float) -> Counter[PeerId]:
    """How many parts each merges, of a vector of 4 M elements."""
    roster = roster_of(members)
    announces = [announce_of(peer, upload=FAST, download=FAST) for peer in roster]
    rules = Rules(
        4_000_000, SHAPE.codecs, lambda codec, start, stop: (stop - start) * 17 // 32, mix=mix
    )
    plan = fresh(members, announces, rules=rules, trips=dict.fromkeys(roster, away_s))
    return Counter(part.owner for part in plan.parts)


def test_a_leader_plans_them(identities: Callable[[int], list[Identity]]) -> None:
    assert set(planned(identities(4), Mix(), 0.01).values()) == {1}
    assert set(planned(identities(4), Mix(), 0.2).values()) == {MOST}


def test_a_plan_that_shows_products_stays_small(
    identities: Callable[[int], list[Identity]],
) -> None:
    mix = Mix(weigh=lambda products, weights: weights)
    for count in (4, 8, 12, 16):
        parts = planned(identities(count), mix, 0.2)
        assert parts.total() * count**2 <= max(MAX_PRODUCTS, count**3)
    assert set(planned(identities(4), mix, 0.2).values()) == {MOST}
    assert set(planned(identities(16), mix, 0.2).values()) == {1}


SIZE = 8 * 2 * LEAST


def owners_of(swarm: SimulatedSwarm, number: int) -> Counter[PeerId]:
    """How many parts of a round each has merged, as its certificate has it."""
    replica = next(iter(swarm.members.values())).replica
    found = next(c for c in replica.certificates if c.outcome.round == number)
    return Counter(result.owner for result in found.outcome.parts)


@pytest.mark.parametrize(("latency", "several"), [(0.01, False), (0.05, True)])
def test_a_swarm_goes_by_the_round_trips_that_it_has_measured(
    latency: float, several: bool
) -> None:
    async def main() -> None:
        away = Link(latency=latency)
        async with simulated_swarm(
            4, size=SIZE, link=away, uploads=[FAST] * 4, think=(1.0, 1.1)
        ) as swarm:
            members = swarm.members.values()
            await until(lambda: min(len(m.replica.history) for m in members) >= 12, 120.0)
            newest = max(c.outcome.round for c in next(iter(members)).replica.certificates)
            assert (owners_of(swarm, newest).total() > 4) == several
            assert not any(member.rejected for member in members)
            swarm.agree()

    virtual_time.run(main())


def test_what_a_dead_member_was_to_merge_is_shared_among_the_others() -> None:
    async def main() -> None:
        away = Link(latency=0.05)
        async with simulated_swarm(
            4, size=SIZE, link=away, uploads=[FAST] * 4, think=(1.0, 1.1)
        ) as swarm:
            dead, *rest = swarm.members.values()
            chain = rest[0].swarm.chains[0]

            def amid() -> bool:
                plan = chain.exchange.plan
                parts = [] if plan is None else plan.parts
                return len(parts) > 8

            await until(amid, 120.0)
            number, plan = chain.exchange.round, chain.exchange.plan
            assert plan is not None
            swarm.network.freeze(dead.peer)
            await until(lambda: all(len(m.replica.history) > number for m in rest), 120.0)
            found = next(c for c in rest[0].replica.certificates if c.outcome.round == number)
            merged = {part.start: part.owner for part in found.outcome.parts}
            heirs = {merged[part.start] for part in plan.parts if part.owner == dead.peer}
            assert len(heirs) > 1
            assert dead.peer not in merged.values()
            swarm.agree()

    virtual_time.run(main())
