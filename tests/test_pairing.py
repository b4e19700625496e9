"""Partners that follow from the membership, and exchanges that cost no more than themselves."""

from __future__ import annotations

import asyncio
import collections

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gossip.collective import Collective, Incomplete
from gossip.mailbox import Mailbox
from gossip.pairing import partner
from protocols import virtual_time
from protocols.codecs import codec
from protocols.errors import RemoteRefused
from protocols.identity import Identity, PeerId
from protocols.memory import Link, MemoryNetwork, MemoryTransport
from protocols.transport import Outgoing

PEERS = sorted(Identity.from_seed(bytes([n + 1]) * 32).peer_id for n in range(12))


@given(st.integers(1, 12), st.integers(0, 10_000), st.integers(0, 3), st.randoms())
def test_both_come_to_the_same_pair_without_a_word(
    count: int, round_: int, meeting: int, chance: object
) -> None:
    members = PEERS[:count]
    found = {me: partner(members, me, round_, b"run", meeting) for me in members}
    for me, other in found.items():
        if other is not None:
            assert other != me
            assert found[other] == me
    assert sum(other is None for other in found.values()) == count % 2
    shuffled = members[:]
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    assert partner(shuffled, members[0], round_, b"run", meeting) == found[members[0]]


def test_everybody_meets_everybody_about_as_often() -> None:
    times = collections.Counter(
        partner(PEERS[:6], PEERS[0], round_, b"run") for round_ in range(1000)
    )
    assert len(times) == 5
    assert min(times.values()) > 150
    rounds = [partner(PEERS, PEERS[0], 1, b"run", meeting) for meeting in range(6)]
    assert len(set(rounds)) > 1  # another meeting of a round is with somebody else


def test_a_member_that_only_one_knows_costs_the_others_nothing() -> None:
    """Lists that differ by one: most pairs of those who both know each other stay as they are."""
    same = 0
    for round_ in range(200):
        one = partner(PEERS[:8], PEERS[0], round_, b"run")
        other = partner(PEERS[:9], PEERS[0], round_, b"run")
        same += one == other
    assert same > 60


class Net:
    """Mailboxes on a simulated network."""

    def __init__(self, count: int, latency: float = 0.05) -> None:
        self.network = MemoryNetwork(0, link=Link(latency=latency), upload=1e6, download=1e6)
        self.peers: list[PeerId] = PEERS[:count]
        self.transports: list[MemoryTransport] = [self.network.join(p) for p in self.peers]
        self.boxes = [Mailbox(t, max_length=100_000, kept=4) for t in self.transports]

    async def close(self) -> None:
        for transport in self.transports:
            await transport.aclose()


def body(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def test_mail_waits_for_whoever_asks_for_it() -> None:
    async def main() -> None:
        net = Net(2)
        a, b = net.boxes
        assert await a.send(net.peers[1], "early", body(1, 2), timeout=5)
        found = await b.receive("early", net.peers[0], timeout=5)
        assert found is not None
        assert found.tolist() == [1, 2]
        async with asyncio.TaskGroup() as group:
            late = group.create_task(b.receive_any("late", timeout=5))
            group.create_task(a.send(net.peers[1], "late", body(3), timeout=5))
        assert late.result() is not None
        assert late.result()[0] == net.peers[0]
        assert await b.receive("late", net.peers[0], timeout=1) is None
        await net.close()

    virtual_time.run(main())


def test_mail_nobody_asks_for_makes_room_and_garbage_is_refused() -> None:
    async def main() -> None:
        net = Net(2)
        a, b = net.boxes
        for number in range(6):
            await a.send(net.peers[1], f"letter {number}", body(number), timeout=5)
        assert await b.receive("letter 0", net.peers[0], timeout=0.1) is None
        assert await b.receive("letter 5", net.peers[0], timeout=0.1) is not None
        assert not await a.send(net.peers[1], "x" * 65, body(1), timeout=5)
        assert not await a.send(net.peers[1], "long", torch.zeros(100_001).byte(), timeout=5)

        async def nothing():
            yield b""

        with pytest.raises(RemoteRefused):
            await net.transports[0].push(
                net.peers[1], "mail", b"\xff\xfe", Outgoing(0, nothing()), timeout=5
            )
        await net.close()

    virtual_time.run(main())


@pytest.mark.parametrize("name", ["fp32", "int4"])
def test_a_collective_gives_all_the_same_mean(name: str) -> None:
    async def main() -> None:
        net = Net(3)
        vectors = list(torch.randn(3, 700, generator=torch.Generator().manual_seed(0)))
        shares = [0.5, 0.3, 0.2]
        ends = [Collective(box, me) for box, me in zip(net.boxes, net.peers, strict=True)]
        async with asyncio.TaskGroup() as group:
            found = [
                group.create_task(one.mean(net.peers, "x", vector, codec(name), shares))
                for one, vector in zip(ends, vectors, strict=True)
            ]
        means = [task.result() for task in found]
        assert all(mean.mean.equal(means[0].mean) for mean in means)
        exact = sum(share * vector for share, vector in zip(shares, vectors, strict=True))
        if name == "fp32":
            assert torch.allclose(means[0].mean, exact, atol=1e-6)
        # what was merged, less what owners say encoding lost, is what all decode
        merged = sum(s * mean.sent for s, mean in zip(shares, means, strict=True))
        lost = sum(mean.lost for mean in means)
        assert torch.allclose(merged - lost, means[0].mean, atol=1e-5)
        await net.close()

    virtual_time.run(main())


def test_a_collective_without_a_member_says_whose_part_is_missing() -> None:
    async def main() -> None:
        net = Net(3)
        net.network.kill(net.peers[2])
        one = Collective(net.boxes[0], net.peers[0], patience_s=2.0)
        with pytest.raises(Incomplete) as caught:
            await one.mean(net.peers, "x", torch.ones(30), codec("fp32"), [1 / 3] * 3)
        assert net.peers[2] in caught.value.args
        await net.close()

    virtual_time.run(main())
