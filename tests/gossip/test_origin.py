"""How many identities one place may bring into a swarm."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from simulated_swarm import Member, SimulatedSwarm, simulated_swarm
from toy_replica import RUN

from gossip.membership.origin import origin, origin_of
from protocols.envelope import seal
from protocols.errors import Crowded, TransportError
from protocols.identity import Identity, PeerId
from protocols.memory import virtual_time

MOST = 8


@pytest.mark.parametrize(
    ("address", "place"),
    [
        ("203.0.113.7:4390", "203.0.113.7"),
        ("[2001:db8:1:2ff::9]:4390", "2001:db8:1:200::/56"),
        ("[2001:db8:1:200::1]:1", "2001:db8:1:200::/56"),
        ("[::ffff:203.0.113.7]:1", "203.0.113.7"),
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


class Strangers:
    """Identities that announce themselves to one member."""

    def __init__(self, swarm: SimulatedSwarm, member: Member) -> None:
        self.swarm, self.member = swarm, member
        self.presence = member.swarm.presence
        self.at: dict[PeerId, str] = {}
        self.made = 0
        self.told: list[str] = []
        self.presence.membership.most_from_one_place = MOST
        self.presence.observed = lambda peer: self.at.get(peer, "")
        self.presence.on_rejected = lambda peer, error: self.told.append(str(error))

    def envelope(self, claim: str = "") -> tuple[PeerId, bytes]:
        """The announcement of a new one."""
        self.made += 1
        identity = Identity.from_seed(self.made.to_bytes(4, "big") * 8)
        status = replace(
            self.presence.status, peer=identity.peer_id, addresses=(claim,) if claim else ()
        )
        expires = self.presence.wall() + 30.0
        return identity.peer_id, seal(
            identity, status, purpose="announce", run=RUN, expires=expires, sequence=1
        )

    def come(self, count: int, at: str, claim: str = "", *, directly: bool = True) -> int:
        """So many announce themselves from an address, or others pass it on; how many are taken."""
        taken = 0
        for _ in range(count):
            peer, envelope = self.envelope(claim)
            self.at[peer] = at
            try:
                self.presence.learn(envelope, peer if directly else None)
            except Crowded:
                continue
            taken += 1
        return taken


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
