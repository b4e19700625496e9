"""How members are put into groups, and which groups a plan may have."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from itertools import pairwise

import pytest
from gossip_kit import PLACE, announce_of, leader, plan_of, roster_of
from hypothesis import given, settings
from hypothesis import strategies as st
from planning_kit import fresh as planned
from pydantic import ValidationError

from bootstrap.manifest import Manifest
from bootstrap.manifest_rounds import Merge
from gossip.exchange.routing import Routes
from gossip.plans.grouping import UNGROUPED, Grouping, lay_out, may_group, renewed_groups, traffic
from gossip.plans.mix import Mix
from gossip.plans.partition import MIN_PART, MemberLink
from gossip.plans.planning import Remains, renewed_plan
from gossip.plans.rules import Rules
from gossip.plans.validity import Shape, VerifiedResults, check_plan
from node.replicas.mixing import mix_of
from protocols.errors import Malformed
from protocols.identity import Identity, PeerId
from protocols.messages import Group, Part, Plan

Identities = Callable[[int], list[Identity]]
SIZE = 64 * MIN_PART
SHAPE = Shape(SIZE, ("int4",), grouped=True)


def links(count: int, *speeds: float) -> list[MemberLink]:
    """Members p000, p001, … whose links have these speeds, in turn."""
    turn = speeds or (1e6,)
    return [
        MemberLink(PeerId(f"p{n:03}"), turn[n % len(turn)], turn[n % len(turn)])
        for n in range(count)
    ]


def regions(members: list[MemberLink], *sizes: int) -> dict[PeerId, str]:
    """The first so many members in region 0, the next so many in region 1, …; the others: none."""
    found: dict[PeerId, str] = {}
    at = 0
    for number, size in enumerate(sizes):
        found |= {link.peer: f"r{number}" for link in members[at : at + size]}
        at += size
    return found


@settings(max_examples=50)
@given(
    count=st.integers(2, 90),
    sizes=st.lists(st.integers(1, 40), max_size=5),
    speeds=st.lists(st.sampled_from([1e4, 1e6, 1e8]), min_size=1, max_size=4),
    how=st.sampled_from(["region", "grid"]),
    most=st.integers(4, 100),
    silent=st.sets(st.integers(0, 89)),
    servers=st.sets(st.integers(0, 89), max_size=5),
)
def test_every_layout_can_be_worked_by(
    count: int,
    sizes: list[int],
    speeds: list[float],
    how: str,
    most: int,
    silent: set[int],
    servers: set[int],
) -> None:
    """Parts cover the vector; whoever is not at its owner has one relay at most, in its group."""
    merging = {number for number in servers if number < count} or set(range(count))
    members = [
        dataclasses.replace(link, contributes=number not in silent, merges=number in merging)
        for number, link in enumerate(links(count, *speeds))
    ]
    layout = lay_out(SIZE, members, regions(members, *sizes), Grouping(how, most))  # type: ignore[arg-type]
    assert layout.pieces[0][0] == 0
    assert layout.pieces[-1][1] == SIZE
    assert all(a[1] == b[0] for a, b in pairwise(layout.pieces))
    assert {owner for _, _, owner in layout.pieces} <= {k.peer for k in members if k.merges}
    grouped = [peer for group in layout.groups for peer in group.members]
    assert len(set(grouped)) == len(grouped)
    for group in layout.groups:
        assert 2 <= len(group.members) <= max(most, math.isqrt(count - 1) + 1)
        for relay, (_, _, owner) in zip(group.relays, layout.pieces, strict=True):
            assert (relay == 0) == (owner in group.members)
            assert relay <= len(group.members)
    parts = [Part(*piece, None) for piece in layout.pieces]
    moved = traffic(parts, layout.groups, {link.peer: link.contributes for link in members})
    assert sum(up for up, _ in moved.values()) == sum(down for _, down in moved.values())


@settings(max_examples=50)
@given(
    count=st.integers(2, 40),
    sizes=st.lists(st.integers(1, 12), max_size=4),
    how=st.sampled_from(["none", "region", "grid"]),
    silent=st.sets(st.integers(0, 39)),
    servers=st.integers(0, 3),
)
def test_traffic_is_what_the_routes_come_to(
    count: int, sizes: list[int], how: str, silent: set[int], servers: int
) -> None:
    """Counted transfer by transfer, as the exchange does them."""
    members = [
        dataclasses.replace(
            link,
            contributes=number not in silent or not number,
            merges=not servers or number < servers,
        )
        for number, link in enumerate(links(count))
    ]
    layout = lay_out(SIZE, members, regions(members, *sizes), Grouping(how, 4))  # type: ignore[arg-type]
    contributing = {link.peer: link.contributes for link in members}
    up, down = dict.fromkeys(contributing, 0), dict.fromkeys(contributing, 0)

    def move(size: int, a: PeerId, b: PeerId) -> None:
        if a != b:
            up[a] += size
            down[b] += size

    parts = [Part(*piece, None) for piece in layout.pieces]
    for number, part in enumerate(parts):
        size = part.stop - part.start
        through: dict[PeerId, PeerId] = {}
        for group in layout.groups:
            if group.relays[number] and part.owner not in group.members:
                through |= dict.fromkeys(group.members, group.members[group.relays[number] - 1])
        for relay in set(through.values()):
            brought = [p for p in contributing if contributing[p] and through.get(p) == relay]
            for peer in brought:
                move(size, peer, relay)
            if brought:
                move(size, relay, part.owner)
            move(size, part.owner, relay)
        for peer, gives in contributing.items():
            if peer in through:
                move(size, through[peer], peer)
            else:
                move(size, part.owner, peer)
                move(size * gives, peer, part.owner)
    assert traffic(parts, layout.groups, contributing) == {p: (up[p], down[p]) for p in up}


def test_sites_are_those_who_declare_one_region() -> None:
    members = links(7)
    layout = lay_out(SIZE, members, regions(members, 3, 2, 1), Grouping("region"))
    assert [group.members for group in layout.groups] == [
        ("p000", "p001", "p002"),
        ("p003", "p004"),
    ]
    for alike in (regions(members, 7), {}):  # nobody, or nothing, is told apart
        assert lay_out(SIZE, members, alike, Grouping("region")).groups == ()


@pytest.mark.parametrize("how", [Grouping("region"), Grouping("grid", 4)], ids=["sites", "grid"])
def test_who_passes_nothing_on_relays_nothing_where_others_can(how: Grouping) -> None:
    members = links(9)
    mute = {PeerId("p000"), PeerId("p004")}

    def relays(mute: set[PeerId]) -> set[PeerId]:
        layout = lay_out(SIZE, members, regions(members, 3, 3, 3), how, mute=mute)
        assert [group.members for group in layout.groups] == [
            group.members for group in lay_out(SIZE, members, regions(members, 3, 3, 3), how).groups
        ]
        return {g.members[relay - 1] for g in layout.groups for relay in g.relays if relay}

    everybody = {link.peer for link in members}
    assert relays(set()) == everybody
    assert relays(mute) == everybody - mute
    assert relays(everybody) == everybody


def test_islands_relay_for_each_other_where_servers_merge() -> None:
    """One sum leaves a site, and its members share the relaying, though one server merges all."""
    members = [dataclasses.replace(link, merges=n == 8) for n, link in enumerate(links(9))]
    for how, side in ((Grouping("region"), 4), (Grouping("grid", 4), 3)):
        layout = lay_out(SIZE, members, regions(members, 4, 4), how)
        assert {owner for _, _, owner in layout.pieces} == {"p008"}
        for group in layout.groups:
            able = set(range(1, len(group.members) + 1))
            assert set(group.relays) == ({0} if "p008" in group.members else able)
        parts = [Part(*piece, None) for piece in layout.pieces]
        moved = traffic(parts, layout.groups, {link.peer: not link.merges for link in members})
        most = max(moved[link.peer][0] for link in members[:8]) / SIZE
        assert most == pytest.approx(2 - 1 / side, rel=0.01)  # what goes to others, and 1 passed on


def test_sites_share_the_vector_as_if_each_were_one_member() -> None:
    """A site's members have one line: three at one site do not merge three times as much."""
    members = links(5)
    layout = lay_out(SIZE, members, regions(members, 3, 1, 1), Grouping("region"))
    of_first = sum(stop - start for start, stop, owner in layout.pieces if owner < "p003")
    assert of_first / SIZE == pytest.approx(1 / 3, abs=0.01)


def test_a_grid_has_rows_and_columns_of_about_the_root() -> None:
    members = links(256)
    layout = lay_out(256 * MIN_PART, members, {}, Grouping("grid", 64))
    assert [len(group.members) for group in layout.groups] == [16] * 16
    assert len(layout.pieces) == 256
    peers: dict[PeerId, set[PeerId]] = {link.peer: set() for link in members}
    for group in layout.groups:
        for peer in group.members:
            peers[peer] |= set(group.members) - {peer}
        for relay, (_, _, owner) in zip(group.relays, layout.pieces, strict=True):
            if relay:
                peers[owner].add(group.members[relay - 1])
                peers[group.members[relay - 1]].add(owner)
    assert {len(others) for others in peers.values()} == {30}
    parts = [Part(*piece, None) for piece in layout.pieces]
    everybody = dict.fromkeys(peers, True)
    most = max(up for up, _ in traffic(parts, layout.groups, everybody).values())
    plain = max(up for up, _ in traffic(parts, (), everybody).values())
    assert most / plain < 1.01


def test_no_swarm_is_so_large_that_it_has_groups_unasked() -> None:
    members = links(2 * UNGROUPED.most)
    layout = lay_out(len(members) * MIN_PART, members, regions(members, 70, 3), UNGROUPED)
    assert layout.groups == ()
    assert {owner for _, _, owner in layout.pieces} == {link.peer for link in members}


def test_small_swarms_have_no_grid() -> None:
    assert lay_out(SIZE, links(64), {}, Grouping("grid", 64)).groups == ()
    assert lay_out(SIZE, links(65), {}, Grouping("grid", 64)).groups


def test_in_a_grid_slow_links_stand_in_one_column_and_carry_less() -> None:
    members = links(16, 1e7, 1e6, 1e6, 1e6)
    layout = lay_out(SIZE, members, {}, Grouping("grid", 4))
    parts = [Part(*piece, None) for piece in layout.pieces]
    moved = traffic(parts, layout.groups, {link.peer: True for link in members})
    seconds = {link.peer: moved[link.peer][0] / link.upload for link in members}
    even = traffic(parts, (), {link.peer: True for link in members})
    assert max(seconds.values()) < 2 * SIZE / 1e6
    assert max(moved[p][0] for p in moved if p < "p001") > max(
        moved[link.peer][0] for link in members if link.upload == 1e6
    )
    assert even.keys() == moved.keys()


RULES = Rules(
    SIZE,
    SHAPE.codecs,
    lambda codec, start, stop: (stop - start) * 17 // 32,
    grouping=Grouping("region"),
)


def fresh(members: list[Identity], rules: Rules = RULES) -> Plan:
    announces = [announce_of(p, region=f"r{n % 2}") for n, p in enumerate(roster_of(members))]
    return planned(members, announces, rules=rules)


def test_a_leader_plans_groups_where_the_run_has_them(identities: Identities) -> None:
    members = identities(6)
    plan = fresh(members)
    assert sorted(len(group.members) for group in plan.groups) == [3, 3]
    assert fresh(members, dataclasses.replace(RULES, grouping=Grouping())).groups == ()
    judged = dataclasses.replace(RULES, mix=Mix(column=lambda rows, weights: rows[0]))
    assert fresh(members, judged).groups == ()  # relays would hide what it judges


def test_sites_are_planned_where_servers_merge(identities: Identities) -> None:
    members = identities(7)
    roster = roster_of(members)
    announces = [announce_of(peer, region=f"r{n % 2}") for n, peer in enumerate(roster[:6])]
    server = announce_of(roster[6], role="server", region="elsewhere", ready=False)
    plan = planned(
        members, [*announces, server], announces, dataclasses.replace(RULES, servers=True)
    )
    assert {part.owner for part in plan.parts} == {server.peer}
    assert sorted(group.members for group in plan.groups) == [roster[0:6:2], roster[1:6:2]]


def test_who_is_not_relied_on_is_in_no_group(identities: Identities) -> None:
    """Its group would wait for it in vain; it deals with every owner itself."""
    members = identities(6)
    roster = roster_of(members)
    announces = [announce_of(peer, region=f"r{n % 2}") for n, peer in enumerate(roster)]
    plan = planned(members, announces, rules=RULES, unreliable={roster[0]})
    assert sorted(group.members for group in plan.groups) == [roster[1::2], roster[2::2]]
    assert roster[0] in {c.peer for c in plan.contributors}
    everybody = planned(members, announces, rules=RULES, unreliable=set(roster))
    assert sorted(group.members for group in everybody.groups) == [roster[0::2], roster[1::2]]


def test_a_renewed_plan_has_no_relays_that_are_gone(identities: Identities) -> None:
    members = identities(6)
    plan = fresh(members)
    roster = roster_of(members)
    group = plan.groups[0]
    dead = group.members[max(group.relays) - 1]
    live = [peer for peer in roster if peer != dead]
    remains = Remains((0, 4), roster, None, {})
    renewed = renewed_plan(leader(members), PLACE, plan, remains, {dead}, live, live)
    check_plan(renewed, PLACE, RULES.shape, roster, VerifiedResults())
    assert [g.members for g in renewed.groups] == [g.members for g in plan.groups]
    routes = Routes(renewed)
    for number, (old, new) in enumerate(zip(plan.parts, renewed.parts, strict=True)):
        relays = {routes.relay_of(peer, number) for peer in roster} - {None}
        assert dead not in relays
        if old.owner != new.owner:
            assert not relays  # what was on its way to the dead owner is sent to the new one
        elif any(Routes(plan).relay_of(peer, number) not in (None, dead) for peer in roster):
            assert relays  # the others relay on


def test_who_brings_what_and_passes_on_what(identities: Identities) -> None:
    members = identities(5)
    a, b, c, d, e = roster_of(members)
    parts = (Part(0, SIZE // 2, a, None), Part(SIZE // 2, SIZE, c, None))
    plan = plan_of(
        leader(members), members, shape=SHAPE, parts=parts,
        groups=(Group((a, b), (0, 2)), Group((c, d), (2, 0))),
    )  # fmt: skip
    check_plan(plan, PLACE, SHAPE, roster_of(members), VerifiedResults())
    first, second = Routes(plan).paths(0), Routes(plan).paths(1)
    assert (first.collected, first.passed_on) == ({d: (c, d)}, {d: (c,)})
    assert (second.collected, second.relayed) == ({b: (a, b)}, {a})
    assert Routes(plan).relay_of(c, 0) == Routes(plan).relay_of(d, 0) == d
    assert Routes(plan).relay_of(b, 0) is None
    assert Routes(plan).relay_of(e, 0) is None
    silent = dataclasses.replace(plan.contributors[3], weight=0.0)
    plan = dataclasses.replace(plan, contributors=(*plan.contributors[:3], silent))
    paths = Routes(plan).paths(0)
    assert (paths.collected, paths.passed_on) == ({}, {d: (c,)})  # one slice goes straight


@pytest.mark.parametrize(
    "what", ["doubled", "a stranger", "too few relays", "outside the group", "outside the roster"]
)
def test_groups_that_are_refused(what: str, identities: Identities) -> None:
    members = identities(4)
    roster = roster_of(members)
    a, b, c, d = roster
    parts = (Part(0, SIZE // 2, a, None), Part(SIZE // 2, SIZE, c, None))
    plan = plan_of(leader(members), members, shape=SHAPE, parts=parts)
    good = (Group((a, b), (0, 1)), Group((c, d), (1, 0)))
    check_plan(dataclasses.replace(plan, groups=good), PLACE, SHAPE, roster, VerifiedResults())
    bad = {
        "doubled": (good[0], Group((b, c), (1, 0))),
        "a stranger": (Group((a, PeerId("stranger")), (0, 1)),),
        "too few relays": (Group((a, b), (0,)),),
        "outside the group": (Group((a, b), (0, 3)),),
        "outside the roster": good,
    }[what]
    changed = dataclasses.replace(plan, groups=bad)
    if what == "outside the roster":
        changed = dataclasses.replace(changed, roster=roster[1:], epoch=1)
    with pytest.raises(Malformed):
        check_plan(changed, PLACE, SHAPE, roster, VerifiedResults())


def test_survivors_relay_through_nobody_who_is_gone(identities: Identities) -> None:
    members = identities(4)
    a, b, c, d = roster_of(members)
    parts = (Part(0, SIZE // 2, c, None), Part(SIZE // 2, SIZE, d, None))
    plan = plan_of(leader(members), members, shape=SHAPE, parts=parts)
    left = dataclasses.replace(plan, roster=(b, c, d), epoch=1)
    for relays, why in (((2, 2), ""), ((1, 2), "outside the roster"), ((2, 2, 2), "other parts")):
        groups = (Group((a, b), relays),)
        changed = dataclasses.replace(left, groups=groups)
        if not why:
            check_plan(changed, PLACE, SHAPE, plan.roster, VerifiedResults())
            continue
        with pytest.raises(Malformed, match=why):
            check_plan(changed, PLACE, SHAPE, plan.roster, VerifiedResults())


def test_groups_are_refused_where_the_run_has_none(identities: Identities) -> None:
    members = identities(4)
    plan = fresh(members)
    for shape in (
        dataclasses.replace(SHAPE, grouped=False),
        dataclasses.replace(SHAPE, mix=Mix(column=lambda rows, weights: rows[0])),
    ):
        with pytest.raises(Malformed, match="groups where the run has none"):
            check_plan(plan, PLACE, shape, roster_of(members), VerifiedResults())


def test_relays_of_parts_that_change_hands_are_dropped() -> None:
    group = Group((PeerId("a"), PeerId("b")), (1, 2, 2))
    before = [Part(n, n + 1, PeerId("x"), None) for n in range(3)]
    after = [before[0], dataclasses.replace(before[1], owner=PeerId("y")), before[2]]
    (renewed,) = renewed_groups([group], before, after, {PeerId("b")})
    assert renewed.relays == (0, 0, 2)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rounds": {"groups": "grid", "codec": "int2"}}, "codec int2"),
        ({"rounds": {"groups": "region"}, "merge": {"trust": "open"}}, "relays add them up"),
        ({"rounds": {"groups": "region"}, "merge": {"rule": "median"}}, "relays add them up"),
        ({"rounds": {"groups": "region"}, "merge": {"rule": "geometric-median"}}, "relays add"),
    ],
)
def test_runs_that_cannot_have_groups(changes: dict[str, dict[str, str]], why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        Manifest.model_validate(changes)


def test_runs_that_can() -> None:
    for rule in ("auto", "mean", "clip"):
        manifest = Manifest.model_validate(
            {"rounds": {"groups": "region", "max_group": 8}, "merge": {"rule": rule}}
        )
        assert may_group(mix_of(manifest.merge))
    for rule in ("median", "trimmed", "geometric-median", "centered-clip"):
        assert not may_group(mix_of(Merge(rule=rule)))
