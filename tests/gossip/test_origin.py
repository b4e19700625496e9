"""How many identities one place may bring into a swarm."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from simulated_swarm import simulated_swarm
from strangers import MOST, Strangers

from gossip.membership.origin import origin, origin_of
from protocols.errors import Crowded, TransportError
from protocols.memory import virtual_time


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("203.0.113.7:4390", "203.0.113.7"),
        ("[2001:db8:1:2ff::9]:4390", "2001:db8:1:200::/56"),
        ("[2001:db8:1:200::1]:1", "2001:db8:1:200::/56"),
        ("[::ffff:203.0.113.7]:1", "203.0.113.7"),
        ("[64:ff9b::203.0.113.7]:1", "203.0.113.7"),
        ("relay/203.0.113.7:4390/12D3KooW", "203.0.113.7"),
        ("Island.Example.org:4390", "island.example.org"),
        ("127.0.0.1:4390", ""),
        ("[::1]:4390", ""),
        ("localhost:1", ""),
        ("", ""),
        ("nonsense", ""),
    ],
)
def test_what_stands_for_a_place(address: str, place: str) -> None:
    assert origin_of(address) == place


def test_a_connection_counts_for_more_than_a_claim_unless_it_comes_through_a_gateway() -> None:
    claim = ["198.51.100.1:4390"]
    assert origin("8.8.8.8:55555", claim) == ("8.8.8.8", True)
    assert origin("", claim) == ("198.51.100.1", False)
    assert origin("10.0.0.1:55555", claim) == ("198.51.100.1", False)
    assert origin("10.0.0.1:55555", []) == ("10.0.0.1", True)
    assert origin("", []) == ("", False)
    assert origin("", ["127.0.0.1:9", "198.51.100.1:4390"]) == ("198.51.100.1", False)


def test_many_behind_one_address_are_taken_and_a_flood_is_not() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            one, other = swarm.members.values()
            strangers = Strangers(swarm, one)
            assert strangers.come(MOST, "8.8.8.8:1") == MOST
            assert strangers.told == []
            assert strangers.come(500, "8.8.8.8:2") == 0
            (why,) = strangers.told  # once, not for each
            assert "too many identities from 8.8.8.8" in why
            assert strangers.come(3, "9.9.9.9:1") == 3  # others get in all the same
            # what it claims does not help it, nor whom it has pass it on under that claim
            assert strangers.come(50, "8.8.8.8:3", "198.51.100.1:4390") == 0
            assert strangers.come(50, "", "8.8.8.8:4390", directly=False) == 0
            assert len(one.swarm.membership.islands) == 1 + MOST + 3
            assert one.swarm.membership.announcement(other.peer) is not None

    virtual_time.run(main())


def test_who_is_gone_makes_room_for_others_of_its_place() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            one, _ = swarm.members.values()
            strangers = Strangers(swarm, one)
            assert strangers.come(2 * MOST, "8.8.8.8:1") == MOST
            await asyncio.sleep(60.0)  # nothing is heard of them any more
            assert strangers.come(2 * MOST, "8.8.8.8:1") == MOST

    virtual_time.run(main())


def test_a_claim_is_corrected_once_it_is_seen_from_where_it_connects() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            one, _ = swarm.members.values()
            strangers = Strangers(swarm, one)
            assert strangers.come(MOST, "8.8.8.8:1") == MOST
            peer, envelope = strangers.envelope("198.51.100.1:4390")
            strangers.presence.learn(envelope)  # somebody passes it on
            strangers.at[peer] = "8.8.8.8:1"
            with pytest.raises(Crowded):
                strangers.presence.learn(envelope, peer)

    virtual_time.run(main())


def test_claims_of_an_address_crowd_out_nobody_who_comes_from_there() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            one, _ = swarm.members.values()
            strangers = Strangers(swarm, one)
            flood = strangers.come(500, "", "8.8.8.8:4390", directly=False)
            assert flood == MOST
            assert strangers.come(2 * MOST, "8.8.8.8:1") == MOST

    virtual_time.run(main())


def test_who_is_one_too_many_is_told_so() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            one, _ = swarm.members.values()
            strangers, answers = Strangers(swarm, one), Counter[str]()
            for _ in range(MOST + 2):
                peer, envelope = strangers.envelope()
                strangers.at[peer] = "8.8.8.8:1"
                transport = swarm.network.join(peer)
                try:
                    await transport.call(one.peer, "announce", envelope, timeout=5.0)
                    answers["taken"] += 1
                except TransportError as error:
                    answers["too many" if "too many identities" in str(error) else str(error)] += 1
            assert answers == {"taken": MOST, "too many": 2}

    virtual_time.run(main())


FLOODS = [
    (),
    ("127.0.0.1:9",),
    ("127.0.0.1:9", "8.8.8.8:4390"),
    ("x*.example.org:4390",),
    ("198.51.100.*:4390", "8.8.8.8:4390"),
    ("relay/198.51.100.*:4390/12D3KooW",),
]


@pytest.mark.parametrize("claims", FLOODS, ids=str)
def test_who_is_connected_is_counted_there_whoever_hands_its_announcement_on(
    claims: tuple[str, ...],
) -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            assert strangers.come(100, "8.8.8.8:1", *claims, directly=False) == MOST

    virtual_time.run(main())


@pytest.mark.parametrize("connected", [True, False], ids=["it connects", "it is called"])
def test_who_is_found_somewhere_after_it_was_let_in_is_counted_there(connected: bool) -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            assert strangers.come(3 * MOST, "", "198.51.100.*:4390", directly=False) == 3 * MOST
            assert len(strangers.there) == 3 * MOST
            for peer in strangers.at:
                (strangers.at if connected else strangers.found)[peer] = "8.8.8.8:1"
                strangers.presence.contact(peer)
            assert strangers.there == list(strangers.at)[:MOST]
            (why,) = strangers.told
            assert "too many identities from 8.8.8.8" in why
            # nobody is told of them any more, and nothing that they say now lets them in, ...
            assert len(strangers.presence.known().announces) == 2 + MOST
            last = strangers.made
            for peer in strangers.at:
                strangers.at[peer] = strangers.found[peer] = ""
            _, envelope = strangers.announcement(last, "203.0.113.9:1", sequence=2)
            with pytest.raises(Crowded):
                strangers.presence.learn(envelope)
            # ... until there is room
            await asyncio.sleep(60.0)
            _, envelope = strangers.announcement(last, "203.0.113.9:1", sequence=3)
            strangers.presence.learn(envelope)
            assert strangers.there == [list(strangers.at)[last - 1]]

    virtual_time.run(main())


def test_members_that_name_no_place_share_one_and_observers_need_none() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            strangers.presence.note(addresses=("192.168.1.5:4390",))
            assert strangers.come(MOST, "", directly=False) == MOST - 1  # the other member is one
            assert strangers.come(50, "", "127.0.0.1:9", directly=False) == 0
            assert strangers.come(50, "", "127.0.0.1:9", directly=False, role="server") == 0
            assert strangers.come(50, "", directly=False, role="observer") == 50
            # who is seen somewhere is let in all the same
            assert strangers.come(3, "9.9.9.9:1") == 3
            assert strangers.come(3, "9.9.9.9:1", "127.0.0.1:9", directly=False) == 3

    virtual_time.run(main())


def test_who_has_lost_its_relay_is_not_taken_for_one_without_a_place() -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            for relay in ("9.9.9.9", "8.8.8.8"):
                where = f"relay/{relay}:4390/12D3KooW"
                assert strangers.come(MOST, "", where, directly=False) == MOST
            for number in range(1, 2 * MOST + 1):
                _, envelope = strangers.announcement(number, sequence=2)
                strangers.presence.learn(envelope)
            assert len(strangers.there) == 2 * MOST

    virtual_time.run(main())


@pytest.mark.parametrize("mine", ["127.0.0.1:4390", "192.168.1.5:4390", ""])
@pytest.mark.parametrize("directly", [True, False])
def test_members_of_one_machine_are_not_limited(mine: str, directly: bool) -> None:
    """They name loopback first where they joined by it, and what leads to the network after it."""

    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            if mine:
                strangers.presence.note(addresses=(mine,))
            else:  # it does not know that it is on loopback, but for who comes by it
                strangers.presence.note(addresses=("8.8.8.8:4390",))
                assert strangers.come(1, "127.0.0.1:5", "127.0.0.1:7") == 1
            at = "127.0.0.1:5" if directly else ""
            claims = ("127.0.0.1:7", "192.168.1.5:7")
            assert strangers.come(50, at, *claims, directly=directly) == 50
            if mine != "192.168.1.5:4390":
                assert strangers.come(50, at, "127.0.0.1:7", directly=directly) == 50

    virtual_time.run(main())


@pytest.mark.parametrize("directly", [True, False])
@pytest.mark.parametrize("claim", ["192.168.1.*:4390", "x*.example.org:4390", "9.9.9.*:4390"])
def test_a_network_behind_a_private_address_is_not_taken_for_one_place(
    claim: str, directly: bool
) -> None:
    async def main() -> None:
        async with simulated_swarm(2, think=(90.0, 90.0)) as swarm:
            await asyncio.sleep(2.0)
            strangers = Strangers(swarm, next(iter(swarm.members.values())))
            assert strangers.come(50, "172.17.0.1:5", claim, directly=directly) == 50
            for peer in strangers.at:
                strangers.presence.contact(peer)
            assert len(strangers.there) == 50

    virtual_time.run(main())
