"""Groups with relays on a simulated network: the same mean, fewer links, and every fault."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter

import pytest
import torch
from exchange_kit import Peer, World, run, same_bytes, until
from grouped_kit import BIG, SIZE, counted, grouped, truthful

from gossip.plans.grouping import Grouping, renewed_groups
from protocols.identity import PeerId
from protocols.messages import Contributor, Group


@pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize(
    ("count", "sites", "how"),
    [(4, 2, Grouping("region")), (7, 3, Grouping("region")), (12, 1, Grouping("grid", 4))],
    ids=["2 sites of 2", "3 sites of 3, 3 and 1", "a grid of 12"],
)
def test_all_hold_the_same_bytes_and_they_are_the_mean(
    codec: str, count: int, sites: int, how: Grouping
) -> None:
    async def scene() -> None:
        async with grouped(count, codec=codec, how=how, sites=sites) as here:
            assert here.plan.groups
            here.work()
            await until(here.whole)
            assert same_bytes(here.peers)
            wanted = torch.stack([peer.values for peer in here.peers]).mean(0)
            error = ((here.peers[0].mean() - wanted).norm() / wanted.norm()).item()
            assert error < {"fp32": 1e-6, "bf16": 0.005, "int8": 0.02, "int4": 0.25}[codec]
            for peer in here.peers:
                assert (peer.faults, peer.lost_, peer.refusals) == ([], [], [])
            assert counted(here, here.peers[0]) == {peer.me: {0} for peer in here.peers}

    run(scene)


@pytest.mark.parametrize("how", [Grouping("region"), Grouping("grid", 4)], ids=["sites", "grid"])
def test_the_bits_are_those_of_the_butterfly_where_sums_are_exact(how: Grouping) -> None:
    """Small whole numbers and weights that are powers of two: no order of adding matters."""
    found = []

    async def scene(grouping: Grouping) -> None:
        async with grouped(8, codec="fp32", how=grouping) as here:
            for peer in here.peers:
                peer.values = (peer.values * 64).round()
            here.work()
            await until(here.whole)
            found.append(here.peers[3].mean())

    run(lambda: scene(how))
    run(lambda: scene(Grouping()))
    assert torch.equal(*found)


def test_unequal_weights_and_members_without_a_contribution() -> None:
    async def scene() -> None:
        async with grouped(6, codec="fp32") as here:
            weights = [100.0, 250.0, 0.0, 40.0, 0.0, 10.0]
            contributors = tuple(
                Contributor(peer.me, weight, 1000, True)
                for peer, weight in zip(here.peers, weights, strict=True)
                if peer is not here.peers[4]
            )
            here.plan = dataclasses.replace(here.plan, contributors=contributors)
            here.work()
            await until(here.whole)
            assert same_bytes(here.peers)
            pairs = list(zip(here.peers, weights, strict=True))
            wanted = sum(peer.values * weight for peer, weight in pairs) / sum(weights)
            torch.testing.assert_close(here.peers[0].mean(), wanted, rtol=1e-5, atol=1e-6)

    run(scene)


class Wire:
    """Bytes and links, as a network that is tapped shows them."""

    def __init__(self, here: World) -> None:
        self.sent: Counter[tuple[PeerId, PeerId]] = Counter()
        here.network.tamper = self.tap

    def tap(self, sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
        self.sent[sender, receiver] += len(data)
        return data

    def between(self, inside: set[PeerId]) -> int:
        """Bytes that left a site or came to it."""
        return sum(n for (a, b), n in self.sent.items() if (a in inside) != (b in inside))

    def links(self, peer: PeerId) -> int:
        """With how many others a member has exchanged tensors."""
        return len({frozenset(pair) for pair in self.sent if peer in pair})


def test_between_sites_goes_one_mean_and_one_merged_part() -> None:
    crossed = {}

    async def scene(name: str, grouping: Grouping) -> None:
        async with grouped(8, how=grouping) as here:
            wire = Wire(here)
            here.work()
            await until(here.whole)
            await asyncio.sleep(1.0)
            site = {peer.me for peer in here.peers[:4]}
            whole = here.peers[0].wiring.codec.encoded_size(0, SIZE)
            crossed[name] = wire.between(site) / whole

    run(lambda: scene("sites", Grouping("region")))
    run(lambda: scene("butterfly", Grouping()))
    assert crossed["butterfly"] == pytest.approx(2 * 4, rel=0.05)  # each of 4: half of it, 4 ways
    assert crossed["sites"] == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_site_sends_servers_one_mean(servers: int) -> None:
    """And gets one merged part, which its members pass on to each other, each as much as any."""

    async def scene() -> None:
        async with grouped(8 + servers, servers=servers) as here:
            wire = Wire(here)
            here.work()
            await until(here.whole)
            await asyncio.sleep(1.0)
            assert same_bytes(here.peers)
            islands = here.peers[:8]
            wanted = torch.stack([peer.values for peer in islands]).mean(0)
            error = ((here.peers[0].mean() - wanted).norm() / wanted.norm()).item()
            assert error < 0.02
            assert counted(here, here.peers[0]) == {peer.me: {0} for peer in islands}
            whole = here.peers[0].wiring.codec.encoded_size(0, SIZE)
            crossed = wire.between({peer.me for peer in here.peers[:4]}) / whole
            assert crossed == pytest.approx(2, rel=0.05)
            most = max(peer.exchange.bytes_sent for peer in islands) / whole
            assert most == pytest.approx(2 - 1 / 4, rel=0.05)  # its slices, and 1 passed on

    run(scene)


def test_in_a_grid_a_member_has_links_to_its_row_and_its_column_alone() -> None:
    async def scene() -> None:
        async with grouped(16, how=Grouping("grid", 8), size=600_000) as here:
            wire = Wire(here)
            here.work()
            await until(here.whole)
            await asyncio.sleep(1.0)
            assert {wire.links(peer.me) for peer in here.peers} == {6}  # 3 and 3, not 15
            whole = here.peers[0].wiring.codec.encoded_size(0, 600_000)
            most = max(peer.exchange.bytes_sent for peer in here.peers)
            assert most < 2.0 * whole  # a butterfly: 1.875
            for peer in here.peers:  # seals, marks and trailers are a few bytes
                sent = peer.exchange.bytes_sent / peer.exchange.elements_sent
                assert sent == pytest.approx(whole / 600_000, rel=0.05)

    run(scene)


def open_parts(here: World, dead: Peer) -> int:
    """How many parts can be had without a leader who replaces a dead owner."""
    return sum(part.owner != dead.me for part in here.plan.parts)


@pytest.mark.parametrize("when", [0.0, 0.35, 0.7, 1.4, 2.1, 2.8])
@pytest.mark.parametrize("how", ["kill", "freeze"])
def test_a_relay_that_dies_costs_its_group_nothing_but_time(when: float, how: str) -> None:
    """Its own work is merged as far as it came; its group's is merged whole, by every owner."""

    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            dead = here.peers[1]
            others = [peer for peer in here.peers if peer is not dead]
            here.work()
            await asyncio.sleep(when)
            getattr(here.network, how)(dead.me)
            wanted = open_parts(here, dead)
            end = await until(
                lambda: all(
                    sum(key[2] != dead.me for key in p.exchange.parts) == wanted for p in others
                )
            )
            # without a leader who hears of it: until members find their relay overdue, and P more
            expected, patience = here.plan.expected_s, here.plan.patience_s
            assert end < 2 * (2 * patience + expected) + expected + patience
            for peer in others:
                assert truthful(here, peer)
                held = counted(here, peer)
                assert all(held[other.me] == {0} for other in others)
            for key in others[0].exchange.parts.keys() - set(dead.exchange.parts):
                first = others[0].exchange.parts[key][1]
                assert all(
                    torch.equal(first, other.exchange.parts[key][1])
                    for other in others
                    if key[2] != dead.me
                )
            assert not set(others[0].faults + others[-1].faults) - {dead.me}

    run(scene)


def test_a_relay_is_not_to_blame_for_who_is_gone_by_the_plan() -> None:
    """It brings nothing of a member that is dead, nor is that member asked for it."""

    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            dead, *others = here.peers
            here.network.kill(dead.me)
            here.work(without=(dead,))
            await asyncio.sleep(0.1)
            plan = here.plan
            contributors = tuple(
                dataclasses.replace(c, active=c.peer != dead.me) for c in plan.contributors
            )
            live = {peer.me for peer in others}
            groups = renewed_groups(plan.groups, plan.parts, plan.parts, live)
            renewed = dataclasses.replace(plan, ballot=1, contributors=contributors, groups=groups)
            here.work(renewed, without=(dead,))
            wanted = open_parts(here, dead)

            def there(peer: Peer) -> bool:
                return sum(key[2] != dead.me for key in peer.exchange.parts) == wanted

            await until(lambda: all(map(there, others)))
            assert {who for peer in others for who, _ in peer.refusals} <= {dead.me}
            assert all(truthful(here, peer) for peer in others)
            assert all(counted(here, p)[o.me] == {0} for p in others for o in others)

    run(scene)


@pytest.mark.parametrize("another", [True, False], ids=["another", "none"])
def test_who_is_no_relay_any_more_sends_its_own_slice_as_all_do(another: bool) -> None:
    """The owners never saw the plan in which it was one, and so do not ask it for anything."""

    async def scene() -> None:
        async with grouped(6) as here:
            plan = here.plan

            def moved(group: Group) -> Group:
                turned = (r % len(group.members) + 1 if r and another else 0 for r in group.relays)
                return Group(group.members, tuple(turned))

            later = dataclasses.replace(plan, ballot=1, groups=tuple(map(moved, plan.groups)))
            owner = here.of(plan.parts[0].owner)
            here.work(without=(owner,))
            await asyncio.sleep(0.01)
            here.work(later)
            end = await until(here.whole)
            assert end < plan.expected_s + plan.patience_s  # nobody was waited for in vain
            assert same_bytes(here.peers)
            assert counted(here, owner) == {peer.me: {0} for peer in here.peers}
            assert not [peer.faults for peer in here.peers if peer.faults]

    run(scene)


def test_a_relay_that_trickles_is_dropped() -> None:
    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            slow = here.peers[1]
            node = here.network.node(slow.me)
            assert node is not None
            node.upload = 4e6 / 40
            here.work()
            wanted = open_parts(here, slow)
            others = [peer for peer in here.peers if peer is not slow]
            end = await until(
                lambda: all(
                    sum(key[2] != slow.me for key in p.exchange.parts) == wanted for p in others
                )
            )
            assert end < 12.0  # seconds; its bytes alone would take over a minute
            assert all(truthful(here, peer) for peer in others)
            assert all(counted(here, p)[o.me] == {0} for p in others for o in others)
            assert any(who == slow.me for p in others for who, _ in p.refusals)

    run(scene)


def test_a_relay_that_spoils_what_it_passes_on_harms_nobody() -> None:
    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            liar = here.peers[1]

            def spoil(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                passing = (sender, name) == (liar.me, "merged") and len(data) > 1000
                own = any(part.owner == liar.me for part in here.plan.parts)
                if passing and own and receiver == here.peers[2].me:
                    return data[:-400] + bytes(400)
                return data

            here.network.tamper = spoil
            here.work()
            wanted = open_parts(here, liar)
            victim = here.peers[2]
            await until(lambda: sum(key[2] != liar.me for key in victim.exchange.parts) == wanted)
            assert truthful(here, victim)
            assert any(who == liar.me for who, _ in victim.refusals)

    run(scene)


def test_a_sum_that_does_not_decode_is_refused_and_its_group_comes_by_itself() -> None:
    async def scene() -> None:
        async with grouped(6, codec="fp32", size=BIG, upload=4e6) as here:
            relay = here.peers[1]

            def tamper(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                spoilt = (sender, name) == (relay.me, "sum") and len(data) > 100
                return b"\xff" * 4 + data[4:] if spoilt else data

            here.network.tamper = tamper
            here.work()
            await until(here.whole)
            for peer in here.peers:
                assert truthful(here, peer)
                assert counted(here, peer) == {other.me: {0} for other in here.peers}
                assert peer.faults == [] or peer is relay
            refusals = [r for p in here.peers for r in p.refusals]
            assert {who for who, _ in refusals} == {relay.me}

    run(scene)
