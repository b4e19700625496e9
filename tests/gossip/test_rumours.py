"""How news travel in large swarms: what is passed on, to whom, and that all hear of it."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest
from exchange_kit import until
from simulated_swarm import Member, simulated_swarm

from gossip.membership.members import Liveness, Patience
from gossip.membership.rumours import BATCH_BYTES, EVERYBODY, FANOUT, MET, Rumours
from protocols.identity import PeerId
from protocols.memory import virtual_time

PEERS = [PeerId(f"peer-{number:03}") for number in range(100)]


def test_only_the_newest_of_each_peer_is_passed_on_and_once() -> None:
    rumours = Rumours(PEERS[0])
    rumours.add(PEERS[1], b"first")
    rumours.add(PEERS[2], b"other")
    rumours.add(PEERS[1], b"second")
    assert rumours.batch() == (b"other", b"second")
    assert rumours.batch() == ()


def test_a_batch_holds_no_more_than_a_message_and_the_rest_follows() -> None:
    rumours = Rumours(PEERS[0])
    envelopes = [bytes([number]) * 10_000 for number in range(9)]
    for peer, envelope in zip(PEERS, envelopes, strict=False):
        rumours.add(peer, envelope)
    batches = []
    while batch := rumours.batch():
        assert sum(map(len, batch)) <= BATCH_BYTES
        batches.append(batch)
    assert [envelope for batch in batches for envelope in batch] == envelopes
    rumours.add(PEERS[0], bytes(2 * BATCH_BYTES))
    assert len(rumours.batch()) == 1  # alone it goes in any case


def test_what_has_come_before_is_known_and_the_memory_of_it_is_bounded() -> None:
    rumours = Rumours(PEERS[0])
    assert not rumours.met(b"news")
    assert rumours.met(b"news")
    for number in range(2 * MET):
        rumours.met(number.to_bytes(4, "big"))
    assert rumours.met((2 * MET - 1).to_bytes(4, "big"))
    assert not rumours.met(b"news")
    assert len(rumours._met) <= MET


def test_what_is_remembered_of_strangers_takes_little_memory() -> None:
    rumours = Rumours(PEERS[0])
    tracemalloc.start()
    try:
        for number in range(MET):
            rumours.met(number.to_bytes(4, "big") * 1250)
        assert tracemalloc.get_traced_memory()[0] < 1_000_000  # of 20 MB
    finally:
        tracemalloc.stop()


def test_a_few_are_told_and_only_who_is_there() -> None:
    rumours = Rumours(PEERS[0])
    there = set(PEERS[10:])
    drawn = [tuple(rumours.targets(PEERS, there.__contains__)) for _ in range(200)]
    assert all(len(set(peers)) == FANOUT for peers in drawn)
    assert {peer for peers in drawn for peer in peers} == there
    assert set(rumours.targets(PEERS[:2], lambda peer: True)) == set(PEERS[:2])
    one, same = Rumours(PEERS[3]), Rumours(PEERS[3])  # so simulations can be repeated
    assert one.targets(PEERS, there.__contains__) == same.targets(PEERS, there.__contains__)


@pytest.mark.parametrize("count", [EVERYBODY, 2 * EVERYBODY + 8])
def test_all_hear_of_everything_within_seconds_and_of_who_died(count: int) -> None:
    """Below the limit directly; above it without N² messages."""

    async def main() -> None:
        patience = Patience(heartbeat_s=2.0)
        async with simulated_swarm(count, think=(90.0, 90.0), patience=patience) as swarm:
            members = list(swarm.members.values())
            await asyncio.sleep(3.0)
            speaker, others = members[0], members[1:]
            before = sum(m.swarm.wiring.transport.stats.requests_by_name["gossip"] for m in members)
            speaker.swarm.chains[0].update(steps=77)

            def heard(one: Member) -> bool:
                return one.swarm.membership.islands[speaker.peer].announce.steps == 77

            await asyncio.sleep(1.0)
            assert sum(map(heard, others)) > 0.8 * len(others)
            await asyncio.sleep(2 * patience.heartbeat_s)
            assert all(map(heard, others))
            after = sum(m.swarm.wiring.transport.stats.requests_by_name["gossip"] for m in members)
            assert (after > before) == (count > EVERYBODY)
            # five seconds: each says three things, and hears and passes on those of the others
            assert after - before < count * FANOUT * 5.0 / 0.1
            await swarm.kill(speaker)
            now = asyncio.get_running_loop().time
            await until(
                lambda: (
                    not any(
                        one.swarm.membership.liveness(speaker.peer, now()) is Liveness.ALIVE
                        for one in others
                    )
                ),
                every=0.5,
            )
            assert not any(one.rejected for one in others)

    virtual_time.run(main())
