"""Large rosters: who gets votes, how a plan reaches all, and what if those on the way die."""

from __future__ import annotations

import dataclasses
import math

import pytest
from exchange_kit import until
from gossip_kit import EVERYBODY, RUN, leader, plan_of
from simulated_swarm import SimulatedSwarm, simulated_swarm

from gossip.membership.members import Patience
from gossip.plans.grouping import Grouping
from gossip.rounds.spreading import check_passed, legs, passed
from protocols.errors import BadSignature
from protocols.identity import PeerId
from protocols.memory import virtual_time
from protocols.messages import Passed, Plan, Vote, Votes
from protocols.wire import decode_any

PATIENCE = Patience(heartbeat_s=2.0)


def test_everybody_is_on_one_leg_and_none_is_long() -> None:
    for count in (0, 1, 2, 16, 17, 255):
        peers = [PeerId(f"p{number}") for number in range(count)]
        found = legs(peers)
        assert sorted(peer for leg in found for peer in leg) == sorted(peers)
        assert all(leg for leg in found)
        assert max([len(found), *map(len, found)], default=0) <= math.isqrt(count) + 1


def test_what_is_passed_on_is_its_authors() -> None:
    three = EVERYBODY[:3]
    author = leader(three)
    note = passed(author, RUN, plan_of(author, three))
    check_passed(RUN, dataclasses.replace(note, to=(three[0].peer_id,)))  # whoever passes it on
    for change in (
        {"author": EVERYBODY[3].peer_id},
        {"body": note.body[:-1] + b"x"},
        {"fragment": 1},
        {"signature": bytes(64)},
    ):
        with pytest.raises(BadSignature):
            check_passed(RUN, dataclasses.replace(note, **change))  # type: ignore[arg-type]
    with pytest.raises(BadSignature):
        check_passed(b"x" * 32, note)


def tapped(swarm: SimulatedSwarm) -> list[tuple[PeerId, PeerId, type]]:
    """What is said about rounds from now on: by whom, to whom, what."""
    said: list[tuple[PeerId, PeerId, type]] = []

    def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
        if name == "round" and data:
            message = decode_any(data, *KINDS)
            if isinstance(message, Passed):
                message = decode_any(message.body, Plan, Votes)
            said.append((sender, receiver, type(message)))
        return data

    swarm.network.tamper = tap
    return said


KINDS = (Plan, Vote, Votes, Passed)


def test_messages_of_a_round_grow_with_the_members_and_not_with_their_square() -> None:
    async def main() -> None:
        async with simulated_swarm(24, size=40_000, think=(1.0, 1.2), patience=PATIENCE) as swarm:
            said = tapped(swarm)
            await swarm.committed(1, 20.0)
            swarm.agree()
            assert len(said) < 4 * 24 + 10  # a plan and votes to each, a vote from each to three
            plans = [sender for sender, _, kind in said if kind is Plan]
            busiest = max(plans.count(sender) for sender in plans)
            assert busiest <= math.isqrt(24) + 1
            assert not any(member.rejected for member in swarm.living())

    virtual_time.run(main())


@pytest.mark.parametrize("who", ["the leader", "who passes it on"])
def test_votes_that_get_lost_with_whoever_had_them(who: str) -> None:
    """It dies when it has the votes: the others commit the same all the same, within seconds."""

    async def main() -> None:
        async with simulated_swarm(24, size=40_000, think=(1.0, 1.2), patience=PATIENCE) as swarm:
            dead: list[PeerId] = []

            def tap(sender: PeerId, receiver: PeerId, name: str, data: bytes) -> bytes:
                if name == "round" and data and not dead:
                    message = decode_any(data, *KINDS)
                    telling = isinstance(message, Passed) and message.to
                    if telling and isinstance(decode_any(message.body, Plan, Votes), Votes):
                        dead.append(sender if who == "the leader" else receiver)
                        swarm.network.freeze(dead[0])
                        swarm.stopped.add(dead[0])
                return data

            swarm.network.tamper = tap
            at = await until(lambda: bool(dead), 20.0, every=0.05)
            assert await swarm.committed(1, 20.0) - at < 10.0
            swarm.agree()
            await swarm.committed(2, 60.0)
            swarm.agree()

    virtual_time.run(main())


@pytest.mark.parametrize(
    "count",
    [32, *(pytest.param(n, marks=[pytest.mark.slow, pytest.mark.timeout(900)]) for n in (64, 256))],
)
def test_many_members_in_a_grid(count: int) -> None:
    """Exact after two hops: all slices of all who were ready are in what comes out."""

    async def main() -> None:
        size, patience = 16 * 16 * 1024, Patience(heartbeat_s=count / 32)
        async with simulated_swarm(
            count, size=size, grouping=Grouping("grid", 16), think=(2.0, 2.2), patience=patience
        ) as swarm:
            await swarm.committed(1, 60.0)
            swarm.agree()
            outcome = swarm.living()[0].replica.certificates[0].outcome
            assert len(outcome.next_roster) == count
            assert len(outcome.contributors) >= count // 2
            for result in outcome.parts:
                assert [i.elements for i in result.included] == [
                    result.stop - result.start for _ in outcome.contributors
                ]
            assert not any(member.rejected for member in swarm.living())

    virtual_time.run(main())
