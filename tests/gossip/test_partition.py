"""The shares of a butterfly all-reduce against a linear-programming solver, and their cutting."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from scipy.optimize import linprog

from gossip.plans.partition import ALIGN, MIN_PART, MemberLink, cut, link_shares
from protocols.identity import PeerId


def links(
    *speeds: float, down: list[float] | None = None, silent: tuple[int, ...] = ()
) -> list[MemberLink]:
    """Members with these uploads (and downloads, if they differ); ``silent`` only merge."""
    down = down or list(speeds)
    return [
        MemberLink(PeerId(f"p{i:03}"), up, down[i], i not in silent) for i, up in enumerate(speeds)
    ]


def slowest(members: list[MemberLink], given: list[float]) -> float:
    """Seconds (times vectors a second) until the last member has sent and received everything."""
    contributors = sum(link.contributes for link in members)
    return max(
        max(
            (link.contributes * (1 - share) + share * (len(members) - 1)) / link.upload,
            (share * (contributors - link.contributes) + 1 - share) / link.download,
        )
        for link, share in zip(members, given, strict=True)
    )


def solved(members: list[MemberLink]) -> float:
    """The least possible time, by scipy: minimise t over shares f and t."""
    count, contributors = len(members), sum(link.contributes for link in members)
    rows, bounds = [], []
    for index, link in enumerate(members):
        own = float(link.contributes)
        for slope, constant, speed in (
            (count - 1 - own, own, link.upload),
            (contributors - own - 1, 1.0, link.download),
        ):
            row = [0.0] * (count + 1)
            row[index], row[count] = slope, -speed
            rows.append(row)
            bounds.append(-constant)
    found = linprog(
        [0.0] * count + [1.0],
        A_ub=rows,
        b_ub=bounds,
        A_eq=[[1.0] * count + [0.0]],
        b_eq=[1.0],
        bounds=[(0, None)] * (count + 1),
    )
    assert found.success
    return float(found.fun)


def test_equal_links_merge_equally() -> None:
    assert link_shares(links(0.25, 0.25, 0.25, 0.25)) == pytest.approx([0.25] * 4)
    parts = cut(60 * MIN_PART, links(0.25, 0.25, 0.25, 0.25))
    assert [stop - start for start, stop, _ in parts] == [15 * MIN_PART] * 4


@pytest.mark.parametrize("seed", range(30))
def test_no_shares_are_faster(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 24)
    silent = tuple(i for i in range(1, count) if rng.random() < 0.2)
    up = [10 ** rng.uniform(-2, 2) for _ in range(count)]
    down = [10 ** rng.uniform(-2, 2) for _ in range(count)]
    members = links(*up, down=down, silent=silent)
    found = link_shares(members)
    assert min(found) >= 0.0
    assert sum(found) == pytest.approx(1.0)
    assert slowest(members, found) == pytest.approx(solved(members), rel=1e-6)


@pytest.mark.parametrize("seed", range(12))
def test_no_shares_are_faster_among_links_that_differ_little(seed: int) -> None:
    """Elsewhere the slowest link's own traffic takes longest, whatever anybody merges."""
    rng = random.Random(seed)
    count = rng.randint(2, 12)
    silent = tuple(i for i in range(1, count) if rng.random() < 0.2)
    up, down = ([10 ** rng.uniform(-0.3, 0.3) for _ in range(count)] for _ in range(2))
    members = links(*up, down=down, silent=silent)
    found = link_shares(members)
    assert slowest(members, found) == pytest.approx(solved(members), rel=1e-6)


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_the_unit_of_speeds_does_not_matter(unit: float) -> None:
    """They are in bytes a second, and a vector may have a few or billions."""
    speeds = [1.0, 0.7, 1.3, 0.9]
    found = link_shares(links(*(unit * speed for speed in speeds)))
    assert found == pytest.approx(link_shares(links(*speeds)), rel=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 16, 100, 256])
def test_parts_cover_the_vector_once(count: int) -> None:
    rng = random.Random(count)
    for size in (1, MIN_PART, 2 * MIN_PART, 1_000_003, 50_000_000):
        members = links(*(10 ** rng.uniform(0, 3) for _ in range(count)))
        parts = cut(size, members)
        assert parts[0][0] == 0
        assert parts[-1][1] == size
        for (_, stop, _), (start, _, _) in pairwise(parts):
            assert stop == start
            assert stop % ALIGN == 0
        assert all(stop > start for start, stop, _ in parts)
        owners = [owner for _, _, owner in parts]
        assert len(set(owners)) == len(owners)
        assert set(owners) <= {link.peer for link in members}
        if size >= 2 * MIN_PART:
            assert min(stop - start for start, stop, _ in parts) >= MIN_PART - ALIGN


def test_parts_are_as_large_as_their_shares() -> None:
    members = links(5.0, 6.0, 7.0, 8.0)
    size = 10_000_000
    for share, (start, stop, _) in zip(link_shares(members), cut(size, members), strict=True):
        assert stop - start == pytest.approx(share * size, abs=ALIGN)


def test_who_cannot_send_merges_nothing() -> None:
    members = links(0.0, 5.0, 5.0, down=[5.0, 5.0, 5.0])
    assert link_shares(members)[0] == 0.0
    assert members[0].peer not in {owner for _, _, owner in cut(1_000_000, members)}


def test_who_only_merges_takes_work_off_the_others() -> None:
    three = links(1.0, 1.0, 1.0)
    helped = links(1.0, 1.0, 1.0, 10.0, silent=(3,))
    found = link_shares(helped)
    assert found[3] > max(found[:3])
    assert slowest(helped, found) < slowest(three, link_shares(three))


def test_one_slow_member_is_spared() -> None:
    members = links(1.0, 1.0, 1.0, 0.4)
    found = link_shares(members)
    assert found[3] < min(found[:3]) / 2
    even = slowest(members, [0.25] * 4)
    assert slowest(members, found) < even


def test_hopeless_links_share_evenly() -> None:
    assert link_shares(links(0.0, 0.0)) == [0.5, 0.5]


def test_alone() -> None:
    assert link_shares(links(0.0)) == [1.0]
    assert cut(12_345, links(1.0)) == [(0, 12_345, PeerId("p000"))]


def test_nobody_is_large_enough() -> None:
    """256 equal members and little to merge: some of them take a part each."""
    size = 10 * MIN_PART
    parts = cut(size, links(*[1.0] * 256))
    assert len(parts) == 10
    assert {stop - start for start, stop, _ in parts} == {MIN_PART}


def test_what_is_too_little_for_two_parts_goes_to_the_fastest() -> None:
    members = links(1.0, 3.0, 2.0)
    for size in (1, MIN_PART, 2 * MIN_PART - 1):
        assert cut(size, members) == [(0, size, members[1].peer)]
        assert cut(size, members, [0.2, 0.3, 0.5]) == [(0, size, members[2].peer)]


def test_what_is_just_enough_for_two_parts_goes_to_two() -> None:
    parts = cut(2 * MIN_PART, links(1.0, 1.0))
    assert [(start, stop) for start, stop, _ in parts] == [(0, MIN_PART), (MIN_PART, 2 * MIN_PART)]
    four = links(1.0, 5.0, 6.0, 4.0)  # no share of these is worth its messages
    owners = [owner for _, _, owner in cut(2 * MIN_PART, four, [0.1, 0.3, 0.4, 0.2])]
    assert owners == [four[2].peer, four[1].peer]
