"""Newcomers whose download takes longer than the rounds that are kept anyway."""

from __future__ import annotations

import pytest
from catching_up_kit import BYTES, NEWCOMERS, at_one_place, merging, played, scene
from exchange_kit import until
from toy_replica import RUN

from gossip.exchange.readers import AWAY_S, Readers
from protocols.asking import ask
from protocols.bounds import MAX_PEERS
from protocols.identity import Identity
from protocols.messages import CertificateRequest, Certificates

KEPT = 5  # rounds, as ``rounds.replay_rounds`` is by default
THINK_S = 2.0
SLOW = BYTES / (10 * THINK_S)  # a download takes some ten rounds

pytestmark = pytest.mark.usefixtures("remembered_signatures")


@pytest.mark.parametrize("fragments", [1, 3])
def test_a_download_of_more_rounds_than_are_kept_is_followed_by_a_replay(fragments: int) -> None:
    async def story() -> None:
        async with scene(think=(THINK_S, THINK_S), fragments=fragments, keep_rounds=KEPT) as swarm:
            await swarm.swarm.committed(KEPT + 5)
            begins = swarm.founders[0].replica.place.round
            newcomer = swarm.join(NEWCOMERS[0], fragments * SLOW)
            members = [*swarm.founders, newcomer]
            await until(lambda: swarm.downloads == fragments, 200.0)
            assert swarm.founders[0].replica.place.round > begins + KEPT + 2
            await until(lambda: at_one_place(members), 200.0)
            assert swarm.downloads == fragments
            await until(merging(members), 200.0)
            assert swarm.downloads == fragments
            assert newcomer.rejected == []

    played(story)


def test_who_replays_comes_nearer_and_who_wants_a_proof_does_not() -> None:
    async def story() -> None:
        async with scene(2) as swarm:
            await swarm.swarm.committed(KEPT)
            source, asking = swarm.founders
            readers = source.swarm.readers
            readers.copied(asking.peer, 0, 1)
            for count, round_, needed in ((1, 4, 0), (8, 3, 2)):
                request = CertificateRequest(RUN, 0, round_, count)
                transport = asking.swarm.wiring.transport
                await ask(
                    transport, source.peer, "certificates", request, Certificates, timeout=5.0
                )
                assert readers.needed(0) == needed

    played(story)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


PEERS = [Identity.from_seed(bytes([n]) * 32).peer_id for n in range(3)]


def test_rounds_are_needed_from_the_earliest_on_that_somebody_reads() -> None:
    clock = Clock()
    readers = Readers(clock)
    assert readers.needed(0) is None
    readers.copied(PEERS[0], 0, 10)
    readers.copied(PEERS[1], 0, 20)
    assert readers.needed(0) == 9  # its certificate shows where the reader stands
    assert readers.needed(1) is None
    readers.replays(PEERS[0], 0, 11)
    assert readers.needed(0) == 10
    readers.replays(PEERS[2], 0, 3)  # has read no copy
    assert readers.needed(0) == 10
    readers.copied(PEERS[0], 0, 30)  # another one, later
    assert readers.needed(0) == 19


def test_who_reads_one_fragment_is_on_the_way_in_those_that_it_has_read() -> None:
    clock = Clock()
    readers = Readers(clock)
    readers.copied(PEERS[0], 0, 10)
    for clock.now in (0.6 * AWAY_S, 1.2 * AWAY_S):
        readers.copied(PEERS[0], 1, 40)
    assert readers.needed(0) == 9
    clock.now += AWAY_S
    assert readers.needed(0) is None
    assert readers.needed(1) is None


def test_who_replays_a_fragment_needs_nothing_more_of_the_others() -> None:
    clock = Clock()
    readers = Readers(clock)
    for fragment in range(2):
        readers.copied(PEERS[0], fragment, 10)
    for clock.now in (0.6 * AWAY_S, 1.2 * AWAY_S):
        readers.replays(PEERS[0], 1, 40)  # it is in office, and has a slow link
    assert readers.needed(0) is None
    assert readers.needed(1) == 39
    readers.replays(PEERS[0], 0, 50)  # it needs no more than any member
    assert readers.needed(0) is None


def test_readers_are_bounded() -> None:
    readers = Readers(Clock())
    for number in range(MAX_PEERS + 1):
        readers.copied(Identity.from_seed(number.to_bytes(32, "big")).peer_id, 0, number + 1)
    assert readers.needed(0) == 1  # the first is forgotten
